"""The report as one HTML page that needs no network and no script."""

from __future__ import annotations

from typing import Any

from ..report import units
from ..report.pages import template
from .report import text

#: Of a host's samples, those that are drawn.
MOST_POINTS = 600

_PARTS = (
    ("compute_s", "compute"), ("waiting_s", "waiting"), ("augment_s", "augment"), ("extra_s", "extra"),
)  # fmt: skip


def render(document: dict[str, Any]) -> str:
    """Returns the page of a report, as :func:`cnn_engine.ensemble.report.document` makes it."""
    ranks = document["rank_reports"]
    return template("page.html", __package__).render(
        title=f"Ensemble: {document['design']}, {len(document['members'])} members",
        text=text(document),
        bars=[_bar(rank) for rank in ranks if rank["steps"].get("total_s")],
        parts=[label for _, label in _PARTS],
        charts=[
            _chart(rank["usage"]) for rank in ranks if rank["usage"] and rank["usage"]["cores"]
        ],
        command=document.get("command", ""),
    )


def _bar(rank: dict[str, Any]) -> dict[str, Any]:
    steps = rank["steps"]
    total = steps["total_s"]
    return {
        "label": f"rank {rank['rank']}: {rank['role']}",
        "total": units.seconds(total),
        "segments": [
            (label, 100 * max(steps[key], 0.0) / total, units.seconds(steps[key]))
            for key, label in _PARTS
        ],
    }


def _chart(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of busy cores over time, as points of an SVG of 1000 x 200."""
    times, busy = usage["times_s"], [sum(cores) for cores in usage["cores"]]
    step = max(1, len(times) // MOST_POINTS)
    most, end = len(usage["cores"][0]), max(times[-1], 1e-9)
    points = [
        f"{1000 * at / end:.1f},{200 - 200 * min(value / most, 1):.1f}"
        for at, value in list(zip(times, busy, strict=True))[::step]
    ]
    return {
        "host": usage["host"],
        "source": usage["source"],
        "cores": most,
        "end": units.seconds(times[-1]),
        "core_s": units.number(usage["core_s"]),
        "points": " ".join(points),
    }
