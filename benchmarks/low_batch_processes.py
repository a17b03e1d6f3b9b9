"""Cells of :mod:`benchmarks.low_batch` in processes: made ready side by side, then measured one by one.

What is made ready (exports, engines, what peers compile) takes a core for up to minutes a cell, and the GPU
hardly at all. Nothing is measured before every process is ready or was told to stop.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from . import low_batch_contestants as who
from .low_batch_configuration import Group, at_most

#: About how many seconds of a core it takes to make a cell ready beside torch.compile; 30 for others.
SECONDS = {
    "densenet201": 100, "densenet121": 60, "resnet152": 50, "efficientnet_b0": 50,
    "mobilenet_v3_large": 40, "convnext_tiny": 35, "resnet50": 25, "squeezenet1_1": 15, "resnet18": 12,
    "vgg16": 12,
}  # fmt: skip

#: A process gets cells of one network and data type for about so many of them.
TASK_SECONDS = 110

#: After the time to make ready, a process that does not answer is ended.
GRACE_S = 15.0

#: Compilers' own processes end a little after those that they work for: the first cell waits so long.
SETTLE_S = 4.0

#: A cell takes no longer than this, unless a process hangs.
LONGEST_S = 600.0


@dataclass(frozen=True)
class Cell:
    """A network, a data type and a batch."""

    network: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.network} {self.dtype} batch {self.batch}"

    @property
    def seconds(self) -> float:
        """About how long it takes a core to make it ready."""
        return SECONDS.get(self.network, 30)


def tasks_of(cells: Sequence[Cell], apart: bool = False) -> list[list[Cell]]:
    """Returns the cells in groups of one network and data type, or each apart, for a process each."""
    if apart:
        return [[cell] for cell in cells]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.network, cell.dtype), []).append(cell)
    found = []
    for group in groups.values():
        count = math.ceil(sum(cell.seconds for cell in group) / TASK_SECONDS)
        found += [group[first::count] for first in range(min(count, len(group)))]
    return found


def part(cells: Sequence[Cell], which: int, parts: int) -> list[Cell]:
    """Returns the share ``which``, from 1, of so many parts of about the same work, in the cells' order."""
    shares: list[list[Cell]] = [[] for _ in range(parts)]
    for task in sorted(tasks_of(cells), key=lambda task: -sum(cell.seconds for cell in task)):
        least = min(shares, key=lambda share: sum(cell.seconds for cell in share))
        least.extend(task)
    return [cell for cell in cells if cell in shares[which - 1]]


def _serve(cells: list[Cell], options: Any, folder: str, seconds: float, pipe: Connection) -> None:
    """A process of its own: makes cells ready, says so, and measures those that it is told."""
    until = perf_counter() + seconds
    logging.disable(logging.CRITICAL)  # compilers write pages where they are told to stop
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        try:
            model = who.Model(cells[0].network, None, Path(folder), options.device)
            group = Group(model, cells[0].dtype, options)
            for cell in cells:
                group.prepare(cell.batch, until)
            for cell in cells:  # what is left of them comes after the times
                with suppress(TimeoutError), at_most(until - perf_counter()):
                    group.same_bits(cell.batch)
        except Exception as error:  # PyTorch's have no common base
            pipe.send(who.reason(error))
            return
        pipe.send("")
        clock = None
        while True:
            batch = pipe.recv()
            clock = clock or who.Clock(options.device)
            try:
                pipe.send(group.measure(batch, clock))
            except Exception as error:
                pipe.send(who.reason(error))


@dataclass
class _Worker:
    """A process and the cells that it is for."""

    cells: list[Cell]
    pipe: Connection
    process: Any
    ready: bool = False
    fault: str = ""

    def end(self, fault: str = "") -> None:
        self.fault = self.fault or fault
        self.ready = False
        self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()

    def ask(self, batch: int, seconds: float) -> dict[str, Any] | str:
        """Returns what was measured, or why nothing was."""
        try:
            self.pipe.send(batch)
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.end("its process ended")
        else:
            self.end(f"not measured within {seconds:.0f} s")
        return self.fault


def measure(
    cells: Sequence[Cell], options: Any, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[Cell, dict[str, Any] | str]]:
    """Yields every cell, in order, with what was found or why nothing was.

    Args:
        options: of the command; ``prepare`` and ``limit`` are seconds from now.
        folder: for the exported networks, shared by all processes.
        say: takes a line about how far it is.
    """
    began = perf_counter()
    # A core each: PyTorch's threads and compilers would each take all.
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    context = multiprocessing.get_context("spawn")
    # A search takes minutes: cells of one network would wait for each other.
    waiting, workers = tasks_of(cells, "max-autotune" in options.peers), []
    try:
        running: dict[Connection, _Worker] = {}
        while waiting or running:
            passed = perf_counter() - began
            while waiting and len(running) < options.jobs and passed < options.prepare:
                task = waiting.pop(0)
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(task, options, str(folder), options.prepare - passed, there),
                    daemon=False,
                )
                process.start()
                there.close()
                workers.append(_Worker(task, here, process))
                running[here] = workers[-1]
            over = options.prepare + GRACE_S - passed
            if over <= 0:
                break
            for pipe in wait(list(running), timeout=min(over, 5)):
                worker = running.pop(pipe)
                try:
                    worker.fault = pipe.recv()
                except EOFError:
                    worker.fault = "its process ended"
                worker.ready = not worker.fault
                said = worker.fault or f"ready after {perf_counter() - began:.0f} s"
                say(f"{worker.cells[0]} and {len(worker.cells) - 1} more: {said}")
                if worker.fault:
                    worker.end()
        for worker in running.values():
            worker.end(f"not ready after {options.prepare + GRACE_S:.0f} s")
            say(f"{worker.cells[0]} and {len(worker.cells) - 1} more: {worker.fault}")
        of = {cell: worker for worker in workers for cell in worker.cells}
        sleep(min(SETTLE_S, max(0.0, options.limit - (perf_counter() - began))))
        for cell in cells:
            worker, left = of.get(cell), options.limit - (perf_counter() - began)
            if worker is None:
                yield cell, f"not begun after {options.prepare:.0f} s"
            elif not worker.ready:
                yield cell, worker.fault
            elif left <= 0:
                yield cell, f"--limit {options.limit:g}: not begun"
            else:
                begin = perf_counter()
                found = worker.ask(cell.batch, min(left + GRACE_S, LONGEST_S))
                say(f"{cell}: took {perf_counter() - begin:.1f} s")
                yield cell, found
    finally:  # not before: a process that ends frees memory, which the others wait for
        for worker in workers:
            if worker.process.is_alive():
                worker.end()
