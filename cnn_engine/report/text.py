"""A result as plain text: the thesis' lines first, so that old and new compare, then more."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.check import OutputCheck
from ..measure.result import Check, Latency, LayerTime, Prediction, Result
from ..operators.report_kinds import REPORT_KINDS
from . import cautions, grouping, units
from .layout import WIDTH, fields, table

#: Classes that are shown of a prediction; the JSON document has five.
PREDICTED = 3

#: The parts of an environment that change from minute to minute, and the units that end their keys.
STATES = {"gpu_state": "GPU", "cpu_state": "CPU"}
UNITS = {"mhz": "MHz", "w": "W", "c": "\N{DEGREE SIGN}C"}

#: The sums by kind of layer: those that the thesis prints, always; others where they occur.
SUMS = {"conv": "Conv", "relu": "ReLU", "pool": "Pool", "fc": "FC", "softmax": "Softmax"}


def render(result: Result, group_by: str | None = None, top: int | None = None) -> str:
    """Returns the report on ``result``: at most 100 columns wide, without colours.

    ``group_by`` and ``top`` make fewer rows of its layers; see :func:`~cnn_engine.report.grouping.grouped`.
    """
    phases = result.phases
    parts = [
        [f"CNN for {result.dataset['images']} images"],
        fields(
            [
                *what_ran(result),
                *(
                    ("" if index else "Environment", f"{key}: {value}")
                    for index, (key, value) in enumerate(environment(result))
                ),
                *_state_row(result),
                *(("Warning", units.printable(warning)) for warning in warnings(result)),
            ]
        ),
        fields(
            [
                ("Load Data time", units.seconds(phases.load_data_s)),
                ("Create Network time", units.seconds(phases.create_network_s)),
                ("Load Network Parameters time", units.seconds(phases.load_parameters_s)),
                ("Create Outputs time", units.seconds(phases.create_outputs_s)),
                ("Net Forward total time", units.seconds(phases.forward_s)),
                *_passes(result),
            ]
        ),
        _layers(result, group_by, top),
        _copies(result),
        _between(result),
        fields([("Check", check(result.check)), *outputs(result.check)]),
        [
            f"Net Accuracy: {accuracy(result)}",
            *top5(result),
            *fields(
                [
                    ("Net Accuracy time", units.seconds(phases.accuracy_s)),
                    ("Free memory time", units.seconds(phases.free_memory_s)),
                    ("Total time", units.seconds(phases.total_s)),
                ]
            ),
        ],
        _predictions(result),
        fields([("Note", units.printable(note)) for note in result.notes]),
        result.extra_lines,
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def accuracy(result: Result) -> str:
    """Returns ``78.49 % (7,849 of 10,000 correct)``, or why there is none."""
    found = result.accuracy
    if found is not None:
        correct = f"{units.count(found.correct)} of {units.count(found.total)} correct"
        return f"{units.percent(found.top1)} ({correct})"
    return "no labels" if result.images_done else "not measured"


def top5(result: Result) -> list[str]:
    """Returns the line of the five most probable classes, or none where that is not known."""
    found = result.accuracy
    if found is None or found.top5 is None:
        return []
    correct = f"{units.count(found.top5_correct)} of {units.count(found.total)} correct"
    return [f"Net Accuracy top-5: {units.percent(found.top5)} ({correct})"]


def predicted(found: Prediction) -> tuple[str, str, str]:
    """Returns a prediction's file, the classes on top with their outputs, and whether the first is right."""
    names = found.names or [f"class {number}" for number in found.top]
    pairs = list(zip(names, found.outputs, strict=True))[:PREDICTED]
    words = ", ".join(f"{units.printable(name)} {units.number(value)}" for name, value in pairs)
    if found.label is None:
        verdict = units.UNKNOWN
    elif found.top[0] == found.label:
        verdict = "right"
    else:
        name = found.label_name or f"class {found.label}"
        verdict = f"wrong: {units.printable(name)}"
    return units.printable(found.file), words, verdict


def _predictions(result: Result) -> list[str]:
    """Returns the first images, and the first wrong ones, with the classes on top."""
    if not result.predictions:
        return []
    rows = []
    for found in map(predicted, result.predictions):
        file, words, verdict = found
        rows.append((file, f"{verdict}; {words}" if verdict != units.UNKNOWN else words))
    return ["Predictions (the first images, and the first wrong ones)", *fields(rows)]


