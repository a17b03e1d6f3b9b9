"""Summary of a run: rates and limits as JSON, as text and as one page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ..measure import environment, statistics
from ..measure.statistics import Estimate
from ..report import cautions, layout, units
from ..report.json import finite
from ..report.pages import template
from . import memory
from .output import Record
from .stage_limits import ALL, STAGES
from .supervise import Counts

SCHEMA = 1

#: Shards that the interval of the rate needs, and those that show whether they depend on each other: a mean
#: takes more of them than a median.
FEWEST_SHARDS, ENOUGH_SHARDS = 10, 30

#: Bad images, and lost labels, that a report names.
NAMED = 100

#: How many of them its text shows.
SHOWN = 10


@dataclass
class Summary:
    """All that a run knows when it ends; :meth:`to_dict` is the JSON document."""

    command: str
    hello: dict[str, Any]
    document: dict[str, Any]
    output: str
    engine: str
    part: str | None
    workers: int
    hosts: list[str]
    cores: int
    shards: int
    before: int
    done: int
    set_aside: list[dict[str, str]]
    records: list[Record]
    paces: list[tuple[float, int]]
    input_bytes: int
    counts: Counts
    trial: dict[str, list[dict[str, Any]]]
    ceilings: dict[str, list[dict[str, Any]]]
    planning_s: float
    working_s: float
    interrupted: bool
    manifest: dict[str, Any]
    load_average: float | None
    stamp: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON; unknown values are null."""
        ceilings = ceilings_of(self.ceilings, self.cores)
        limit = lowest(ceilings_of(self.trial, self.cores))
        limit = limit if limit in ceilings else lowest(ceilings)
        records = self.records
        rows, errors = (sum(getattr(r, name) for r in records) for name in ("rows", "errors"))
        # A bad image is not computed, perhaps not even decoded: it is no throughput.
        rate = (rows - errors) / self.working_s if rows > errors and self.working_s else None
        reached = None
        if rate is not None and limit is not None:
            reached = rate / ceilings[limit]["images_per_s"]
        for row in ceilings.values():
            row["reached"] = None if rate is None else rate / row["images_per_s"]
        busy = {
            name: {**stage, "share": stage["seconds"] / (self.workers * self.working_s)}
            for name, stage in self.counts.stages.items()
            if self.working_s
        }
        described = dict(self.hello["environment"])
        described["load_average"] = self.load_average
        cpu = {"load_average": self.load_average}
        described["warnings"] = environment.cpu_warnings(cpu)
        document = {
            "schema": SCHEMA,
            "kind": "inference",
            "command": self.command,
            **self.stamp,
            "environment": described,
            "settings": self.document["settings"],
            "weights": self.hello["weights"],
            "inputs": self.document["inputs"],
            "plan": self.document["plan"],
            "output": self.output,
            "engine": self.engine,
            "part": self.part,
            "workers": self.workers,
            "threads": self.hello["threads"],
            "hosts": self.hosts,
            "device": self.hello["device"],
            "device_name": self.hello["device_name"],
            "decoder": self.hello["decoder"],
            "preprocess_source": self.hello["preprocess_source"],
            "cores": self.cores,
            "interrupted": self.interrupted,
            "images": rows,
            "errors": errors,
            "bad_images": _first(r.bad for r in records),
            "label_texts": sum(r.label_texts for r in records),
            "labels_lost": sum(r.labels_lost for r in records),
            "lost_labels": _first(r.lost for r in records),
            "input_bytes": self.input_bytes,
            "output_bytes": sum(r.bytes for r in records),
            "shards": {
                "total": self.shards,
                "done_before": self.before,
                "done": self.done,
                "set_aside": self.set_aside,
            },
            "retries": self.counts.retries,
            "restarts": self.counts.restarts,
            "planning_s": self.planning_s,
            "working_s": self.working_s,
            "images_per_s": rate,
            "images_per_s_interval": rate_interval(rate, self.paces),
            "images_per_s_warning": rate_warning(rate, self.paces),
            "late_s": self.counts.late_s,
            "cpu_s": self.counts.cpu_s,
            "peak_bytes_a_worker": self.counts.peak_bytes,
            "peak_bytes_of_the_command": memory.peak_bytes(),
            "stages": busy,
            "busiest_stage": self.counts.bound_by(),
            "ceilings": ceilings,
            "bound_by": limit,
            "efficiency": reached,
            "folder": self.manifest,
        }
        return finite(document)


def _first(names: Iterable[tuple[str, ...]]) -> list[str]:
    return list(islice(chain.from_iterable(names), NAMED))


def rate_interval(rate: float | None, paces: list[tuple[float, int]]) -> list[float] | None:
    """Returns the 95 % interval of ``rate``, images/s of a whole run.

    Args:
        paces: of each shard, in the order in which they were done, the seconds that its worker took for
            it, and its images; fewer than :data:`FEWEST_SHARDS` give no interval.
    """
    found = _an_image(paces)
    if rate is None or found is None or found.samples < FEWEST_SHARDS or not found.known:
        return None
    return [rate * found.value / found.high, rate * found.value / found.low]


