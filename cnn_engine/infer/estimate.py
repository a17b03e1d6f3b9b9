"""``infer --plan``: from a measured rate to nodes, hours and bytes for any number of images."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from .. import cli
from ..errors import InputError, expected
from ..io.files import read_json, write_text
from ..report import layout, units
from .display import duration
from .summary import rate_text

#: Nodes of the table where neither ``--nodes`` nor ``--hours`` is given.
NODES = (1, 4, 16, 64, 256)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the planner."""
    group = parser.add_argument_group("planner (nothing is run)")
    group.add_argument(
        "--plan", type=cli.number_of_images, metavar="IMAGES",
        help="print the nodes and hours that so many images need, such as 1e9, and the bottleneck",
    )  # fmt: skip
    group.add_argument(
        "--rate-from",
        metavar="REPORT.json",
        help="a report of this command, measured on one such node",
    )
    group.add_argument("--nodes", type=cli.whole_number(1, 10**6), help="how many there are")
    group.add_argument("--hours", type=cli.number(0, 10**6), help="how long it may take")
    group.add_argument(
        "--storage", type=cli.number(0, 10**9), metavar="GB/S",
        help="what the storage that all nodes share reads and writes together (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--image-bytes", type=cli.number(0, 10**12), metavar="BYTES",
        help="bytes of input per image (default: as in the report)",
    )  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Prints the plan; returns the exit code."""
    if options.rate_from is None:
        raise expected("--plan", "--rate-from REPORT.json with it", "none")
    if options.nodes is not None and options.hours is not None:
        raise expected("--plan", "--nodes or --hours", "both")
    cli.check_outputs({"--json": options.json}, [options.rate_from])
    measured = load(options.rate_from)
    found = plan(
        measured, options.plan, options.nodes, options.hours, options.storage, options.image_bytes
    )
    if not options.quiet and options.json != "-":
        cli.show(render(found))
    if options.json is not None:
        write_text(options.json, json.dumps(found, indent=2) + "\n")
    return cli.DONE


#: Bad images that a measured rate may have had, as a share: more, and it is no rate of such images.
MOST_BAD = 0.01

#: How far a report's rate may be off from its own images and seconds.
_OFF = 0.02


def load(path: str) -> dict[str, Any]:
    """Reads a report of ``infer --json``.

    Raises:
        InputError: it is none, it is damaged, nothing was measured, or more than :data:`MOST_BAD` of its
            images were bad.
    """
    wanted = "the JSON report of infer"
    document = read_json(path, wanted)
    if not isinstance(document, dict) or document.get("kind") != "inference":
        raise expected(path, wanted, "something else")
    if not document.get("images_per_s"):
        raise expected(path, "a measured rate of one machine", "none")
    for name, fits in _NEEDED.items():
        if not fits(document.get(name)):
            shown = repr(document.get(name))
            raise expected(
                path, f"{wanted}, with its {name}", shown if len(shown) < 60 else "others"
            )
    # What may be missing is as good as null.
    document = dict.fromkeys(_NEEDED) | document
    document["environment"] = {"cpu": None, "commit": None} | document["environment"]
    if len(document["hosts"]) != 1:
        raise expected(path, "a measured rate of one machine", f"{len(document['hosts'])} machines")
    images, errors = document["images"], document["errors"]
    if errors > MOST_BAD * images:
        share = units.percent(errors / images)
        raise expected(path, f"at most {MOST_BAD:.0%} of bad images in a rate to plan by", share)
    if abs(document["images_per_s"] * document["working_s"] / images - 1) > _OFF:
        found = (
            f"{document['images_per_s']:g} images/s of {images:,} in {document['working_s']:g} s"
        )
        raise expected(path, f"{wanted}, whose figures fit each other", found)
    return document


def _whole(lowest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and lowest <= value <= 1e18


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e18  # NaN is not


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _may(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _ceilings(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(row, dict) and _positive(row.get("images_per_s")) for row in value.values()
    )


def _environment(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _may(_text)(value.get(name)) for name in ("cpu", "commit")
    )


def _interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_positive, value))


#: What a plan takes of a report, and what that has to be.
_NEEDED: dict[str, Callable[[Any], bool]] = {
    "images": _whole(1),
    "errors": _whole(0),
    "workers": _whole(1),
    "input_bytes": _whole(0),
    "output_bytes": _whole(0),
    "images_per_s": _positive,
    "working_s": _positive,
    "command": _text,
    "started": _text,
    "device_name": _text,
    "hosts": lambda value: isinstance(value, list),
    "environment": _environment,
    "ceilings": _ceilings,
    "bound_by": _may(_text),
    "busiest_stage": _may(_text),
    "efficiency": _may(_positive),
    "images_per_s_interval": _may(_interval),
    "images_per_s_warning": _may(_text),
}


def plan(
    measured: dict[str, Any],
    images: int,
    nodes: int | None = None,
    hours: float | None = None,
    storage_gb_s: float | None = None,
    image_bytes: float | None = None,
) -> dict[str, Any]:
    """Returns the time of ``images`` on so many nodes like the measured one, and the stage that binds.

    A node does what was measured. Nodes share nothing but the storage: where its bandwidth is given, all
    together read and write no more than that. ``image_bytes`` other than the report's scale what is read
    alone, not what decoding costs.

    Args:
        measured: a report of one machine.
        nodes: how many; with ``hours`` None and None: several numbers.
        hours: find the fewest nodes that do it in so many.
        storage_gb_s: of all nodes together, 10^9 bytes per second.
        image_bytes: bytes of input per image; None: as measured.
    """
    # Of images that are not bad, also where an older report counted all.
    rate = (measured["images"] - measured["errors"]) / measured["working_s"]
    interval = measured.get("images_per_s_interval")
    read = measured["input_bytes"] / measured["images"] if image_bytes is None else image_bytes
    written = measured["output_bytes"] / measured["images"]
    binds = measured.get("bound_by") or measured.get("busiest_stage")
    most = None if storage_gb_s is None else storage_gb_s * 1e9 / (read + written)
    if hours is not None:
        needed = images / (hours * 3600)
        if most is not None and needed > most:
            least = images / most / 3600
            raise InputError(
                f"--hours: expected at least {units.number(least)}, which {storage_gb_s:g} GB/s of storage "
                f"take, found {hours:g}"
            )
        counts = [math.ceil(needed / rate)]
    else:
        counts = list(NODES) if nodes is None else [nodes]
    rows = []
    for count in counts:
        together = count * rate
        limited = most is not None and together > most
        slower = faster = None
        if interval is not None:
            slower, faster = (min(count * end, most or math.inf) for end in interval)
        together = most if limited else together
        rows.append(
            {
                "nodes": count,
                "workers": count * measured["workers"],
                "images_per_s": together,
                "seconds": images / together,
                "seconds_interval": None
                if interval is None
                else [images / faster, images / slower],
                "bound_by": "storage" if limited else binds,
                "read_bytes_per_s": together * read,
                "written_bytes_per_s": together * written,
            }
        )
    return {
        "schema": 1,
        "kind": "inference plan",
        "images": images,
        "measured": {
            "command": measured["command"],
            "images": measured["images"],
            "images_per_s": rate,
            "images_per_s_interval": interval,
            "images_per_s_warning": measured.get("images_per_s_warning"),
            "workers": measured["workers"],
            "device_name": measured["device_name"],
            "cpu": measured["environment"]["cpu"],
            "commit": measured["environment"]["commit"],
            "started": measured["started"],
            "bound_by": binds,
            "efficiency": measured["efficiency"],
            "ceilings": {name: row["images_per_s"] for name, row in measured["ceilings"].items()},
        },
        "input_bytes_an_image": read,
        "output_bytes_an_image": written,
        "input_bytes": round(images * read),
        "output_bytes": round(images * written),
        "shards": max(math.ceil(images * read / (1 << 30)), 1),
        "storage_bytes_per_s": None if storage_gb_s is None else storage_gb_s * 1e9,
        "rows": rows,
    }


def render(found: dict[str, Any]) -> str:
    """Returns a plan as text."""
    measured = found["measured"]
    ceilings = ", ".join(
        f"{'all on the CPUs' if name == 'cores' else name} {units.number(rate)}"
        for name, rate in measured["ceilings"].items()
    )
    fields = [
        ("Images", units.count(found["images"])),
        (
            "Measured",
            f"{rate_text(measured['images_per_s'], measured['images_per_s_interval'])} with "
            f"{units.counted(measured['workers'], 'worker')} on {measured['device_name']}, "
            f"{units.count(measured['images'])} images, {measured['started']}, commit "
            f"{measured['commit'] or 'unknown'}",
        ),
        ("Bound by", f"{measured['bound_by']}" + (
            "" if measured["efficiency"] is None
            else f", {units.percent(measured['efficiency'])} of its ceiling")),
        ("Ceilings, images/s", ceilings or "not measured"),
        ("Read", f"{units.size(found['input_bytes'])}, "
                 f"{units.number(found['input_bytes_an_image'])} B per image"),
        ("Written", f"{units.size(found['output_bytes'])}, "
                    f"{units.number(found['output_bytes_an_image'])} B per image"),
        ("Shards", f"{units.count(found['shards'])} of at most 1 GiB"),
    ]  # fmt: skip
    if measured["images_per_s_warning"]:
        fields.insert(2, ("Warning", measured["images_per_s_warning"]))
    rows = [
        [
            units.count(row["nodes"]),
            units.number(row["images_per_s"]),
            _time(row),
            f"{units.size(int(row['read_bytes_per_s']))}/s",
            f"{units.size(int(row['written_bytes_per_s']))}/s",
            str(row["bound_by"]),
        ]
        for row in found["rows"]
    ]
    table = layout.table(["Nodes", "images/s", "time", "read", "written", "bound by"], rows)
    note = (
        "Computed from the measured rate: nodes are taken to share nothing but the storage"
        + ("" if found["storage_bytes_per_s"] else ", which is taken to keep up (--storage)")
        + "."
    )
    lines = layout.fields([(label, units.printable(value)) for label, value in fields])
    return "\n".join([*lines, "", *table, "", note])


def _time(row: dict[str, Any]) -> str:
    if row["seconds_interval"] is None:
        return _long(row["seconds"])
    return f"{_long(row['seconds'])} ({' to '.join(map(_long, row['seconds_interval']))})"


def _long(seconds: float) -> str:
    days = seconds / 86400
    return f"{units.number(days)} days" if days >= 2 else duration(seconds)
