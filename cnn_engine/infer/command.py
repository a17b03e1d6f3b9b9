"""``cnn-engine infer``: predictions for data sets of any size, in a table, once each."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from .. import cli, shared_options
from ..errors import CnnEngineError, expected
from ..io.files import write_text
from ..measure.environment import Stopwatch, host_load
from . import chunk, estimate, formats, output, sources, summary
from .buffers import INPUTS
from .display import Display, Metrics
from .options import check_options, columns_of, is_cuda, parser, worker_count
from .output import Record
from .output_dir import Folder
from .progress import Tracker
from .shards import Shard
from .supervise import Supervisor

#: Bad images, and lost labels, that are named on standard error.
NAMED = 10

#: Seconds that a stage is measured alone for: at most, as a share of the run, and at least.
CEILING_S, CEILING_SHARE, LEAST_CEILING_S = 2.0, 0.1, 0.25


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    if options.plan is not None:
        return estimate.main(options)
    check_options(options)
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["cnn-engine", "infer", *words])
    with ExitStack() as stack:
        return _Run(options, command, stack).run()


class _Run:
    """One command from its options to its exit code."""

    def __init__(self, options: argparse.Namespace, command: str, stack: ExitStack) -> None:
        self._options, self._command, self._stack = options, command, stack
        self._watch, self._load = Stopwatch(), host_load()
        self._display = Display(options.quiet)
        self._metrics = Metrics(options.metrics)
        self._wanted_columns = columns_of(options.columns)
        self._trial: dict[str, list[dict[str, Any]]] = {}
        self._ceilings: dict[str, list[dict[str, Any]]] = {}
        self._working_s = 0.0

    def run(self) -> int:
        options = self._options
        index, count = options.shard_index or 0, options.shard_count or 1
        self._folder = self._stack.enter_context(Folder(options.output, index, count))
        self._stack.callback(self._folder.clean)
        begun = self._folder.document()
        cuda = is_cuda(options.device)
        # Where a GPU's memory and workers are by kind; of a large folder it takes a while to tell.
        kind = sources.first_kind(options.inputs, self._wanted_columns) if cuda else None
        workers = worker_count(options, cuda, kind)
        pool = self._pool(begun, workers, cuda, kind)
        self._stack.callback(pool.close)
        self._stack.callback(self._display.stop)
        self._supervisor = supervisor = Supervisor(pool, workers)
        supervisor.stall_s = options.stall
        if begun is None:  # else there may be little left to do
            supervisor.start_all()
        hello = supervisor.first_hello()
        self._document = self._planned(hello)
        every = self._folder.shards(self._document)
        mine = self._folder.mine(every)
        self._id = _identity(self._document)
        before = self._before = self._done_before(mine)
        if begun is not None:
            self._folder.check_inputs(every, before, self._id)
        todo = [shard for shard in mine if shard.index not in before]
        opening = {
            "folder": os.path.abspath(self._folder.path),
            "temporary": os.path.abspath(self._folder.temporary),
            "run": self._id,
            "texts": self._document["plan"]["texts"],
        }
        tracker = Tracker(len(mine), len(before), todo)
        interrupted = False

        def tick(supervisor: Supervisor) -> None:
            state = tracker.state(supervisor)
            self._display.show(state)
            self._metrics.write(state, supervisor.counts.stages)

        begin = perf_counter()
        try:
            if todo:
                supervisor.run(self._folder, todo, self._id, opening, tick)
            self._working_s = perf_counter() - begin
            if todo:
                self._folder.check_unchanged(every, {**before, **supervisor.done}, self._id)
            if todo and options.ceilings:
                self._measure([shard for shard in todo if shard.index in supervisor.done])
        except KeyboardInterrupt:
            interrupted = True
            self._working_s = self._working_s or perf_counter() - begin
        except CnnEngineError:
            self._finish(every)
            raise
        self._metrics.write(tracker.state(supervisor), supervisor.counts.stages, now=True)
        manifest = self._finish(every)
        self._report(hello, every, mine, before, todo, manifest, interrupted)
        if manifest["complete"] and not manifest["images"]:
            raise expected("INPUT", "at least one image", "none")
        if interrupted:
            left = len(todo) - len(supervisor.done)
            raise KeyboardInterrupt(
                f"{left} of {len(mine)} shards are left; the same command does them"
            )
        records = [record for _, record in sorted({**before, **supervisor.done}.items())]
        self._warn("bad image", "bad images", "error", [(r.errors, r.bad) for r in records])
        self._warn("lost label", "lost labels", None, [(r.labels_lost, r.lost) for r in records])
        for aside in supervisor.set_aside:
            cli.print_error(f"{self._named(aside.shard)}: set aside: {aside.reason}")
        bad = sum(record.errors for record in records)
        too_many = options.max_bad is not None and bad > options.max_bad
        if too_many:
            cli.print_error(
                f"--max-bad: expected at most {options.max_bad:,} bad images, found {bad:,}"
            )
        return cli.CHECK_FAILED if supervisor.set_aside or too_many else cli.DONE

    def _warn(
        self, one: str, many: str, column: str | None, found: list[tuple[int, tuple[str, ...]]]
    ) -> None:
        """Names the first images or labels of a kind on standard error, and says how many there are."""
        count = sum(some for some, _ in found)
        names = [name for _, some in found for name in some][:NAMED]
        for name in names:
            cli.print_error(f"{one}: {name}", "warning")
        if count > len(names):
            where = f"; column {column} of {self._folder.path} has all" if column else ""
            cli.print_error(f"{count:,} {many} in all{where}", "warning")

    def _pool(
        self, begun: dict[str, Any] | None, workers: int, cuda: bool, kind: str | None
    ) -> Any:
        options = self._options
        batch = options.batch
        if batch is None and begun is not None:
            batch = begun["settings"]["batch"]  # the rule may say otherwise on another machine
        shared_options.model_inputs(options)
        weights = options.weights
        if weights not in ("default", "random"):
            weights = os.path.abspath(weights)
        config = {
            "network": options.network or "cifar10",
            "model": None if options.model is None else os.path.abspath(options.model),
            "input_shape": options.input_shape,
            "constants": options.constant,
            "like": self._like(),
            "weights": weights,
            "cwd": os.getcwd(),
            "device": options.device,
            "variant": options.variant,
            "reduction": options.reduction,
            "dtype": options.dtype,
            "threads": options.threads,
            "batch": batch,
            "top": options.top,
            "columns": self._wanted_columns,
            "preprocess": options.preprocess,
            "kind": kind,
        }
        if options.engine == "ray":
            from .ray_pool import RayPool

            return RayPool(config, workers, cuda, options.address)
        from .local_pool import LocalPool

        return LocalPool(config, workers, cuda and options.device in ("auto", "cuda"))

    def _like(self) -> str | None:
        """Returns a file of inputs, for sizes that a model leaves open; None: there is none."""
        found = None if self._options.model is None else sources.first_npz(self._options.inputs)
        return None if found is None else os.path.abspath(found)

    def _planned(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Returns what the folder is for, planned now or before."""
        options = self._options
        inputs = tuple((name, dtype, tuple(row)) for name, dtype, row in hello["inputs"])
        wanted = formats.Wanted(
            tuple(hello["shape"]), self._wanted_columns, inputs, hello["a_file"]
        )
        settings = {
            key: hello[key]
            for key in ("network", "model_sha256", "device_kind", "variant", "reduction", "dtype", "batch",
                        "classes", "numbers", "preprocess")
        }  # fmt: skip
        if hello["columns"] is not None:
            settings["outputs"] = hello["columns"]
        settings["top"] = options.top
        settings["columns"] = self._wanted_columns
        begin = perf_counter()

        def found() -> Any:
            for source in sources.find(options.inputs, wanted):
                _check_reads(source, hello)
                yield source

        document = self._folder.plan(
            settings, hello["environment"], options.inputs, found, options.shard_size
        )
        self._planning_s = perf_counter() - begin
        return document

    def _done_before(self, mine: list[Shard]) -> dict[int, Record]:
        found = self._folder.done(mine, self._id, note=self._display.note)
        if self._options.verify:
            for shard in mine:
                if shard.index not in found:
                    continue
                fault = output.verify(self._folder.shard_path(shard))
                if fault is not None:
                    self._display.note(f"{shard.name}: broken, and done again: {fault}")
                    self._folder.remove(shard)
                    del found[shard.index]
        return found

    def _measure(self, shards: list[Shard]) -> None:
        from .stage_limits import ALL, STAGES, TOGETHER

        seconds = min(max(CEILING_SHARE * self._working_s, LEAST_CEILING_S), CEILING_S)
        stages = (*STAGES, TOGETHER) if shards else ()
        try:
            # Which ceiling is the lowest is found by other samples than how high it is: the lowest of numbers
            # that are off by chance is most likely one that is too low.
            for found in (self._trial, self._ceilings):
                for stage in stages:
                    found[stage] = self._supervisor.measure(stage, shards, seconds / 2)
            if stages:
                self._ceilings[ALL] = self._supervisor.measure(ALL, shards, seconds)
        except CnnEngineError as error:
            self._display.note(f"ceilings: not measured: {error}")
            self._trial, self._ceilings = {}, {}

    def _finish(self, every: list[Shard]) -> dict[str, Any]:
        """Ends the workers and writes the manifest."""
        self._display.stop()
        self._supervisor.pool.close()
        known = {**self._before, **self._supervisor.done}
        return self._folder.write_manifest(self._document, every, self._id, known)

    def _report(
        self,
        hello: dict[str, Any],
        every: list[Shard],
        mine: list[Shard],
        before: dict[int, Record],
        todo: list[Shard],
        manifest: dict[str, Any],
        interrupted: bool,
    ) -> None:
        options, supervisor = self._options, self._supervisor
        found = summary.Summary(
            command=self._command,
            hello=hello,
            document=self._document,
            output=str(self._folder.path),
            engine=options.engine,
            part=None if options.shard_count is None else self._folder.part,
            workers=len(supervisor.hosts_of_workers()),
            hosts=supervisor.hosts(),
            cores=supervisor.pool.cores(),
            shards=len(mine),
            before=len(before),
            done=len(supervisor.done),
            set_aside=[
                {
                    "shard": aside.shard.name,
                    "input": self._inputs_of(aside.shard),
                    "reason": aside.reason,
                }
                for aside in supervisor.set_aside
            ],
            records=[record for _, record in sorted(supervisor.done.items())],
            paces=supervisor.paces,
            input_bytes=sum(s.bytes for s in todo if s.index in supervisor.done),
            counts=supervisor.counts,
            trial=self._trial,
            ceilings=self._ceilings,
            planning_s=self._planning_s,
            working_s=self._working_s,
            interrupted=interrupted,
            manifest={
                key: manifest[key]
                for key in (
                    "complete",
                    "images",
                    "errors",
                    "label_texts",
                    "labels_lost",
                    "shards_done",
                    "shards",
                )
            },
            load_average=self._load,
            stamp=self._watch.stamp(),
        )
        document = found.to_dict()
        if not options.quiet and "-" not in (options.json, options.html):
            cli.show(summary.text(document))
        if options.json is not None:
            write_text(options.json, json.dumps(document, indent=2) + "\n")
        if options.html is not None:
            write_text(options.html, summary.html(document))

    def _inputs_of(self, shard: Shard) -> str:
        from .shards import pieces_of

        pieces = pieces_of(self._folder.run, shard)
        first, last = pieces[0].path, pieces[-1].path
        return first if first == last else f"{first} to {last}"

    def _named(self, shard: Shard) -> str:
        return f"{shard.name} ({self._inputs_of(shard)})"


def _identity(document: dict[str, Any]) -> str:
    """Returns what tells the files of this run from another's."""
    words = [document["settings"], document["plan"]["digest"]]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:32]


def _check_reads(source: formats.Source, hello: dict[str, Any]) -> None:
    """Refuses images that the network has no place for."""
    given = chunk.dtype_of(source.kind)
    if given == INPUTS:
        return
    if not hello["takes_images"]:
        names = ", ".join(name for name, *_ in hello["inputs"])
        wanted = f"a .npz of the arrays {names}, for {hello['network']} takes no images"
        raise expected(source.path, wanted, source.kind)
    becomes = "float32" if hello["normalises"] else given
    if becomes not in hello["reads"]:
        if becomes == "uint8":
            raise expected(
                source.path,
                f"--preprocess beside images of pixels, for {hello['network']} reads float32",
                "none",
            )
        raise expected(source.path, f"{hello['reads'][0]} images, as the model reads", becomes)
