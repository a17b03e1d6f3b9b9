"""``transfer --plan``: how far copies hide behind kernels, from times that were measured or given.

A pipeline moves batches through stages: copy in, compute, copy out. Each stage works on one batch at a time,
as a GPU has a copy engine for each direction. A batch takes a buffer before its copy in and gives it back
after its copy out. Read :func:`makespan` first; the rest finds the times and prints the answer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import cli, shared_options
from ..errors import expected
from ..io.files import read_json, write_text
from ..report import layout, units
from . import analysis
from .files import is_number
from .subjects import COPIED, Mode, Subject

COPY_IN, COMPUTE, COPY_OUT = STAGES = ("copy in", "compute", "copy out")

#: What binds where no stage does: all of them wait for a buffer, or for the cores that they share.
BUFFERS, CORES = "buffers", "cores"

BATCHES, COUNTS = "1,8,32,128", "1-4"
MOST_BUFFERS = 1024

#: Part of the best rate from which on fewer buffers, then smaller batches, are preferred.
NEARLY = 0.99

#: Stages of ``infer``, in order.
OF_INFER = ("read", "decode", "copy", "compute", "write")


def period(stages: Sequence[float], buffers: int) -> float:
    """Returns the seconds from one batch's end to the next one's, once the pipeline is full.

    Args:
        stages: seconds of a batch in each stage.
        buffers: batches that are under way at once, at most.
    """
    return max(*stages, sum(stages) / buffers)


def makespan(stages: Sequence[float], count: int, buffers: int) -> float:
    """Returns the seconds in which ``count`` batches pass through all stages.

    It is the longest chain of batches that wait for each other. A chain passes through all stages once, and
    moves to the next batch in the slowest stage; or it waits for a buffer, and passes through all stages once
    more for every ``buffers`` batches. The time is linear in the number of such waits, so that none, or as
    many as there can be, is the longest.
    """
    whole, slowest = sum(stages), max(stages)
    waits = (count - 1) // buffers
    never = whole + (count - 1) * slowest
    always = (waits + 1) * whole + (count - 1 - waits * buffers) * slowest
    return max(never, always)


@dataclass(frozen=True)
class Row:
    """A pipeline and the time that it takes.

    Attributes:
        batch, buffers: images of a batch, and batches under way at once.
        stages: name -> seconds of a batch.
        seconds: of all images.
        serial_s: of all images with one buffer: nothing overlaps.
        images_per_s: over all images, filling and draining included.
        hidden: share of the copies' time that passes behind something else.
        bound_by: the slowest stage, or ``buffers``.
    """

    batch: int
    buffers: int
    stages: dict[str, float]
    seconds: float
    serial_s: float
    images_per_s: float
    hidden: float
    bound_by: str


def row(images: int, batch: int, buffers: int, stages: Mapping[str, float]) -> Row:
    """Returns the time of ``images`` in batches; a last, smaller batch counts as a whole one."""
    count = -(-images // batch)
    times = list(stages.values())
    seconds, serial = makespan(times, count, buffers), count * sum(times)
    copies = count * (stages[COPY_IN] + stages[COPY_OUT])
    slowest = max(stages, key=lambda name: stages[name])
    binds = slowest if period(times, buffers) <= stages[slowest] else BUFFERS
    hidden = min((serial - seconds) / copies, 1.0) if copies else 0.0
    return Row(
        batch, buffers, dict(stages), seconds, serial, images / seconds, hidden, binds
    )  # fmt: skip


def best(rows: Sequence[Row]) -> Row:
    """Returns the row with the fewest buffers, then the smallest batch, of those as good as the fastest."""
    most = max(row.images_per_s for row in rows)
    good = [row for row in rows if row.images_per_s >= NEARLY * most]
    return min(good, key=lambda row: (row.buffers, row.batch))


# ---- the command ----


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the planner."""
    group = parser.add_argument_group("planner (nothing is run; needs no GPU)")
    group.add_argument(
        "--plan", type=cli.number_of_images, metavar="IMAGES",
        help="predict how far copies in and out hide behind kernels: time and images/s for each --batch "
        f"(default: {BATCHES}) and number of --buffers. Copies are as the regressions in --output say, of "
        "--memory pinned unless said, or as --bandwidth",
    )  # fmt: skip
    group.add_argument(
        "--buffers", nargs="+", metavar="N",
        help=f"batches under way at once, such as streams with memory of their own (default: {COUNTS})",
    )  # fmt: skip
    group.add_argument(
        "--compute", type=cli.number(0, 3600), metavar="S", help="seconds of kernels per image"
    )
    group.add_argument(
        "--compute-from", nargs="+", metavar="RESULT.json",
        help="instead: results of run --json; of several batch sizes, times between them are interpolated",
    )  # fmt: skip
    group.add_argument(
        "--bandwidth", metavar="GB/S[,GB/S]", help="of copies in and out, instead of regressions"
    )
    group.add_argument(
        "--copy-latency", type=cli.number(0, 60), default=None, metavar="S",
        help="with --bandwidth, seconds that each copy takes even without bytes (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--output-bytes", type=cli.whole_number(0, 10**12), metavar="BYTES",
        help="copied out per image (default: of the network's outputs)",
    )  # fmt: skip
    group.add_argument(
        "--check-infer", metavar="REPORT.json",
        help="predict the rate of a run of infer --json from its stages, and compare with what it reached",
    )  # fmt: skip
    group.add_argument(
        "--json", metavar="PATH", help="write the plan as JSON; - for standard output"
    )