def check(found: Check | None) -> str:
    """Returns the result of the comparison with the reference, in a sentence."""
    if found is None:
        return "not made"
    verdict = "passed" if found.passed else "FAILED, so nothing was timed"
    rest = ""
    if found.not_finite:
        rest = f"; {units.counted(found.not_finite, 'output')} of the reference NaN or infinite"
    return (
        f"{verdict}: max abs diff {units.number(found.max_abs_diff)} (tolerance {found.tolerance:g}), "
        f"top-1 agreement {units.percent(found.top1_agreement)}, {units.counted(found.images, 'image')} "
        f"against {units.printable(found.reference)}{rest}"
    )


def outputs(found: Check | None) -> list[tuple[str, str]]:
    """Returns a line for each output of a network other than a classifier: its errors."""
    every = [] if found is None else found.outputs
    if len(every) == 1 and len(every[0].shape) == 2 and every[0].reads != "border":
        return []
    return [(f"Output {units.printable(one.name)}", _output(one)) for one in every]


#: What rounding may flip at a place, by what is read off there.
FLIPS = {
    "largest": "the two largest are so close that rounding may swap them",
    "border": "so close to the border of a mask that rounding may move them across",
}


def _output(found: OutputCheck) -> str:
    shape = " x ".join(map(str, found.shape)) or "one number"
    words = (
        f"{shape}: max abs diff {units.number(found.max_abs_diff)} (tolerance {found.tolerance:g})"
    )
    if not found.passed:
        words = f"FAILED: {words}"
    if not found.reads:
        return words
    if not found.close:
        return f"{words}; rounding swaps nothing at any of {units.count(found.places)} positions"
    where = f"at {units.count(found.close)} of {units.count(found.places)} positions"
    return f"{words}; {where} {FLIPS[found.reads]}"


def latency(found: Latency) -> list[tuple[str, str]]:
    """Returns the least, the percentiles that were asked for, the largest and the mean, as times."""
    values = found.to_dict()
    asked = [f"p{percentile:g}" for percentile in sorted(set(found.percentiles))]
    return [(key, units.seconds(values[key] / 1e3)) for key in ("min", *asked, "max", "mean")]


def variant(result: Result) -> str:
    """Returns the variant and, where ``auto`` chose it, why."""
    reason = result.variant_reason
    return result.variant + (f", chosen by auto: {reason}" if reason else "")


def warnings(result: Result) -> list[str]:
    """Returns warnings about the numbers: work left undone, the machine's state, noise."""
    found = list(result.environment.get("warnings") or [])
    if result.latency is not None:
        found += cautions.of_passes(result.latency.samples_ms)
    if result.interrupted:
        images = units.count(result.dataset["images"])
        done = f"interrupted: {units.count(result.images_done)} of {images} images done"
        if result.layers:
            done += ", then some of them again with every layer timed"
        if result.profile is not None and result.profile.interrupted:
            done = "interrupted: the profile lacks passes"
        found.insert(0, done)
    return found


def steps_seconds(result: Result) -> float:
    """Returns the time of all layers and copies."""
    return sum(step.seconds for step in (*result.layers, *result.copies))


def whole_seconds(result: Result) -> float:
    """Returns the time of all layers, copies and the time between, which shares refer to."""
    found = result.whole_pass
    return steps_seconds(result) + sum(row.seconds for row in (found.between if found else ()))


def environment(result: Result) -> list[tuple[str, str]]:
    """Returns facts about the machine that do not change from run to run, a line a key."""
    rows = []
    for key, value in result.environment.items():
        if key in STATES or key == "warnings":
            continue
        if isinstance(value, dict):
            known = (f"{name} {item}" for name, item in value.items() if item is not None)
            value = ", ".join(known)
        elif isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        if value not in (None, ""):
            rows.append((units.printable(key).replace("_", " "), units.printable(value)))
    return rows


def state(result: Result) -> dict[str, str]:
    """Returns the machine's changing state: clocks, power, temperature, load."""
    rows = {}
    for key, device in STATES.items():
        found = result.environment.get(key)
        for name, value in found.items() if isinstance(found, dict) else ():
            if value is None:
                continue
            label, _, unit = name.rpartition("_")
            label = (label if unit in UNITS else name).replace("_", " ")
            unit = f" {UNITS[unit]}" if unit in UNITS else ""
            rows[f"{device} {label.replace('sm clock', 'SM clock')}"] = _plain(value) + unit
    return rows


def _state_row(result: Result) -> list[tuple[str, str]]:
    joined = ", ".join(f"{label} {value}" for label, value in state(result).items())
    return [("State after the work", units.printable(joined))] if joined else []


