"""Gathers the reports of all ranks into one document, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..report import units
from .roles import DATA_PARALLEL, IN_PROCESS, NONE, Roles
from .run import Plan, RankReport

SCHEMA = 1


def ceilings(roles: Roles, ranks: Sequence[RankReport]) -> dict[str, float | None]:
    """Returns images/s of the whole ensemble by each part alone; None where there is no such part."""

    def lowest(part: str) -> float | None:
        found = [rank.ceilings.get(part) for rank in ranks]
        return min((rate for rate in found if rate is not None), default=None)

    each = lowest("preprocessing")
    divided = 1 if roles.design in (NONE, IN_PROCESS) else len(roles.preprocessors)
    return {
        "preprocessing": None if each is None else divided * each,
        "members": lowest("members"),
        "communication": lowest("communication"),
    }


def bound(found: dict[str, float | None]) -> str | None:
    """Returns the part with the lowest ceiling, or None where none was measured."""
    known = {part: rate for part, rate in found.items() if rate is not None}
    return min(known, key=known.__getitem__) if known else None


def document(plan: Plan, ranks: Sequence[RankReport], about: dict[str, Any]) -> dict[str, Any]:
    """Returns the report as plain values.

    Args:
        ranks: of those ranks that could tell, in order.
        about: ``command``, ``environment`` and what else stands at the top.
    """
    roles = plan.roles
    working = [rank for rank in ranks if rank.steps.get("steps")]
    whole = roles.design != DATA_PARALLEL  # each rank sees all images, or a part of them
    longest = max((rank.steps["total_s"] for rank in working), default=0.0)
    seen = [rank.steps["images"] for rank in working]
    images = max(seen, default=0) if whole else sum(seen)
    limits = ceilings(roles, ranks)
    rate, sent = units.per_second(images, longest), limits["communication"]
    corrupt = sorted({sample for rank in ranks for sample in rank.preprocessing.get("corrupt", ())})
    reasons = sorted({why for rank in ranks for why in rank.preprocessing.get("reasons", ())})
    return {
        "schema": SCHEMA,
        "kind": "ensemble",
        **about,
        "design": roles.design,
        "ranks": roles.ranks,
        "preprocessors": len(roles.preprocessors),
        "members": [
            {"name": spec.name, "network": spec.model or spec.network, "weights": spec.weights,
             "device": spec.device, "ranks": list(roles.replicas(spec.index))}
            for spec in plan.specs
        ],
        "work": plan.work,
        "batch": plan.order.batch,
        "epochs": plan.order.epochs,
        "steps": len(plan.order),
        "images": images,
        "seconds": longest,
        "throughput_images_per_s": rate,
        "start_up_s": max((rank.start_up_s or 0.0 for rank in ranks), default=None),
        "core_s": {
            "preprocessing": sum(rank.preprocessing.get("core_s", 0.0) for rank in ranks),
            "processes": sum(rank.process_core_s or 0.0 for rank in ranks),
            "machines": _total(rank.usage["core_s"] for rank in ranks if rank.usage),
        },
        "ceilings_images_per_s": limits,
        "bound_by": bound(limits),
        "communication_share": units.share(rate, sent) if rate and sent else None,
        "corrupt": {"count": len(corrupt), "samples": corrupt, "reasons": reasons},
        "options": {
            "augment": plan.augment, "seed": plan.seed, "queue": plan.queue,
            "prefetch": plan.prefetch, "readers": plan.readers, "decoders": plan.decoders,
            "shuffle": plan.order.shuffle, "nccl": plan.nccl,
        },
        "rank_reports": [rank.to_dict() for rank in ranks],
    }  # fmt: skip


def _total(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def text(found: dict[str, Any]) -> str:
    """Returns the report for people."""
    lines = [
        f"Ensemble of {units.counted(len(found['members']), 'member')}, {found['design']}, "
        f"{units.counted(found['ranks'], 'rank')}",
        "",
    ]

    def row(label: str, value: str) -> None:
        lines.append(f"{label:<29}: {value}")

    row("Work", f"{found['work']}, batch {found['batch']}")
    row("Data", f"{found['data']['name']}, {units.counted(found['data']['images'], 'image')}")
    row("Transport", found["transport"])
    row("Images", f"{units.count(found['images'])} in {units.seconds(found['seconds'])}")
    row("Throughput", f"{units.number(found['throughput_images_per_s'])} images/s")
    row("Start-up", units.seconds(found["start_up_s"]))
    core = found["core_s"]
    row("Core-seconds, preprocessing", units.number(core["preprocessing"]))
    row("Core-seconds, all processes", units.number(core["processes"]))
    row("Core-seconds, whole machines", units.number(core["machines"]))
    limits = found["ceilings_images_per_s"]
    if found["bound_by"]:
        for part, rate in limits.items():
            if rate is not None:
                row(f"Ceiling, {part} alone", f"{units.number(rate)} images/s")
        reached = units.share(found["throughput_images_per_s"] or 0.0, limits[found["bound_by"]])
        row("Bound by", f"{found['bound_by']}, {units.percent(reached)} of its ceiling")
    if found["communication_share"] is not None:
        share = units.percent(found["communication_share"])
        row("Communication", f"would take {share} of a step if nothing else ran")
    if found["corrupt"]["count"]:
        row("Corrupt", f"{units.counted(found['corrupt']['count'], 'image')} left out")
        lines += [f"  {why}" for why in found["corrupt"]["reasons"]]
    lines += ["", *_ranks(found)]
    if results := found.get("accuracy"):
        lines += ["", f"{'Accuracy':<24}  {'top-1':>8}  correct"]
        for name, one in results.items():
            cells = (
                f"{units.percent(one['top1']):>8}  {one['correct']} of {one['total']}"
                if one
                else f"{units.UNKNOWN:>8}  no labels"
            )
            lines.append(f"{name:<24}  {cells}")
    if found.get("training"):
        lines.append("")
    for name, one in (found.get("training") or {}).items():
        last = one["log"][-1] if one["log"] else None
        if last:
            right = units.percent(last["train_accuracy"])
            what = f"loss {last['loss']:.4f}, training accuracy {right} in epoch {last['epoch']}"
            lines.append(f"{name}: {what}: {one['weights']}")
    lines += [f"note: {note}" for note in found.get("notes", ())]
    return "\n".join(map(units.printable, lines))  # names of members and files come from outside


def _ranks(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{'Rank':<5}{'images/s':>9}{'compute':>10}{'waiting':>10}{'augment':>10}{'extra':>10}"
        f"{'decoding':>10}{'waits for':>12}  role"
    ]
    for rank in found["rank_reports"]:
        steps = rank["steps"]
        rate = units.number(units.per_second(steps.get("images", 0), steps.get("total_s")))
        parts = [
            units.seconds(steps[key]) if steps.get("steps") else units.UNKNOWN
            for key in ("compute_s", "waiting_s", "augment_s", "extra_s")
        ]
        decoding = units.seconds(rank["preprocessing"].get("core_s"))
        waits = rank["waits"]
        longest = max(waits, key=waits.__getitem__, default=None)
        why = longest if longest and waits[longest] > 0 else units.UNKNOWN
        cells = "".join(f"{part:>10}" for part in (*parts, decoding))
        lines.append(f"{rank['rank']:<5}{rate:>9}{cells}{_SHORT.get(why, why):>12}  {rank['role']}")
    return lines


_SHORT = {"preprocessing": "decoding", "peers": "other ranks", "members": "its members"}