def rate_warning(rate: float | None, paces: list[tuple[float, int]]) -> str | None:
    """Returns why the interval of ``rate`` may be too narrow, or there is none; None where nothing says so.

    Arguments are those of :func:`rate_interval`.
    """
    found = _an_image(paces)
    if rate is None or found is None:
        return None
    if found.samples < FEWEST_SHARDS:
        shards = units.counted(found.samples, "shard")
        return (
            f"the rate has no interval: at least {FEWEST_SHARDS} shards are needed, found {shards}"
        )
    doubt = cautions.of_dependence(found, "shards", ENOUGH_SHARDS)
    return f"the rate's interval: {doubt}" if doubt else None


def _an_image(paces: list[tuple[float, int]]) -> Estimate | None:
    """Returns the mean seconds of an image of each shard; None without images."""
    seconds = [seconds / images for seconds, images in paces if images]
    return statistics.mean(seconds) if seconds else None


def ceilings_of(measured: dict[str, list[dict[str, Any]]], cores: int) -> dict[str, dict[str, Any]]:
    """Returns the rate of each stage alone with all workers at it.

    Beside the stages, ``read and copy`` is of both at once, ``all at once`` of all beside each other, and
    ``cores`` of their CPU time per image alone, on the CPUs that there are. A stage that has nothing to do
    has no row.
    """
    found: dict[str, dict[str, Any]] = {}
    for stage, rows in measured.items():
        rows = [row for row in rows if row["images"]]
        if not rows:
            continue
        images = sum(row["images"] for row in rows)
        found[stage] = {
            "images_per_s": sum(row["images"] / row["seconds"] for row in rows),
            "bytes_an_image": sum(row["bytes"] for row in rows) / images,
            "cpu_s_an_image": sum(row["cpu_seconds"] for row in rows) / images,
        }
    together = sum(row["cpu_s_an_image"] for name, row in found.items() if name in STAGES)
    if together:
        found["cores"] = {
            "images_per_s": cores / together,
            "bytes_an_image": None,
            "cpu_s_an_image": together,
        }
    return found


def lowest(ceilings: dict[str, dict[str, Any]]) -> str | None:
    """Returns the name of the lowest ceiling.

    ``all at once`` is none: a run may do more than stages that have no regard for each other.
    """
    limits = (name for name in ceilings if name != ALL)
    return min(limits, key=lambda name: ceilings[name]["images_per_s"], default=None)


def _rows(settings: dict[str, Any]) -> str:
    """Returns which outputs are kept, and where those are that have files of their own."""
    top, numbers = settings["top"], settings["numbers"]
    if "outputs" not in settings:
        return f"all {numbers}" if top is None else f"the {top} largest {numbers}"
    words = []
    for one in settings["outputs"]:
        shape = " x ".join(map(str, one["shape"])) or "1"
        where = f" in shard-*.{one['title']}.npy" if one["in_files"] else ""
        words.append(f"{one['output']} {one['dtype']} {shape}{where}")
    return "; ".join(words)


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the facts of the run, a line each: network, device, inputs, outcome."""
    settings, plan = document["settings"], document["plan"]
    variant = settings["variant"] + (" with reduction" if settings["reduction"] else "")
    planned = "" if plan["images"] < 0 else f", {units.counted(plan['images'], 'image')}"
    rows = [
        ("Network", f"{settings['network']}, SHA-256 {settings['model_sha256'][:12]}"),
        ("Weights", document["weights"]),
        ("Input", " ".join(document["inputs"])),
        ("Plan", f"{units.counted(plan['shards'], 'shard')}{planned}, {units.size(plan['bytes'])}"),
        ("Output", document["output"]),
        ("Rows", _rows(settings)),
        ("Device", f"{document['device']}, {document['device_name']}"),
        ("Variant", f"{variant}, {settings['dtype']}, batch {units.count(settings['batch'])}"),
        (
            "Workers",
            f"{units.count(document['workers'])} ({document['engine']}), "
            f"{units.counted(document['threads'], 'thread')} each, on "
            f"{units.counted(document['cores'], 'CPU')} of "
            f"{units.counted(len(document['hosts']), 'machine')}",
        ),
        ("Command", document["command"]),
        ("Started", f"{document['started']}, took {units.seconds(document['duration_s'])}"),
    ]
    if settings["preprocess"] is not None:
        source = document["preprocess_source"]
        rows.insert(3, ("Images", f"prepared by {settings['preprocess']}, as {source} says"))
    if document["part"] is not None:
        rows.insert(4, ("Part of an array", document["part"]))
    rows += [("Warning", warning) for warning in document["environment"]["warnings"]]
    if document["images_per_s_warning"]:
        rows.append(("Warning", document["images_per_s_warning"]))
    if document["interrupted"]:
        rows.append(("Warning", "interrupted: the same command does what is left"))
    return [(label, units.printable(value)) for label, value in rows]


def outcome(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the counts and rates, a line each."""
    shards, folder = document["shards"], document["folder"]
    rate, images = document["images_per_s"], document["images"]
    cpu_s, working = document["cpu_s"], document["working_s"]
    rows = [
        ("Images", f"{units.count(document['images'])}, {units.count(document['errors'])} of them bad"),
        (
            "Shards",
            f"{units.count(shards['done'])} done, {units.count(shards['done_before'])} had been, of "
            f"{units.count(shards['total'])}",
        ),
        ("Retries, new workers", f"{units.count(document['retries'])}, {units.count(document['restarts'])}"),
        (
            "Folder",
            f"{'complete' if folder['complete'] else 'not complete'}: "
            f"{units.counted(folder['images'], 'row')}, {units.count(folder['errors'])} of them bad",
        ),
        ("Planning, working", f"{units.seconds(document['planning_s'])}, "
                              f"{units.seconds(document['working_s'])}"),
        ("Throughput", rate_text(rate, document["images_per_s_interval"])),
        (
            "CPU time",
            f"{units.seconds(cpu_s / images if images else None)} per image, "
            f"{units.percent(cpu_s / (document['cores'] * working) if working else None)} of the CPUs",
        ),
        (
            "Read, written",
            f"{units.size(document['input_bytes'])}, {units.size(document['output_bytes'])}",
        ),
        ("Peak memory", f"{units.size(document['peak_bytes_a_worker'] or None)} per worker, "
                        f"{units.size(document['peak_bytes_of_the_command'])} the command itself"),
    ]  # fmt: skip
    if document["bound_by"] is not None:
        rows.append(("Bound by", f"{document['bound_by']}, the lowest of the ceilings"))
        rows.append(("Efficiency", f"{units.percent(document['efficiency'])} of that ceiling"))
    if document["label_texts"]:
        count = units.count(document["label_texts"])
        rows.append(("Labels", f"{count} are texts, in the column label_text"))
    if document["labels_lost"]:
        count = units.count(document["labels_lost"])
        rows.append(
            ("Labels", f"{count} lost, which are neither whole numbers nor texts, or of no image")
        )
    for label, names in (("Bad image", "bad_images"), ("Lost label", "lost_labels")):
        rows += [(label, units.printable(name)) for name in document[names][:SHOWN]]
    rows += [
        ("Set aside", units.printable(f"{row['shard']} ({row['input']}): {row['reason']}"))
        for row in shards["set_aside"]
    ]
    return rows