def _plain(value: object) -> str:
    """Returns what JSON can hold as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "nothing"
    return units.number(value) if isinstance(value, float) else str(value)


def what_ran(result: Result) -> list[tuple[str, str]]:
    """Returns the settings of a run, a line each."""
    images = units.counted(result.dataset["images"], "image")
    if total := result.dataset.get("total_images"):
        images += f" of {units.count(total)}"
    source = result.dataset["source"]
    source = "" if result.dataset["name"].startswith(source) else f", from {source}"
    rows = [
        ("Network", result.network),
        ("Weights", result.weights),
        ("Data set", f"{result.dataset['name']}, {images}{source}"),
        ("Device", f"{result.device}, {result.device_name}"),
        ("Variant", variant(result)),
        ("Reduction", "yes" if result.reduction else "no"),
        ("Data type", result.computes_in),
        ("Data mode", result.data_mode),
        ("Batch", units.counted(result.batch, "image")),
        ("Threads", units.count(result.threads)),
        *_memory(result),
        ("Command", result.command),
    ]
    if result.started is not None:
        took = f", took {units.seconds(result.duration_s)}" if result.duration_s is not None else ""
        rows.append(("Started", f"{result.started}{took}"))
    return [(label, units.printable(value)) for label, value in rows]


def _passes(result: Result) -> list[tuple[str, str]]:
    """Returns what the run found that times whole passes and nothing inside them."""
    rows = []
    if result.phases.forward_s is not None:
        passes = ("part of an iteration", "one iteration")
        over = (
            passes[result.iterations]
            if result.iterations < 2
            else f"mean of {result.iterations} iterations"
        )
        images = units.counted(result.images_done, "image")
        rows.append(("", f"({over} over {images}, copies included, no layer timed)"))
    if result.latency is not None:
        rows += [(f"Latency {name}", value) for name, value in latency(result.latency)]
        samples = units.count(result.latency.count)
        batch = units.counted(result.batch, "image")
        ended = f"; {result.stop.reason}" if result.stop is not None else ""
        rows.append(("Latency samples", f"{samples} (passes of a full batch of {batch}{ended})"))
    if result.throughput_images_per_s is not None:
        rows.append(("Throughput", f"{units.number(result.throughput_images_per_s)} images/s"))
    if result.energy_j_per_image:
        found = [
            f"{name.upper()} {units.joules(j)}" for name, j in result.energy_j_per_image.items()
        ]
        rows.append(("Energy per image", ", ".join(found)))
    return rows


def _memory(result: Result) -> list[tuple[str, str]]:
    if result.memory is None:
        return []
    peak, weights = (result.memory[k] for k in ("peak_activation_bytes", "weights_bytes"))
    return [
        ("Memory", f"{units.size(peak)} activations at their peak, {units.size(weights)} weights")
    ]


def where(layer: LayerTime) -> str:
    """Returns where a layer ran, with its kernel where the layer's kind does not say it."""
    plain = layer.kernel in ("", layer.kind) or REPORT_KINDS.get(layer.kernel) == layer.kind
    return layer.place if plain else f"{layer.place} {layer.kernel}"


def _layers(result: Result, group_by: str | None, top: int | None) -> list[str]:
    if not result.layers:
        return []
    whole_s = whole_seconds(result)
    on_device = any(layer.device_s is not None for layer in result.layers)
    shown = grouping.grouped(result.layers, group_by, top)
    rows = []
    for layer in shown:
        row = [
            f"Time for {units.printable(layer.name)}",
            ":",
            units.seconds(layer.seconds),
            units.percent(units.share(layer.seconds, whole_s)),
            units.giga_per_second(layer.flops, layer.seconds),
            units.giga_per_second(layer.bytes, layer.seconds),
            units.count(layer.calls),
            units.printable(where(layer)),
        ]
        if on_device:
            row.append(units.seconds(None if layer.device_s is None else layer.host_s))
        rows.append(row)
        for part in layer.inside:
            row = [
                f"Time for {units.printable(part.name)}",
                ":",
                f"({units.seconds(part.seconds)})",
                f"({units.percent(units.share(part.seconds, whole_s))})",
                units.giga_per_second(part.flops, part.seconds),
                units.UNKNOWN,
                units.UNKNOWN,
                "inside",
            ]
            rows.append([*row, units.UNKNOWN] if on_device else row)
    title = "Layers" if group_by is None else f"Layers by {group_by}"
    names = [title, "", "time", "share", "GFLOP/s", "GB/s", "calls", "on"]
    lines = table([*names, "launch"] if on_device else names, rows)

    sums: dict[str, float | None] = dict.fromkeys(SUMS)
    for row in (row for layer in result.layers for row in (layer.inside or [layer])):
        sums[row.kind] = (sums.get(row.kind) or 0.0) + row.seconds
    words = [f"{kind_name(kind)}: {units.seconds(value)}" for kind, value in sums.items()]
    lines += ["", *_joined(words[: len(SUMS)]), *_joined(words[len(SUMS) :])]

    if inside := [layer.name for layer in shown if layer.inside]:
        names = ", ".join(map(units.printable, inside))
        lines += fields(
            [("In parentheses", f"inside of {names}, which has them in its time; {INSIDE}")]
        )
    return lines


