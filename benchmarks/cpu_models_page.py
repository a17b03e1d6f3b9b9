"""Page and chart of :mod:`benchmarks.cpu_models`, and the speeds and errors that are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cpu_models_int8 import INT8, table

#: How many times as fast as the better library a network is to be, in float32.
TARGETS = {
    "vgg16": 1.5, "resnet18": 1.5, "resnet50": 1.2, "densenet121": 1.2, "squeezenet1_1": 1.2,
    "mobilenet_v3_large": 1.0, "efficientnet_b0": 1.0,
}  # fmt: skip
#: What the error of the logits may be of ONNX Runtime's, and peak memory of the weights.
MOST_ERROR, MOST_MEMORY = 2.0, 1.5
#: Whose layers and memory are shown.
SHOWN = "resnet50"


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, dict[str, list]]]:
    """Yields (threads, batch, network -> rows) of every cell."""
    for threads, batch in sorted({(row["threads"], row["batch"]) for row in rows}):
        found: dict[str, list] = {}
        for row in rows:
            if (row["threads"], row["batch"]) == (threads, batch):
                found.setdefault(row["network"], []).append(row)
        yield threads, batch, found


def contestant_name(row: Mapping[str, Any]) -> str:
    """Returns a contestant's name, with its type where that is not float32."""
    return row["name"] + ("" if row["dtype"] == "float32" else f", {row['dtype']}")


