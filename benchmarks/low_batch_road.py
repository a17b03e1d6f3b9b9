"""How the times of imported networks at low batch fell, from commit to commit.

    python -m benchmarks.low_batch_road --markdown road.md --chart road.png

Reads what :mod:`benchmarks.low_batch` recorded: every version of the records that the history of a clone
has. A row is the commit whose kernels ran, the last one the best peer in any record.
Nothing is measured here.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnn_engine import cli
from cnn_engine.errors import InputError, expected

from . import low_batch, result_file
from .low_batch_configuration import ITEM
from .low_batch_pages import ms

FOLDER = Path(__file__).parent / "results/low-batch-h200"
SCHEMA = result_file.schema("low_batch")

#: Network -> ms.
Times = dict[str, float]


@dataclass(frozen=True)
class Stop:
    """What one commit took in a data type and batch, by events.

    Attributes:
        commit: seven digits.
        ours, peers: of the networks that were measured; the fastest peer's.
    """

    commit: str
    ours: Times
    peers: Times


@dataclass(frozen=True)
class Road:
    """The commits that have cells of a data type and batch, in the order of their first runs.

    Attributes:
        peers: the fastest of each network, of all runs.
        floors: of each network.
    """

    dtype: str
    batch: int
    stops: tuple[Stop, ...]
    peers: Times
    floors: Times


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise InputError("git: expected the command, found none") from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["an error of git"])[-1]
        raise expected(f"--folder: {folder}", "a folder of a clone", reason) from error
    return done.stdout


def history(folder: Path) -> list[dict[str, Any]]:
    """Returns every version of each record of ``folder``, the oldest run first.

    Raises:
        InputError: it is in no clone, or its history has no record.
    """
    blobs = set()
    for commit in _git(folder, "log", "--format=%H", "--", ".").split():
        for line in _git(folder, "ls-tree", commit, "./").splitlines():
            about, _, name = line.partition("\t")
            if name.endswith(".json"):
                blobs.add(about.split()[2])
    found = []
    for blob in sorted(blobs):
        try:
            document = json.loads(_git(folder, "cat-file", "blob", blob))
        except ValueError:  # such as one that is not there whole
            continue
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            found.append(document)
    if not found:
        raise expected(f"--folder: {folder}", f"records of {SCHEMA} in its history", "none")
    return sorted(found, key=lambda document: document["started"])


def road(
    documents: Sequence[Mapping[str, Any]], networks: Sequence[str], dtype: str, batch: int
) -> Road:
    """Returns how ``networks`` fared."""
    stops: dict[str, Stop] = {}
    peers: Times = {}
    floors: Times = {}
    for document in documents:
        commit = document["environment"]["commit"] or "-dirty"
        if commit.endswith("-dirty"):  # what ran is not known
            continue
        stop = stops.setdefault(commit[:7], Stop(commit[:7], {}, {}))
        for row in document["rows"]:
            network, time = row["network"], row.get("device_ms")
            wanted = network in networks and (row["dtype"], row["batch"]) == (dtype, batch)
            if time is None or not wanted or row.get("size") not in (None, [224, 224]):
                continue
            if not row["ours"]:
                for times in (stop.peers, peers):
                    times[network] = min(time, times.get(network, time))
                continue
            stop.ours[network] = time
            if row.get("floor_ms"):  # of a GPU
                floors[network] = row["floor_ms"]
    measured = tuple(stop for stop in stops.values() if stop.ours)
    return Road(dtype, batch, measured, peers, floors)


def markdown(document: Mapping[str, Any]) -> str:
    """Returns a table a data type and batch."""
    lines = [
        "# The road of imported networks at low batch",
        "",
        f"`{document['command']}`: ms of a batch by events, passes one behind another, as "
        "`benchmarks.low_batch` recorded them, by the commit whose kernels ran; the peer is the fastest in "
        "any record, the floor that of docs/explanation/performance.md.",
    ]  # fmt: skip
    networks = document["networks"]
    for part in document["roads"]:
        lines += [
            "",
            f"## {part.dtype}, batch {part.batch}",
            "",
            f"| commit | {' | '.join(networks)} |",
            "|---|" + "---:|" * len(networks),
        ]
        rows = [(stop.commit, stop.ours) for stop in part.stops]
        for name, times in (*rows, ("best peer", part.peers), ("floor", part.floors)):
            lines.append(f"| {name} | {' | '.join(ms(times.get(n)) for n in networks)} |")
    return "\n".join(lines) + "\n"


def draw(document: Mapping[str, Any], file: Any) -> None:
    """Draws how many times its floor each network takes, a panel a data type and batch, as PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    roads, networks = document["roads"], document["networks"]
    rows = -(-len(roads) // 2)
    figure = Figure(figsize=(14, 5.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2 if len(roads) > 1 else 1, squeeze=False).flat
    for axes in panels[len(roads) :]:
        axes.set_axis_off()
    panels = panels[: len(roads)]
    colours = colormaps["tab10"].colors
    for axes, part in zip(panels, roads, strict=True):
        for network, colour in zip(networks, itertools.cycle(colours), strict=False):
            floor = part.floors.get(network)
            if not floor:
                continue
            line = [
                (position, stop.ours[network] / floor)
                for position, stop in enumerate(part.stops)
                if network in stop.ours
            ]
            axes.plot(
                *zip(*line, strict=True), color=colour, marker="o", markersize=4, label=network
            )
            if network in part.peers:
                at = len(part.stops), part.peers[network] / floor
                axes.plot(*at, "_", color=colour, markersize=16)
        labels = [*(stop.commit for stop in part.stops), "best peer"]
        axes.set_xticks(range(len(labels)), labels, rotation=45, fontsize=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{part.dtype}, batch {part.batch}", loc="left", fontsize=10)
        axes.set_ylabel("times the floor (lower is better)")
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    figure.suptitle(
        f"Imported networks on {document['gpu']}, by the commit that was measured", fontsize=11
    )
    figure.savefig(file, format="png", dpi=110)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    p = result_file.parser("low_batch_road", __doc__, "markdown", "chart")
    p.add_argument("--folder", type=Path, default=FOLDER, help="of records, in a clone")
    p.add_argument("--network", nargs="+", default=list(low_batch.NETWORKS), metavar="NAME")
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1, 20], metavar="N"
    )
    p.add_argument("--dtype", nargs="+", choices=list(ITEM), default=["float16"])
    options = p.parse_args(arguments)
    found = result_file.ResultFile("low_batch_road", options, arguments, networks=options.network)
    documents = history(options.folder)
    found.document["gpu"] = documents[-1]["environment"]["gpu"]
    found.document["roads"] = [
        road(documents, options.network, dtype, batch)
        for dtype in options.dtype
        for batch in options.batch
    ]
    if options.markdown is None:
        print(markdown(found.document), end="")
    found.write(markdown, draw)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