def main(options: argparse.Namespace, subjects: list[Subject], dtype: str) -> int:
    """Prints the plan of ``--plan``, or the comparison of ``--check-infer``; returns the exit code."""
    read = [*(options.compute_from or ()), *([options.check_infer] if options.check_infer else [])]
    cli.check_outputs({"--json": options.json}, read)
    if options.check_infer is not None:
        found = of_infer(options.check_infer)
        shown = _render_infer(found)
    else:
        found = _planned(options, subjects, dtype)
        shown = _render(found)
    if options.json is not None:
        write_text(options.json, json.dumps(found, indent=2) + "\n")
    if not options.quiet and options.json != "-":
        cli.show(shown)
    return cli.DONE


def _planned(options: argparse.Namespace, subjects: list[Subject], dtype: str) -> dict[str, Any]:
    if len(subjects) != 1:
        wanted = "one --network, --model or --shape with it"
        raise expected("--plan", wanted, str(len(subjects)))
    (subject,) = subjects
    given = subject.output_bytes if options.output_bytes is None else options.output_bytes
    if given is None:
        raise expected(
            "--output-bytes", f"the bytes copied out per image of {subject.name}", "none"
        )
    sizes = shared_options.batch_sizes(options.batch or [BATCHES], "--batch", 1000, 10**7)
    sizes = sorted({min(size, options.plan) for size in sizes})
    counts = shared_options.batch_sizes(options.buffers or [COUNTS], "--buffers", 100, MOST_BUFFERS)
    moved = subject.image_bytes(dtype), given
    copies, source = _copies(options, subject, dtype, moved)
    compute, computed = _compute(options, subject)
    rows = []
    for batch in sizes:
        times = dict(zip(STAGES, (copies[0](batch), compute(batch), copies[1](batch)), strict=True))
        rows += [row(options.plan, batch, count, times) for count in counts]
    return {
        "schema": 1, "kind": "transfer plan", "network": subject.name, "images": options.plan,
        "bytes_in_per_image": moved[0], "bytes_out_per_image": moved[1], "copies": source,
        "compute": computed, "rows": [asdict(row) for row in rows], "best": asdict(best(rows)),
    }  # fmt: skip


#: Returns the seconds of a batch.
Times = Callable[[int], float]