#: How the parts of a fused network were measured.
INSIDE = "from passes of their own, scaled to it"


def _between(result: Result) -> list[str]:
    """Returns what lies between the steps, and all of it beside the pass."""
    if not result.layers:
        return []
    found = result.whole_pass
    if found is None:  # of a version that did not know it
        rows = [("Sum of layers and copies", units.seconds(steps_seconds(result)))]
        if result.timed_pass is not None:
            rows.append(("Passes with layers timed", timed_passes(result)))
        return fields(rows)
    whole_s = whole_seconds(result)
    rows = [
        [
            units.printable(row.name).capitalize(),
            ":",
            units.seconds(row.seconds),
            units.percent(units.share(row.seconds, whole_s)),
            BETWEEN.get(row.name, units.UNKNOWN),
        ]
        for row in found.between
    ]
    rows.append(["Sum of all rows", ":", units.seconds(whole_s), units.percent(1.0), ""])
    passes = units.counted(found.calls, "plain pass", "plain passes")
    ratio = units.percent(units.share(found.wall_s, whole_s))
    note = f"median {units.seconds(found.median_s)}"
    rows.append([passes.capitalize(), ":", units.seconds(found.wall_s), ratio, note])
    lines = table(["Between the steps", "", "time", "share", ""], rows)
    return lines + fields([("Cost of looking into passes", cost_of_timing(result))])


#: What each row between the steps is.
BETWEEN = {
    "launch": "in calls that queue work, the device idle",
    "staging": "in copies of pageable memory, the device idle",
    "waiting": "in waits for the device, the device idle",
    "host": "before the first step and after the last",
    "overlap": "counted twice above: steps that run at the same time",
}


def cost_of_timing(result: Result) -> str:
    """Returns how long passes took that timed their steps, compared with plain ones."""
    found = result.whole_pass
    kinds = [
        ("clock read after each step", found.clocked_s),
        (f"under {units.printable(found.source)}", found.metered_s),
        ("parts of the fused network counted", found.inside_s),
    ]
    words = [
        f"{name} {units.seconds(seconds)}"
        + (f" ({units.number(seconds / found.median_s)} times)" if found.median_s else "")
        for name, seconds in kinds
        if seconds is not None
    ]
    text = f"a pass takes plain {units.seconds(found.median_s)}, {', '.join(words)}"
    if found.empty_pair_s is not None:
        text += f"; two events take {units.seconds(found.empty_pair_s)}, which is subtracted"
    return text


def timed_passes(result: Result) -> str:
    """Returns how long passes took that timed layers, compared with plain ones."""
    found = result.timed_pass
    text = units.seconds(found.host_s)
    if found.device_s is not None:
        text += f" on the host, {units.seconds(found.device_s)} from the first step on the device to the last"
    if result.phases.forward_s:
        text += f"; without, {units.seconds(result.phases.forward_s)}"
    return text


def _copies(result: Result) -> list[str]:
    rows = [
        [
            f"Copy of {units.printable(copy.what)}",
            ":",
            units.seconds(copy.seconds),
            units.percent(units.share(copy.seconds, whole_seconds(result))),
            units.size(copy.bytes),
            units.giga_per_second(copy.bytes, copy.seconds),
            units.count(copy.calls),
            units.printable(copy.direction),
            MEMORY[copy.pageable],
        ]
        for copy in result.copies
    ]
    names = ["Copies", "", "time", "share", "size", "GB/s", "calls", "direction", "memory"]
    return table(names, rows) if rows else []


#: Of the host, by :attr:`~cnn_engine.measure.result.CopyTime.pageable`.
MEMORY = {True: "pageable", False: "pinned", None: units.UNKNOWN}


def kind_name(kind: str) -> str:
    """Returns a kind of layer as the thesis writes it; of a part of several kinds, all of them."""
    kinds = [SUMS.get(word) or units.printable(word).capitalize() for word in kind.split("+")]
    return "+".join(kinds)


def _joined(words: Iterable[str]) -> list[str]:
    """Returns ``words`` on as few lines as they fit on, none broken apart."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 2 + len(word) <= WIDTH:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines
