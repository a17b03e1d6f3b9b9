"""Writes ``tables.md``: measured figures next to published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from cnn_engine.report import units

from . import configurations as found
from .configurations import Cell, names_in_order

if TYPE_CHECKING:
    from cnn_engine.measure.result import Result

    from .tables import Tables

#: Kinds of layers in the order of the thesis' sums, and those that it does not have.
KINDS = ("conv", "relu", "pool", "fc", "softmax", "pad", "normalize", "tanh")
Metric = Callable[["Result"], float]
ABOUT = "~"  # before a number that is extrapolated


def render(tables: Tables, images: dict[str, str], interrupted: bool) -> str:
    """Returns the document; ``images`` are the charts' files by their names."""
    parts = [_head(tables, interrupted)]
    for name, section in (("thesis", _thesis), ("course", _course), ("batch", _batch)):
        if any(cell.results for cell in tables.cells.get(name, ())):
            parts.append(section(tables, images))
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---" if i == 0 else "---:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _chart(images: dict[str, str], name: str, text: str) -> list[str]:
    return [f"![{text}]({images[name]})"] if name in images else []


def _head(tables: Tables, interrupted: bool) -> str:
    environment = tables.environment
    versions = environment["versions"]
    machine = [
        f"- Device: {environment['device']}"
        + (f", {environment['gpu']}, {environment['driver']}" if environment["gpu"] else "")
        + f"; CPU: {environment['cpu']} ({environment['cpu_instruction_set']} kernels), "
        f"{units.counted(environment['threads'], 'thread')}",
        "- Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items() if value),
        f"- Commit: {environment['commit'] or 'not known'}",
        f"- Command: `{tables.command}`",
        f"- {units.counted(tables.options.repeats, 'repeat')} of every cell, taken in turn (A B C A B C): "
        "numbers are medians; ± is the distance of the greatest and the least from each other, as a share "
        "of the median.",
        "- Every variant was compared with the float64 reference before it was timed.",
    ]
    if tables.options.limit_seconds:
        machine.append(
            f"- A cell got about {tables.options.limit_seconds:g} s a repeat. {ABOUT} marks what was "
            "measured on fewer images and multiplied up."
        )
    if interrupted:
        machine.append(
            "- **Interrupted**: only complete rounds are shown, and tables may be missing."
        )
    return "# The published tables, measured again\n\n" + "\n".join(machine)


def _images(tables: Tables, network: str, images: int) -> str:
    records = tables.records[network]
    if images <= records:
        return f"the first {units.count(images)}"
    return (
        f"{units.count(images)}, which are the {units.count(records)} given ones repeated in order"
    )


def _s(cell: Cell, of: Metric) -> str:
    value = cell.total(of)
    if not value:
        return "-"
    return _about(cell) + units.seconds(value)


def _about(cell: Cell) -> str:
    return ABOUT if cell.extrapolated else ""


def _plus_minus(cell: Cell, of: Metric) -> str:
    if len(cell.results) < 2:
        return units.UNKNOWN
    spread = cell.spread(of) * 100
    return f"±{spread:.0f} %" if spread >= 10 else f"±{spread:.2g} %"


def _accuracy(cells: Sequence[Cell]) -> str:
    counts = {
        (c.measured, a.correct) for c in cells for r in c.results if (a := r.accuracy) is not None
    }
    return "; ".join(
        f"{units.count(correct)} of {units.count(total)} ({correct / total * 100:.2f} %)"
        for total, correct in sorted(counts)
    )


# ---- the thesis' table ----


def _thesis(tables: Tables, images: dict[str, str]) -> str:
    published = tables.published["thesis"]
    cpu = tables.kind == "cpu"
    parts = [
        "## The thesis: ways of writing a convolution, and of placing the data",
        f"CIFAR-10, one image a pass. Published: {published['machine']} ({published['source']}).",
    ]
    if cpu:
        parts.append(
            "The thesis has one CPU figure, of serial code for 50,000 images. It stands beside every row; "
            "† marks it where it is scaled to the number of images."
        )
    else:
        parts.append(
            "`transfer` copies each convolution's input in and its output out and leaves the other layers "
            "to the CPU, `managed` does so over managed memory, `resident` keeps all on the GPU. The thesis "
            "has one figure a variant and reduction, which stands beside `transfer` and `resident`, and one "
            "for managed memory, which stands beside all rows of `managed`."
        )
    shown = [cell for cell in tables.cells["thesis"] if cell.results]
    for count in dict.fromkeys(cell.images for cell in shown):
        cells = [cell for cell in shown if cell.images == count]
        accuracy = [row["value"] for row in published["accuracy_percent"] if row["images"] == count]
        note = f"; published: {accuracy[0]} % of another {units.count(count)}" if accuracy else ""
        parts += [
            f"### {units.count(count)} images",
            f"Images: {_images(tables, cells[0].workload, count)}. Correct: {_accuracy(cells)}{note}.",
            *_chart(images, f"thesis-{count}", f"Time of every layer, {count} images"),
            _thesis_totals(tables, cells),
            _thesis_layers(tables, cells),
        ]
    parts.append(
        "Total: wall time of a pass over all images in which no layer is timed. Steps: layers and copies of "
        "a second pass that times each, on the GPU between events; the sum may exceed the total, since "
        "timing costs time, or fall short of it, by the launches and waits between steps."
    )
    if not cpu:
        parts.append(_least_improved(tables, shown))
    return "\n\n".join(parts)