def rate_text(rate: float | None, interval: list[float] | None) -> str:
    """Returns images/s with their interval, where that is known."""
    if rate is None:
        return "-"
    text = f"{units.number(rate)} images/s"
    if interval is not None:
        text += f" (95 %: {' to '.join(map(units.number, interval))})"
    return text


#: The columns of :func:`stage_rows`.
COLUMNS = (
    "Stage",
    "alone, images/s",
    "reached",
    "alone, bytes",
    "CPU time per image",
    "at work here",
)


def stage_rows(document: dict[str, Any]) -> list[list[str]]:
    """Returns a row per stage: its rate alone, the run's share of that, and its time at work."""
    rows = []
    for name in dict.fromkeys((*document["ceilings"], *document["stages"])):
        ceiling, stage = document["ceilings"].get(name), document["stages"].get(name)
        if ceiling is None and not stage["images"]:
            continue
        rate = ceiling and ceiling["images_per_s"]
        nbytes = ceiling and ceiling["bytes_an_image"]
        rows.append(
            [
                "all on the CPUs" if name == "cores" else name,
                units.number(rate),
                units.percent(ceiling and ceiling["reached"]),
                units.UNKNOWN if not nbytes else f"{units.size(int(rate * nbytes))}/s",
                units.seconds(ceiling and ceiling["cpu_s_an_image"]),
                units.percent(stage and stage["share"]),
            ]
        )
    return rows


def text(document: dict[str, Any]) -> str:
    """Returns the report as text, at most 100 columns wide where no path is longer."""
    parts = [
        layout.fields(facts(document)),
        layout.fields(outcome(document)),
    ]
    if document["stages"]:
        parts.append(layout.table(list(COLUMNS), stage_rows(document)))
    return "\n\n".join("\n".join(part) for part in parts)


def html(document: dict[str, Any]) -> str:
    """Returns the report as one page without scripts or anything from elsewhere."""
    rows = stage_rows(document)
    most = max((row["images_per_s"] for row in document["ceilings"].values()), default=0)
    bars = [
        (name, row["images_per_s"], 100 * row["images_per_s"] / most)
        for name, row in document["ceilings"].items()
    ]
    if bars and document["images_per_s"]:
        rate = document["images_per_s"]
        bars.append(("this run", rate, 100 * rate / most))
    return template("page.html", __package__).render(
        title=f"Inference: {document['settings']['network']}",
        facts=facts(document),
        outcome=outcome(document),
        columns=COLUMNS,
        rows=rows,
        bars=bars,
        number=units.number,
    )
