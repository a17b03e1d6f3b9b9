"""``python -m benchmarks.add_up``: whether steps add up to their pass, and agree with CUPTI's records.

For the network CIFAR-10, fused and layer by layer (``pad``), at several batches, from pageable and (on a GPU)
page-locked memory: the sum of all rows of the report beside the median of the plain passes that took turns
with those that were looked into, and beside passes that were timed before any record was switched on. On a
GPU the device times are taken twice, by activity records and by events, and each step of both is compared
with the median of its records in passes of their own. Every variant is checked against float64 first.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks import result_file
from cnn_engine import Engine, InputError, cli
from cnn_engine.measure import environment, step_times, timing
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.meters import Metered, RecordMeter
from cnn_engine.measure.pass_parts import OVERLAP
from cnn_engine.measure.profile_tables import EVENTS
from cnn_engine.report import units

VARIANTS = ("fused", "pad")
BATCHES = (1, 100, 10_000)
CHECKED = 32
PLAIN_S = 0.4

#: Recorded passes that steps are compared with: half of them before the passes that are taken apart and half
#: after, a few at a time between plain ones, as those are. Copies share the host's memory with all else that
#: is done there, and take up to a fifth more in passes recorded in one go, or at another time.
RECORDED_PASSES = 40
IN_A_TURN = step_times.IN_A_TURN

#: A step agrees with its record within a share of it and a constant, the sum with the pass within a share.
STEP_SHARE, STEP_S, SUM_SHARE = 0.10, 0.5e-6, 0.05


@dataclass
class Cell:
    """One way to run a pass, and what was found; seconds.

    Attributes:
        source: where device times are from; on a CPU the host's clock.
        before_s: median of plain passes before anything was recorded in this process.
        plain_s, sum_s: of the passes taken apart.
        rows: every row's seconds of one pass, steps first.
        recorded: the same steps' records, in passes of their own; empty without CUPTI.
        cost: times a plain pass: with the clock read, under ``source``, with the fused parts counted.
    """

    variant: str
    batch: int
    memory: str
    source: str
    before_s: float
    plain_s: float
    sum_s: float
    rows: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float | None] = field(default_factory=dict)
    inside: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def off(self) -> tuple[str, float, float, float] | None:
        """The step farthest from its record: name, seconds, the record's, and the share of what is allowed.

        By events, copies of pageable memory are timed on page-locked memory: their records hold waiting for
        the driver's staging too, and are not compared. Where chunks overlap, kernels of one run beside those
        of another and copies beside both, which of them by chance: kernels are compared together, and copies.
        """
        pairs = {
            name: (self.rows[name], seconds)
            for name, seconds in self.recorded.items()
            if (self.source, self.memory) != (EVENTS, "pageable")
            or not name.endswith((" h2d", " d2h"))
        }
        if OVERLAP in self.rows:
            kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for name, pair in pairs.items():
                kinds["copies" if name.endswith((" h2d", " d2h")) else "kernels"].append(pair)
            pairs = {kind: tuple(map(sum, zip(*some, strict=True))) for kind, some in kinds.items()}
        found = [
            (name, seconds - recorded, recorded,
             abs(seconds - recorded) / (STEP_SHARE * recorded + STEP_S))
            for name, (seconds, recorded) in pairs.items()
        ]  # fmt: skip
        return max(found, key=lambda row: row[-1], default=None)

    @property
    def adds_up(self) -> bool:
        return abs(self.sum_s / self.plain_s - 1) <= SUM_SHARE

    @property
    def agrees(self) -> bool:
        """Whether every step agrees with its record; true where there is none."""
        return self.off is None or self.off[-1] <= 1


class Bench:
    """An engine of one variant, and images of one batch in one kind of memory."""

    def __init__(self, engine: Engine, batch: int, memory: str) -> None:
        self.engine, self.batch, self.memory = engine, batch, memory
        shape = (batch, *engine.network.input_shape)
        pinned = memory == "page-locked"
        self.images = engine.empty_images(batch) if pinned else np.empty(shape, np.uint8)
        self.images[:] = np.random.default_rng(batch).integers(0, 256, shape, np.uint8)
        rows = (batch, engine.network.classes)
        self.probabilities = (
            engine.empty_probabilities(batch) if pinned else np.empty(rows, np.float32)
        )
        self.before_s = 0.0

    def time_plain(self) -> None:
        """Times whole passes; to be called before anything is recorded."""
        passes = timing.time_passes(
            self.engine, self.images, self.probabilities, self.batch, warmup=3, iterations=None,
            duration_s=PLAIN_S, progress=_ignore,
        )  # fmt: skip
        self.before_s = float(np.median(passes.full_s))

    def look_into(self, records: bool) -> Cell:
        """Takes passes apart."""
        found = step_times.time_layers(
            self.engine, self.images, self.probabilities, self.batch, _ignore, records=records
        )
        whole = found.whole_pass
        steps = {layer.name: layer for layer in found.layers}
        steps |= {f"{copy.what} {copy.direction}": copy for copy in found.copies}
        rows = {name: step.seconds / whole.calls for name, step in steps.items()}
        rows |= {row.name: row.seconds / whole.calls for row in whole.between}
        seconds = {
            "clock": whole.clocked_s,
            "device": whole.metered_s,
            "inside": whole.inside_s,
        }
        cost = {name: value and value / whole.median_s for name, value in seconds.items()}
        inside = {
            part.name: part.seconds / whole.calls for layer in found.layers for part in layer.inside
        }
        return Cell(
            self.engine.choice.variant, self.batch, self.memory, whole.source, self.before_s,
            whole.wall_s / whole.calls, whole.steps_s / whole.calls, rows, {}, cost, inside,
            found.notes,
        )  # fmt: skip

    def record(self, passes: int) -> list[Metered]:
        """Returns the records of so many passes; none without CUPTI."""
        if self.engine.device.kind != "cuda" or activity.unavailable() is not None:
            return []

        def following() -> Any:
            addresses = (
                array.__array_interface__["data"][0] for array in (self.images, self.probabilities)
            )
            return self.engine.plan_at(*addresses, self.batch, self.images.dtype)

        found: list[Metered] = []
        for _ in range(0, passes, IN_A_TURN):
            for _ in range(IN_A_TURN):
                following().run_steps()
            found += RecordMeter().measure(following, IN_A_TURN)
        return found

    def compare(self, records: bool) -> Cell:
        """Takes passes apart, between two halves of those recorded to compare with."""
        found = self.record(RECORDED_PASSES // 2)
        cell = self.look_into(records)
        found += self.record(RECORDED_PASSES // 2)
        medians: dict[str, float] = defaultdict(float)
        for k, step in enumerate(found[0].plan.steps if found else ()):
            if step.place == "cuda":  # where a pass has chunks, a step each
                name = f"{step.name} {step.direction}" if step.kind == "copy" else step.name
                medians[name] += float(np.median([one.seconds[k] for one in found]))
        cell.recorded = dict(medians)
        return cell


def measure(device: str, batches: tuple[int, ...], variants: tuple[str, ...]) -> tuple[list, dict]:
    """Returns every cell, and the environment."""
    engines = [Engine(device=device, variant=variant) for variant in variants]
    on_cuda = engines[0].device.kind == "cuda"
    described = environment.describe(engines[0].device)
    benches = []
    for engine in engines:
        for batch in batches:
            for memory in ("pageable", "page-locked") if on_cuda else ("pageable",):
                benches.append(Bench(engine, batch, memory))
    for engine in engines:
        check = engine.check(benches[-1].images[:CHECKED])
        if not check.passed:
            raise InputError(f"{engine.choice.variant}: {check.max_abs_diff:g} from float64")
    for bench in benches:
        bench.time_plain()
    cells = []
    for bench in benches:
        for records in (True, False) if on_cuda else (True,):
            cells.append(bench.compare(records))
    described.update(environment.state(engines[0].device))
    for engine in engines:
        engine.close()
    return cells, described


def markdown(cells: list[Cell], document: dict[str, Any]) -> str:
    """Returns the page of ``document``, whose rows are ``cells``."""
    described = document["environment"]
    where = described["gpu"] or described["cpu"]
    lines = [
        "# The steps of a pass beside the pass",
        "",
        f"- Machine: {where}, {described['driver'] or described['cpu_instruction_set']}",
        *result_file.run_lines(document),
        f"- A sum is within {SUM_SHARE:.0%} of the pass, a step within {STEP_SHARE:.0%} and "
        f"{units.seconds(STEP_S)} of its record, or it is in **bold**. *before* are passes before "
        "anything was recorded in the process; *cost* is that of a pass looked into, in plain ones.",
        "",
        "| variant | batch | memory | device times | pass | sum | sum / pass | pass / before | "
        "farthest step from CUPTI | cost: clock, device, inside |",
        "|---|---:|---|---|---:|---:|---:|---:|---|---|",
    ]
    for cell in cells:
        ratio = _bold(f"{cell.sum_s / cell.plain_s:.3f}", cell.adds_up)
        farthest = "-"
        if cell.off is not None:
            name, difference, recorded, _ = cell.off
            share = difference / recorded if recorded else 0.0
            text = f"{name}: {units.seconds(difference)}, {share:+.1%}"
            farthest = _bold(text, cell.agrees)
        cost = ", ".join("-" if v is None else f"{v:.2f}" for v in cell.cost.values())
        words = [
            cell.variant, f"{cell.batch:,}", cell.memory, cell.source, units.seconds(cell.plain_s),
            units.seconds(cell.sum_s), ratio, f"{cell.plain_s / cell.before_s:.3f}", farthest, cost,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(words)} |")
    lines += ["", "## Every row of one pass", ""]
    for cell in cells:
        title = f"{cell.variant}, batch {cell.batch:,}, {cell.memory}, {cell.source}"
        rows = [f"{name} {units.seconds(seconds)}" for name, seconds in cell.rows.items()]
        lines.append(f"- **{title}**: {', '.join(rows)}; sum {units.seconds(cell.sum_s)}")
        if cell.inside:
            parts = [f"{name} {units.seconds(seconds)}" for name, seconds in cell.inside.items()]
            lines.append(f"  - inside network: {', '.join(parts)}")
        lines += [f"  - {note}" for note in cell.notes]
    return "\n".join(lines) + "\n"


def _bold(text: str, good: bool) -> str:
    return text if good else f"**{text}**"


def _ignore(images: int) -> None:
    """Shows no progress."""


@cli.command
def main(arguments: list[str] | None = None) -> int:
    parser = result_file.parser("add_up", __doc__, "json", "markdown")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--batches", default=",".join(map(str, BATCHES)), help="default: %(default)s"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    options = parser.parse_args(arguments)
    batches = tuple(cli.whole_number(1, 10**7)(word) for word in options.batches.split(","))
    found = result_file.ResultFile("add_up", options, arguments)
    cells, described = measure(options.device, batches, tuple(options.variants.split(",")))
    rows = [{**asdict(cell), "adds_up": cell.adds_up, "agrees": cell.agrees} for cell in cells]
    found.document |= {"environment": described, "cells": rows}
    page = markdown(cells, found.stamped())
    print(page, end="")
    found.write(lambda _: page)
    good = all(cell.adds_up and cell.agrees for cell in cells)
    return cli.DONE if good else cli.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