def _copies(
    options: argparse.Namespace, subject: Subject, dtype: str, moved: tuple[int, int]
) -> tuple[tuple[Times, Times], str]:
    """Returns the seconds of copies in and out for a batch, and where they are from."""
    if options.bandwidth is not None:
        rates = _bandwidths(options.bandwidth)
        latency = options.copy_latency or 0.0
        given = [
            lambda batch, rate=rate, nbytes=nbytes: latency + batch * nbytes / rate
            if nbytes
            else 0.0
            for rate, nbytes in zip(rates, moved, strict=True)
        ]
        text = " and ".join(f"{rate / 1e9:g} GB/s" for rate in rates)
        return tuple(given), f"given: {text}, latency {units.seconds(latency)}"
    if options.copy_latency is not None:
        raise expected("--copy-latency", "--bandwidth with it", "none")
    if options.memory not in (None, *COPIED):
        raise expected("--memory", "pageable or pinned with --plan", options.memory)
    memory = options.memory or "pinned"

    def measured(direction: str, nbytes: int) -> Times:
        def seconds(batch: int) -> float:
            if not nbytes:
                return 0.0
            # The regression is over images of this subject; a row of outputs has other bytes.
            images = max(round(batch * nbytes / moved[0]), 1)
            mode = Mode(direction, memory, dtype)
            output, names = Path(options.output), [subject.folder]
            found = analysis.predict(output, names, [mode], [images], "--plan")
            if len(found) != 1:
                gpus = ", ".join(sorted(one.gpu for one in found))
                raise expected("--output", "regressions of one GPU", gpus)
            return found[0].seconds

        return seconds

    made = tuple(measured(*each) for each in zip(("h2d", "d2h"), moved, strict=True))
    return made, f"regressions in {options.output}, {memory}, {dtype}"


def _bandwidths(text: str) -> tuple[float, float]:
    """Returns bytes per second in and out; one number is both."""
    try:
        found = [cli.number(0, 10**6)(word) for word in text.split(",")]
    except argparse.ArgumentTypeError:
        found = []
    if len(found) not in (1, 2):
        raise expected("--bandwidth", "GB/s above 0, one number or two as in 25,20", repr(text))
    return found[0] * 1e9, found[-1] * 1e9


def _compute(options: argparse.Namespace, subject: Subject) -> tuple[Times, str]:
    """Returns the seconds of kernels for a batch, and where they are from."""
    if (options.compute is None) == (options.compute_from is None):
        found = "neither" if options.compute is None else "both"
        raise expected("--plan", "--compute or --compute-from with it", found)
    if options.compute is not None:
        per_image = options.compute
        return lambda batch: batch * per_image, f"given: {units.seconds(per_image)} per image"
    passes = dict(sorted(_pass_of(path, subject.name) for path in options.compute_from))
    sizes = list(passes)

    def seconds(batch: int) -> float:
        if batch < sizes[0] or batch > sizes[-1]:  # in proportion to the nearest
            nearest = sizes[0] if batch < sizes[0] else sizes[-1]
            return passes[nearest] * batch / nearest
        return float(np.interp(batch, sizes, list(passes.values())))

    text = ", ".join(f"{units.seconds(passes[size])} at batch {size}" for size in sizes)
    return seconds, f"{text}, of {', '.join(options.compute_from)}"


def _pass_of(path: str, name: str) -> tuple[int, float]:
    """Returns the batch size of a result of ``run``, and the seconds of its layers in a pass."""
    wanted = "a result of run --json with layers"
    document = read_json(path, wanted)
    layers = document.get("layers") if isinstance(document, dict) else None
    batch = document.get("batch") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not layers or type(batch) is not int or batch < 1:
        raise expected(path, wanted, "something else")
    if document.get("network") != name:
        raise expected(f"{path}: network", name, document.get("network"))
    total = 0.0
    for layer in layers:
        times = layer if isinstance(layer, dict) else {}
        spent = times.get("host_s") if times.get("device_s") is None else times["device_s"]
        if not is_number(spent) or not is_number(times.get("calls")) or times["calls"] < 1:
            raise expected(f"{path}: layers", "calls and host_s or device_s in each", "others")
        total += spent / times["calls"]
    return batch, total


