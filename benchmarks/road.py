"""``python -m benchmarks.road``: the road from the plainest kernel to the limits, as a chart.

Reads what :mod:`benchmarks.tables` and :mod:`benchmarks.gpu_peers` recorded. Left, one image: a shorter
bar is better. Right, many images: a longer one is. Both axes are logarithmic.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cnn_engine import cli
from cnn_engine.errors import InputError, expected
from cnn_engine.io.files import atomic_write, check_writable, describe_os_error
from cnn_engine.report import units

from . import result_file

RESULTS = Path(__file__).parent / "results"
MANY = 1000  # images per pass of the layered variants
OURS, PEER, PLAIN = "#2f6fd0", "#9aa3ad", "#e08a3c"

#: Variant and reduction of the layered steps, in the order of the road.
LAYERED = (("if", False), ("if", True), ("pad", False), ("pad", True), ("tiled", False))


class Stage(NamedTuple):
    """One bar: seconds of a pass on one image, or images per second."""

    label: str
    value: float
    colour: str


def read(path: Path) -> dict[str, Any]:
    """Returns the record at ``path``.

    Raises:
        InputError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    except ValueError as error:
        raise expected(str(path), "a record as JSON", f"something else ({error})") from error
    if not isinstance(document, dict):
        raise expected(str(path), "a record as JSON", type(document).__name__)
    return document


def _cell(tables: dict[str, Any], variant: str, reduction: bool, batch: int) -> float:
    """Returns the median seconds of a pass from host memory to host memory."""
    for cell in tables["tables"]["batch"]:
        found = (cell["variant"], cell["reduction"], cell["data_mode"], cell["batch"])
        if found == (variant, reduction, "resident", batch) and cell.get("pass_s"):
            return statistics.median(cell["pass_s"])
    raise InputError(f"tables: expected {variant} at batch {batch}, found none")


def _row(peers: dict[str, Any], batch: int, **wanted: Any) -> dict[str, Any]:
    """Returns the fastest row of the peers' record at ``batch`` with all of ``wanted``."""
    rows = [
        row
        for row in peers["rows"]
        if row["batch"] == batch and all(row[key] == value for key, value in wanted.items())
    ]
    if not rows:
        raise InputError(f"peers: expected a row with {wanted} at batch {batch}, found none")
    return min(rows, key=lambda row: row["milliseconds"])


def stages(tables: dict[str, Any], peers: dict[str, Any]) -> tuple[list[Stage], list[Stage]]:
    """Returns the bars for one image, in seconds, and for many, in images per second."""
    one, many = [], []
    for variant, reduction in LAYERED:
        label = variant + (" with reduction" if reduction else "")
        one.append(Stage(label, _cell(tables, variant, reduction, 1), PLAIN))
        many.append(Stage(label, MANY / _cell(tables, variant, reduction, MANY), PLAIN))
    one.append(Stage("fused float32", _cell(tables, "fused", False, 1), OURS))
    many.append(Stage("fused float32", MANY / _cell(tables, "fused", False, MANY), OURS))
    largest = max(row["batch"] for row in peers["rows"])
    for dtype in ("float32", "float16"):
        found = _row(peers, 1, where="device", ours=True, dtype=dtype)
        one.append(Stage(f"{dtype}, image on the GPU", found["milliseconds"] / 1e3, OURS))
        found = _row(peers, largest, where="device", ours=True, dtype=dtype)
        many.append(Stage(f"{dtype}, {largest:,} on the GPU", found["images_per_s"], OURS))
        found = _row(peers, largest, where="host to host", ours=True, dtype=dtype)
        many.append(Stage(f"{dtype}, {largest:,} streamed", found["images_per_s"], OURS))
        found = _row(peers, 1, where="device", ours=False, dtype=dtype)
        one.append(Stage(_peer(found), found["milliseconds"] / 1e3, PEER))
        rows = [row for row in peers["rows"] if row["where"] == "device" and row["dtype"] == dtype]
        best = max((row for row in rows if not row["ours"]), key=lambda row: row["images_per_s"])
        many.append(Stage(f"{_peer(best)}, {best['batch']:,}", best["images_per_s"], PEER))
    return one, many


def _peer(row: dict[str, Any]) -> str:
    """Returns a peer's name on two lines: the library and type, and how it runs."""
    name, _, how = row["name"].partition(", ")
    return f"best peer: {name}\n{how or 'eager'}"


def _rate(images_per_s: float) -> str:
    millions = images_per_s / 1e6
    return f"{units.number(millions)} M" if millions >= 1 else f"{images_per_s:,.0f}"


def draw(tables: dict[str, Any], peers: dict[str, Any], file: Any) -> None:
    """Draws both panels into ``file`` as PNG."""
    from matplotlib.figure import Figure

    one, many = stages(tables, peers)
    figure = Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, bars, text in (
        (left, one, units.seconds),
        (right, many, _rate),
    ):
        labels = [bar.label for bar in bars]
        values = [bar.value for bar in bars]
        axes.barh(range(len(bars)), values, color=[bar.colour for bar in bars], height=0.7)
        for position, value in enumerate(values):
            axes.annotate(
                text(value), (value, position), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=9, zorder=3,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # lines stay behind
            )  # fmt: skip
        axes.set_yticks(range(len(bars)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 2, max(values) * 5)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("One image: time of a pass (shorter is better)", loc="left")
    left.set_xlabel("seconds, from host to host unless said")
    right.set_title("Many images (longer is better)", loc="left")
    right.set_xlabel(f"images per second, {MANY:,} per pass from host to host unless said")
    bus = peers["limits"]["pinned_host_to_device_bytes_per_s"] / 3072
    floor = peers["limits"]["fp32_flops_per_s"] / peers["flops_an_image"]
    for rate, name, side in ((bus, "the bus", "left"), (floor, "fp32 multiply-adds", "right")):
        right.axvline(rate, color="black", linestyle=":", linewidth=1, zorder=0)
        right.annotate(
            f"{name}: {_rate(rate)}", (rate, len(many)), fontsize=8, ha=side, va="bottom",
            xytext=(3 if side == "left" else -3, 0), textcoords="offset points",
        )  # fmt: skip
    right.set_ylim(len(many) + 0.1, -0.6)
    commits = [record["environment"]["commit"] for record in (tables, peers)]
    figure.suptitle(
        f"CIFAR-10 network on {peers['environment']['gpu']} "
        f"(tables at commit {commits[0]}, peers at {commits[1]})"
    )
    figure.savefig(file, format="png", dpi=110)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    parser = result_file.parser("road", __doc__)
    parser.add_argument(
        "--tables", type=Path, default=RESULTS / "batch-h200/tables.json", metavar="PATH"
    )
    parser.add_argument(
        "--peers", type=Path, default=RESULTS / "gpu-peers-h200/peers.json", metavar="PATH"
    )
    parser.add_argument("--output", default="road.png", metavar="PATH.png")
    options = parser.parse_args(arguments)
    check_writable(options.output, "--output")
    tables, peers = read(options.tables), read(options.peers)
    try:
        with atomic_write(options.output, "wb") as file:
            draw(tables, peers, file)
    except (KeyError, TypeError) as error:
        raise InputError(f"records: expected those of benchmarks, found none of {error}") from error
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