def _variant_columns(cell: Cell) -> list[str]:
    return [f"`{cell.variant}`", "yes" if cell.reduction else "no", cell.data_mode]


def _ratio(tables: Tables, cell: Cell) -> float | None:
    published = tables.published_thesis(cell)
    return published[0] / cell.total(found.forward_s) if published else None


def _thesis_totals(tables: Tables, cells: Sequence[Cell]) -> str:
    kinds = [kind for kind in KINDS if any(cell.median(found.layers_s(kind)) for cell in cells)]
    head = [
        "variant", "reduction", "data", "total", "±", "published", "speed-up", "steps", *kinds,
        "copies", "copied", "copies' time",
    ]  # fmt: skip
    rows = []
    for cell in cells:
        published = tables.published_thesis(cell)
        ratio = _ratio(tables, cell)
        copies = cell.results[0].copies
        rows.append(
            [
                *_variant_columns(cell),
                _s(cell, found.forward_s),
                _plus_minus(cell, found.forward_s),
                f"{units.seconds(published[0])}{' †' if published[1] else ''}"
                if published
                else "-",
                f"{units.number(ratio)}x" if ratio else "-",
                _s(cell, found.steps_s),
                *(_s(cell, found.layers_s(kind)) for kind in kinds),
                f"{round(sum(copy.calls for copy in copies) * cell.scale):,}",
                units.size(round(sum(copy.bytes for copy in copies) * cell.scale)),
                _s(cell, found.copies_s),
            ]
        )
    return _table(head, rows)


def _thesis_layers(tables: Tables, cells: Sequence[Cell]) -> str:
    names = [name for name, _ in names_in_order(cells)]
    rows = [
        [*_variant_columns(cell), *(_s(cell, found.layers_s(name=name)) for name in names)]
        for cell in cells
    ]
    serial = tables.published["thesis"]["serial_cpu"]
    if cells[0].images == serial["images"]:
        layers = serial["layers_s"]
        row = [units.seconds(layers.get(name)) for name in names]
        rows.append(["published: serial CPU", "", "", *row])
    return _table(["variant", "reduction", "data", *names], rows)


def _least_improved(tables: Tables, cells: Sequence[Cell]) -> str:
    ratios = sorted(
        ((ratio, cell) for cell in cells if (ratio := _ratio(tables, cell)) is not None),
        key=lambda pair: pair[0],
    )
    if not ratios:
        return "No figure is published for these numbers of images."
    slower = [cell for ratio, cell in ratios if ratio <= 1]
    all_faster = (
        "Every cell is faster than the published one."
        if not slower
        else f"{len(slower)} of {len(ratios)} cells are not faster than the published ones."
    )
    listed = "; ".join(
        f"{cell.label}, {cell.data_mode}, {units.count(cell.images)} images: {units.number(ratio)}x "
        f"({_where_the_time_is(cell)})"
        for ratio, cell in ratios[:4]
    )
    return f"{all_faster} The least improved: {listed}."


def _where_the_time_is(cell: Cell) -> str:
    """The greatest parts of the cell's steps, which is why it is no faster."""
    parts = {kind: cell.median(found.layers_s(kind)) for kind in KINDS}
    parts["copies"] = cell.median(found.copies_s)
    whole = sum(parts.values())
    greatest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    text = ", ".join(
        f"{name} {parts[name] / whole * 100:.0f} %"
        for name in greatest
        if parts[name] > 0.01 * whole
    )
    between = 1 - cell.median(found.steps_s) / cell.median(found.forward_s)
    if between > 0.1:
        text += (
            f" of the steps; {between * 100:.0f} % of the total is launches and waits between them"
        )
    return text


# ---- the course's table ----