# ---- a run of infer ----


def of_infer(path: str) -> dict[str, Any]:
    """Returns the predicted and the measured rate of a run of ``infer``.

    Each stage has threads of its own, so the slowest one alone sets the rate; where stages share cores, their
    CPU time together may be slower.

    Raises:
        InputError: the file is no such report, or no stage was measured alone.
    """
    wanted = "the JSON report of infer, with its ceilings"
    document = read_json(path, wanted)
    if not isinstance(document, dict) or document.get("kind") != "inference":
        raise expected(path, wanted, "something else")
    ceilings, reached = document.get("ceilings"), document.get("images_per_s")
    try:
        rates = {
            name: float(ceilings[name]["images_per_s"]) for name in OF_INFER if name in ceilings
        }
        cores = ceilings.get(CORES, {}).get("images_per_s")
        rates |= {} if cores is None else {CORES: float(cores)}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise expected(path, wanted, "others") from None
    if not is_number(reached) or reached <= 0 or not rates.keys() - {CORES}:
        raise expected(path, wanted, "no measured rate, or none of a stage")
    if not all(math.isfinite(rate) and rate > 0 for rate in rates.values()):
        raise expected(path, "rates above 0 in its ceilings", "others")
    stages = {name: 1 / rate for name, rate in rates.items()}
    binds = max(stages, key=lambda name: stages[name])
    serial = sum(seconds for name, seconds in stages.items() if name != CORES)
    return {
        "schema": 1, "kind": "transfer plan of infer", "report": path, "stages": stages,
        "serial_images_per_s": 1 / serial, "images_per_s": rates[binds], "bound_by": binds,
        "measured_images_per_s": reached, "off": rates[binds] / reached - 1,
    }  # fmt: skip


# ---- text ----


def _render(found: dict[str, Any]) -> str:
    rows = [
        [
            units.count(row["batch"]),
            units.count(row["buffers"]),
            *(units.seconds(row["stages"][name]) for name in STAGES),
            units.seconds(row["seconds"]),
            units.number(row["images_per_s"]),
            units.percent(row["hidden"]),
            row["bound_by"],
        ]
        for row in found["rows"]
    ]
    head = ["Batch", "buffers", *STAGES, "all images", "images/s", "copies hidden", "bound by"]
    good = found["best"]
    fields = [
        ("Images", f"{units.count(found['images'])} of {found['network']}"),
        ("Bytes per image", f"{found['bytes_in_per_image']:,} in, {found['bytes_out_per_image']:,} out"),
        ("Copies", found["copies"]),
        ("Compute", found["compute"]),
    ]  # fmt: skip
    lines = layout.fields([(label, units.printable(value)) for label, value in fields])
    advice = (
        f"Enough: batch {good['batch']:,} with {units.counted(good['buffers'], 'buffer')}, "
        f"{units.number(good['images_per_s'])} images/s, {good['serial_s'] / good['seconds']:.2f} times one "
        "buffer's"
    )
    return "\n".join([*lines, "", *layout.table(head, rows), "", advice])


def _render_infer(found: dict[str, Any]) -> str:
    rows = [
        [name, units.seconds(seconds), units.number(1 / seconds)]
        for name, seconds in found["stages"].items()
    ]
    table = layout.table(["Stage", "per image", "images/s alone"], rows)
    return "\n".join(
        [
            *table,
            "",
            f"Without overlap : {units.number(found['serial_images_per_s'])} images/s",
            f"Predicted       : {units.number(found['images_per_s'])} images/s, bound by "
            f"{found['bound_by']}",
            f"Measured        : {units.number(found['measured_images_per_s'])} images/s; the prediction is "
            f"{units.percent(abs(found['off']))} {'above' if found['off'] >= 0 else 'below'}",
        ]
    )
