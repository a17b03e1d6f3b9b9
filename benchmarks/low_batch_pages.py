"""The page and the chart of :mod:`benchmarks.low_batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

#: A logit's error may be so many times PyTorch's own in that data type.
MOST_ERROR = 1.5

#: (network, data type, batch) -> the ms that are the goal on an H200.
GOALS_MS = {
    ("resnet18", "float16", 1): 0.08, ("resnet50", "float16", 1): 0.14,
    ("resnet152", "float16", 1): 0.39, ("densenet201", "float16", 1): 0.5,
    ("mobilenet_v3_large", "float16", 1): 0.13, ("efficientnet_b0", "float16", 1): 0.2,
    ("vgg16", "float16", 1): 0.15,
}  # fmt: skip

#: (data type, batch) -> what peers' names begin with, and how many times as fast as they the goal is.
GOALS_TIMES = {("float32", 1): ("PyTorch graph", 4.0), ("float16", 20): ("torch.compile", 1.5)}


def ms(value: float | None) -> str:
    """Such as 0.142."""
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cell(row: Row) -> tuple:
    return row["network"], row["dtype"], row["batch"]


def _timed(document: Mapping[str, Any]) -> tuple[list[Row], dict[tuple, list[Row]]]:
    """Returns our rows that have times, and cell -> its other rows."""
    rows = [row for row in document["rows"] if "device_ms" in row]
    peers: dict[tuple, list[Row]] = {}
    for row in rows:
        if not row["ours"]:
            peers.setdefault(_cell(row), []).append(row)
    return [row for row in rows if row["ours"]], peers


def summary(document: Mapping[str, Any]) -> str:
    """Such as "Ahead in 3 of 4 cells."; cells without any peer count for neither."""
    ours, peers = _timed(document)
    beside = [row for row in ours if "ratio" in row]
    said = f"Ahead in {sum(row['ratio'] > 1 for row in beside)} of {len(beside)} cells"
    alone = sum(not any("compile" in peer["name"] for peer in peers[_cell(row)]) for row in beside)
    return f"{said}; in {alone} of them torch.compile took no part." if alone else f"{said}."


def goal(row: Row, peers: Sequence[Row]) -> tuple[str, bool] | None:
    """Returns the goal of a cell and whether it is reached, or None where there is none or no such peer."""
    if wanted := GOALS_MS.get(_cell(row)):
        return f"{ms(wanted)} ms", row["device_ms"] <= wanted
    name, times = GOALS_TIMES.get((row["dtype"], row["batch"]), ("", 0.0))
    best = min((p["device_ms"] for p in peers if name and p["name"].startswith(name)), default=None)
    if best is None:
        return None
    return f"{times:g} times {name} ({ms(best)})", best / row["device_ms"] >= times


def markdown(document: Mapping[str, Any]) -> str:
    """Returns the tables."""
    about = document["environment"]
    ours, peers = _timed(document)
    lines = [
        "# Imported CNNs at low batch",
        "",
        f"{about['gpu'] or about.get('cpu') or 'no GPU'}, driver {about['driver']}; commit "
        f"{about['commit'] or 'not known'}.",
        "",
        *(f"- `{ran['command']}`, {ran['started']}" for ran in document["commands"]),
        "",
        "ms of a batch: device time by events, passes one behind another; flushed: after the second-level "
        "cache was overwritten; wall: from host memory to host memory. The peer is the fastest of those that "
        "took part in that cell; times: its time through ours; ahead: whether that is over 1. The floor is "
        "that of docs/explanation/performance.md; error: of the logits, as a part of the largest, from "
        "PyTorch's in float64, and how many times PyTorch's own in that type it is. JAX and "
        "ONNX Runtime are timed by the host's clock.",
        "",
        summary(document),
        "",
        "| network | dtype | batch | ours | best peer | times | ahead | flushed, times | wall, times "
        "| of the floor | error, times PyTorch's |",
        "|---|---|--:|--:|---|--:|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in ours:
        best = min(peers.get(_cell(row), ()), key=lambda peer: peer["device_ms"], default=None)
        peer = f"{ms(best['device_ms'])} {best['name']}" if best else ""
        ahead = "" if best is None else "yes" if row["ratio"] > 1 else "**no**"
        error = row["wrong"] or f"{row['error']:.1e}, {_times(row.get('error_ratio'))}"
        floor = f"{row['floor_ms'] / row['device_ms']:.0%}" if row.get("floor_ms") else ""
        lines.append(
            f"| {row['network']} | {row['dtype']} | {row['batch']} | {ms(row['device_ms'])} | {peer} "
            f"| {_times(row.get('ratio'))} | {ahead} "
            f"| {ms(row['flushed_ms'])}, {_times(row.get('flushed_ratio'))} "
            f"| {ms(row['wall_ms'])}, {_times(row.get('wall_ratio'))} | {floor} | {error} |"
        )
    lines += [*_goals(ours, peers), *_errors(document, ours), *_bits(ours)]
    for name, why in document["left_out"].items():
        lines += ["", f"Left out: {name}, {why}"]
    return "\n".join(lines) + "\n"


def _goals(ours: Sequence[Row], peers: Mapping[tuple, list[Row]]) -> list[str]:
    found = [(row, goal(row, peers.get(_cell(row), ()))) for row in ours]
    found = [(row, *wanted) for row, wanted in found if wanted is not None]
    if not found:
        return []
    return [
        "",
        f"Goals reached: {sum(reached for *_, reached in found)} of {len(found)}.",
        "",
        "| network | dtype | batch | goal | ours | reached |",
        "|---|---|--:|---|--:|---|",
        *(
            f"| {row['network']} | {row['dtype']} | {row['batch']} | {wanted} "
            f"| {ms(row['device_ms'])} | {'yes' if reached else 'no'} |"
            for row, wanted, reached in found
        ),
    ]


def _errors(document: Mapping[str, Any], ours: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    checked = [row for row in document["rows"] if row["ours"] and "device_ms" not in row]
    for what, rows in (("", ours), ("Logits alone, images of {}: ", checked)):
        known = [row for row in rows if "error_ratio" in row or row["wrong"]]
        if not known:
            continue
        right = [row for row in known if not row["wrong"]]
        within = sum(row["error_ratio"] <= MOST_ERROR for row in right)
        sizes = dict.fromkeys("x".join(map(str, row["size"])) for row in rows)
        said = what.format(", ".join(sizes))
        said += f"{'t' if said else 'T'}he error is at most {MOST_ERROR} times PyTorch's own in "
        said += f"{within} of {len(known)} cells"
        if right:
            worst = max(right, key=lambda row: row["error_ratio"])
            said += f"; the worst is {worst['network']} {worst['dtype']}, batch {worst['batch']}, "
            said += f"{worst['error_ratio']:.2f} times"
        lines += ["", said + "."]
        lines += [
            f"\nWrong: {row['network']} {row['dtype']} batch {row['batch']}, "
            f"{row['size'][0]}x{row['size'][1]}: {row['wrong']}"
            for row in known
            if row["wrong"]
        ]
    return lines


def _bits(ours: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    found = [row for row in ours if "same_bits" in row]
    for runs in sorted({row["bits"] for row in found}):
        cells = [row["same_bits"] for row in found if row["bits"] == runs]
        lines += ["", f"{runs} passes gave the same bits in {sum(cells)} of {len(cells)} cells."]
    beside = [row["beside_another"] for row in ours if "beside_another" in row]
    if beside:
        lines += [
            "",
            f"Beside another engine's on another stream passes gave theirs in {sum(beside)} of "
            f"{len(beside)}.",
        ]
    return lines


def line(rows: Sequence[Row]) -> str:
    """Returns a cell in one line, for who waits."""
    first = rows[0]
    times = "  ".join(
        f"{row['name']} {ms(row['device_ms'])} ({ms(row['flushed_ms'])}, {ms(row['wall_ms'])})"
        if "device_ms" in row
        else row["name"]
        for row in rows
    )
    size = "x".join(map(str, first["size"]))
    said = f"{first['network']} {size} {first['dtype']} batch {first['batch']}: {times}"
    if first.get("ratio"):
        said += f"  {first['ratio']:.2f}x"
    error = first["wrong"] or f"{first['error']:.1e}"
    said += f"  error {error} ({first.get('error_ratio', 0):.2f} of PyTorch's)"
    return said + (f"  same bits: {first['same_bits']}" if "same_bits" in first else "")


def draw(document: Mapping[str, Any], file: Any) -> None:
    """Draws how many times as fast as the best peer each cell is, a panel a data type, as PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row.get("ratio")]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows)) or ["float16"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(
        figsize=(2 + 1.3 * max(len(networks), 3), 3 * len(dtypes)), layout="constrained"
    )
    panels = figure.subplots(len(dtypes), 1, squeeze=False)[:, 0]
    width = 0.8 / max(len(batches), 1)
    shades = ("#9dc3f0", "#5d97dd", "#2f6db8", "#f2bf8d", "#e08a3c")
    for axes, dtype in zip(panels, dtypes, strict=True):
        for index, batch in enumerate(batches):
            found = {
                row["network"]: row["ratio"]
                for row in rows
                if (row["dtype"], row["batch"]) == (dtype, batch)
            }
            axes.bar(
                [i + (index - (len(batches) - 1) / 2) * width for i in range(len(networks))],
                [found.get(network, 0.0) for network in networks], width,
                color=shades[index % len(shades)], label=f"batch {batch}",
            )  # fmt: skip
        axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(networks)), networks, rotation=15)
        axes.set_ylabel(f"{dtype}: times as fast\nas the best peer")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, ncols=len(batches))
    about = document["environment"]
    panels[0].set_title(f"{about['gpu']}, commit {about['commit'] or 'not known'}", fontsize=10)
    figure.savefig(file, format="png", dpi=120)