def _course(tables: Tables, images: dict[str, str]) -> str:
    published = tables.published["course"]
    kind = tables.kind
    cells = [cell for cell in tables.cells["course"] if cell.results]
    head = [
        "variant", "reduction", "images", "batch", "op 1", "op 2", "±", "published op 1",
        "published op 2", "speed-up 1", "speed-up 2", "whole program", "correctness", "published",
    ]  # fmt: skip
    rows = []
    for cell in cells:
        times = published["op_times_s"][kind].get(str(cell.images), [None, None])
        ops = _op_times(cell)
        correct = published["correctness"].get(str(cell.images))
        rows.append(
            [
                f"`{cell.variant}`",
                "yes" if cell.reduction else "no",
                units.count(cell.images),
                units.count(cell.batch),
                *(units.UNKNOWN if op is None else _about(cell) + units.seconds(op) for op in ops),
                _plus_minus(cell, found.layers_s("conv")) if ops[0] is not None else "-",
                *(units.seconds(seconds) for seconds in times),
                *(
                    f"{units.number(theirs / ours)}x" if theirs and ours else "-"
                    for theirs, ours in zip(times, ops, strict=True)
                ),
                _about(cell) + units.seconds(_whole_program_s(cell)),
                _correctness(cell, tables.records["ece408"]),
                f"{correct:g}" if correct is not None else "-",
            ]
        )
    records = units.count(tables.records["ece408"])
    on_cpu = (
        "on the CPU, as many images per pass as the column `batch` says, since more only fill memory"
        if kind == "cpu"
        else "all images in one pass, as in the course"
    )
    return "\n\n".join(
        [
            "## The course: convolution op times and correctness",
            f"Fashion-MNIST at 48x48, {on_cpu}. Published: {published['machine']} ({published['source']}).",
            *_chart(images, "course", "Op times against the number of images"),
            _table(head, rows),
            "Op time: the sum over all passes of the convolution's own time. Whole program: data read, "
            "engine made, weights read, memory taken, one pass over all images, correctness counted. "
            "- : the variant runs the convolutions fused with other layers.",
            f"‡ {records} images are given; the rest are those repeated in order, so the published "
            "correctness is of other images.",
        ]
    )


def _op_times(cell: Cell) -> list[float | None]:
    names = [layer.name for layer in cell.results[0].layers if layer.kind == "conv"]
    times: list[float | None] = [cell.total(found.layers_s(name=name)) for name in names]
    return times if len(times) == 2 else [None, None]


def _correctness(cell: Cell, records: int) -> str:
    accuracy = cell.results[0].accuracy
    if accuracy is None:
        return "-"
    text = f"{accuracy.top1:.4g}"
    if cell.extrapolated:
        text += f" of {units.count(accuracy.total)}"
    return text + (" ‡" if accuracy.total > records else "")


def _whole_program_s(cell: Cell) -> float:
    def total(result: Result) -> float:
        forward = result.phases.forward_s or 0.0
        return result.phases.total_s + forward * (cell.scale - 1)

    return cell.median(total)


# ---- the batch table ----


def _batch(tables: Tables, images: dict[str, str]) -> str:
    cells = [cell for cell in tables.cells["batch"] if cell.results]
    head = [
        "variant", "reduction", "data", "batch", "time per pass", "±", "images/s", "steps per pass",
        "copies, share of steps",
    ]  # fmt: skip
    rows = []
    for cell in cells:
        passes = cell.measured / cell.batch
        rows.append(
            [
                *_variant_columns(cell),
                units.count(cell.batch),
                units.seconds(cell.median(found.pass_s)),
                _plus_minus(cell, found.pass_s),
                units.number(cell.batch / cell.median(found.pass_s)),
                units.seconds(cell.median(found.steps_s) / passes),
                units.percent(cell.median(found.copy_share)),
            ]
        )
    best = {
        batch: max(
            (cell for cell in cells if cell.batch == batch),
            key=lambda cell: cell.batch / cell.median(found.pass_s),
        )
        for batch in dict.fromkeys(cell.batch for cell in cells)
    }
    fastest = "; ".join(
        f"{units.count(batch)}: {cell.label}, {cell.data_mode}" for batch, cell in best.items()
    )
    parts = [
        "## Every variant against the batch size",
        "CIFAR-10. Time a pass: the median of whole passes, images in host memory to probabilities in host "
        "memory, in which no step is timed; steps per pass: the sum of layers and copies of passes that time "
        "each.",
        *_chart(images, "batch", "Time a pass against the batch size"),
        _table(head, rows),
        f"The fastest at each batch: {fastest}.",
    ]
    if tables.runner_cost_s is not None:
        parts.append(
            f"The runner's own cost a layer, measured with steps that do nothing: "
            f"{units.seconds(tables.runner_cost_s)}."
        )
    refused = {cell.unsupported for cell in tables.cells["batch"] if cell.unsupported}
    parts += [f"Not measured: {reason}." for reason in sorted(refused)]
    return "\n\n".join(parts)