def markdown(document: Mapping[str, Any]) -> str:
    """The results as tables."""
    about, rows = document["environment"], document["rows"]
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
    peak = document["fma_peak_flops"]
    load_average = document["load"]
    lines = [
        "# Imported networks on the CPU",
        "",
        f"- Machine: {about['cpus']} x {about['cpu']}, {about['os']}; {about['cpu_instruction_set']} kernels"
        + (f"; load {load_average:.1f} at the start" if load_average is not None else ""),
        f"- Versions: {versions}",
        f"- Commit: {about['commit'] or 'not known'}; started {document['started']}",
        f"- Command: `{document['command']}`",
        f"- Peaks of one core, measured in this run: {peak / 1e9:.1f} GFLOP/s of float32 FMA,",
        f"  {document['integer_peak_macs'] / 1e9:.1f} GMAC/s of 8-bit integers by "
        f"{document['integer_instructions']}, {document['vnni_peak_macs'] / 1e9:.1f} by {document['vnni']}",
        "- Numbers are medians of one pass in milliseconds, interleaved. Ratio: how many times",
        "  as fast as the better library of the first type; bfloat16's beside OpenVINO's; int8's with its",
        "  share of the integers' peak. Errors: the largest",
        "  difference from float64's logits, as a part of the largest; then ours as a multiple of ONNX",
        f"  Runtime's, of which at most {MOST_ERROR:g} is asked for.",
        *(f"- Left out: {name}: {reason}" for name, reason in document["left_out"].items()),
    ]
    names = list(dict.fromkeys(contestant_name(row) for row in rows))
    for threads, batch, networks in _cells(rows):
        lines += ["", f"## Batch {batch}, threads {threads}", ""]
        lines += [
            f"| network | {' | '.join(names)} | ratio | target | bfloat16's | int8's | errors "
            "| of ONNX Runtime's |"
        ]
        lines += ["|---|" + "--:|" * (len(names) + 4) + "---|--:|"]
        for network, found in networks.items():
            by_name = {contestant_name(row): row for row in found}
            row = found[0]
            short, whole = (by_name.get(f"{row['name']}, {name}") for name in ("bfloat16", INT8))
            share = f"{_number(whole['ratio'])} ({whole['share_of_peak']:.0%})" if whole else "-"
            times = [f"{by_name[n]['seconds'] * 1e3:.2f}" if n in by_name else "-" for n in names]
            errors = ", ".join(f"{by_name[n]['error']:.1e}" for n in names if n in by_name)
            ratio = row["ratio"] if row["dtype"] == "float32" else None
            lines.append(
                f"| {network} | {' | '.join(times)} | {_ratio(ratio, TARGETS.get(network))} "
                f"| {TARGETS.get(network, '-')} | {_number(short['ratio'] if short else None)} | {share} "
                f"| {errors} "
                f"| {_number(row['error_ratio'])} |"
            )
    if document["int8_cells"]:
        lines += table(document["int8_cells"])
        lines += summary([found[0] for found in networks.values()])
    if document["layers"]:
        lines += ["", f"## Layers of {SHOWN}, batch 1, threads 1", ""]
        lines += ["| layer | kernel | us | GFLOP/s | of the peak |", "|---|---|--:|--:|--:|"]
        for layer in document["layers"]:
            rate = layer["flops"] / layer["seconds"]
            speed = f"{rate / 1e9:.1f} | {rate / peak:.0%}" if rate else "- | -"
            time = f"{layer['seconds'] * 1e6:.0f}"
            lines.append(f"| {layer['name']} | {layer['kernel']} | {time} | {speed} |")
    if document["memory"]:
        lines += [
            "",
            f"## Memory of {SHOWN}, batch 1, in a process of its own",
            "",
            memory_text(document),
        ]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines on our rows of one batch and number of threads: how many are ahead, and the lowest."""
    ratios = {row["network"]: row["ratio"] for row in rows if row["ratio"] is not None}
    if not ratios:
        return []
    lowest = min(ratios, key=ratios.__getitem__)
    mean = math.exp(math.fsum(map(math.log, ratios.values())) / len(ratios))
    ahead = sum(ratio > 1 for ratio in ratios.values())
    return [
        "",
        f"Ahead in {ahead} of {len(ratios)}; ratios: geometric mean {mean:.2f}, lowest "
        f"{ratios[lowest]:.2f} ({lowest}).",
    ]


def _ratio(ratio: float | None, target: float | None) -> str:
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}**" if target is not None and ratio >= target else f"{ratio:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def memory_text(document: Mapping[str, Any]) -> str:
    """Returns a sentence on the peak memory of :data:`SHOWN`."""
    found = document["memory"]
    if "reason" in found:
        return f"Not measured: {found['reason']}."
    weights, before, peak = (found[f"{key}_bytes"] for key in ("weights", "before", "peak"))
    return (
        f"{peak / 2**20:.0f} MiB resident at the peak, {peak / weights:.2f} times the weights' "
        f"{weights / 2**20:.0f} MiB (at most {MOST_MEMORY:g} is asked for); {before / 2**20:.0f} MiB of it "
        "the interpreter with the engine imported."
    )


def draw(document: Mapping[str, Any], file: Any) -> None:
    """Draws our speed beside the better library's into ``file``, a bar a cell, as PNG."""
    from matplotlib.figure import Figure

    rows = [
        row for row in document["rows"] if row["ratio"] is not None and row["dtype"] == "float32"
    ]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    cells = sorted({(row["threads"], row["batch"]) for row in rows})
    figure = Figure(figsize=(2 + 1.5 * max(len(networks), 3), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(cells), 1)
    shades = ("#9dc3f0", "#5d97dd", "#f2bf8d", "#e08a3c", "#9aa3ad", "#5d6670")
    for index, (threads, batch) in enumerate(cells):
        found = {
            row["network"]: row["ratio"]
            for row in rows
            if (row["threads"], row["batch"]) == (threads, batch)
        }
        axes.bar(
            [i + (index - (len(cells) - 1) / 2) * width for i in range(len(networks))],
            [found.get(network, 0.0) for network in networks], width,
            color=shades[index % len(shades)], label=f"batch {batch}, threads {threads}",
        )  # fmt: skip
    for place, network in enumerate(networks):
        if network in TARGETS:
            ends = place - 0.45, place + 0.45
            label = None if place else "target"
            axes.plot(ends, [TARGETS[network]] * 2, color="black", linewidth=1.5, label=label)
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xticks(range(len(networks)), networks, rotation=15)
    axes.set_ylabel("times as fast as the better library")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    about = document["environment"]
    axes.set_title(
        f"Imported networks beside OpenVINO and ONNX Runtime, float32 (higher is better)\n"
        f"{about['cpu']}, {about['cpu_instruction_set']} kernels, commit {about['commit'] or 'not known'}",
        fontsize=10,
    )
    figure.savefig(file, format="png", dpi=120)
