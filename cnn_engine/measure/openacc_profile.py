"""Profiles OpenACC directive by directive, through the runtime's interface (acc_prof.h)."""

from __future__ import annotations

from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import openacc_mapping
from ..errors import UnsupportedError
from . import profile_tables, timing
from .cupti import activity
from .openacc_events import Row, Timing
from .profile_tables import Profile, from_steps

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .result import Result

#: So many passes are run plain too, in turn with profiled ones, for what profiling costs.
PLAIN = 20

#: Passes whose activities are recorded by CUPTI, after the others: records cost time.
RECORDED = 100

#: No pass begins after so many seconds: one iteration over a few thousand images is complete in it.
CAP_S = 60.0


def collect(
    engine: Engine,
    images: np.ndarray,
    probabilities: np.ndarray,
    batch: int,
    result: Result,
    *,
    top: float,
    progress: Any = None,
) -> tuple[Profile, list[float], list[float]]:
    """Runs all images once under the profiling interface, so that counts are those of the images.

    Returns:
        The profile, with ``openacc``; and seconds of passes of a full batch, plain and profiled.
    """
    module = engine.device.kernels
    found: dict[tuple, dict[str, Any]] = {}
    plain_s: list[float] = []
    profiled_s: list[float] = []
    done = images_done = 0
    wall_s = 0.0
    interrupted = False
    passes = -(-len(images) // batch)
    if progress is not None:
        progress.start("profile", len(images))
    deadline = perf_counter() + CAP_S
    try:
        for plan, count in timing.batches(engine, images, probabilities, batch):
            if len(plain_s) < PLAIN:
                start = perf_counter()
                plan.run()
                if count == batch:
                    plain_s.append(perf_counter() - start)
            module.start_profile()
            try:
                start = perf_counter()
                plan.run()
                seconds = perf_counter() - start
            finally:
                _add(found, module.stop_profile())
            if count == batch:
                profiled_s.append(seconds)
            wall_s += seconds
            done += 1
            images_done += count
            if progress is not None:
                progress.advance(count)
            if perf_counter() > deadline:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if progress is not None:
            progress.stop()
    profile = from_steps(result, top=top, notes=[])
    profile.passes, profile.images, profile.wall_s = done, images_done, wall_s
    profile.interrupted = interrupted
    # They are of other passes, and neither a GPU's own records nor the CPU alone: the layers stay.
    profile.gpu, profile.cpu_s = [], None
    if done < passes:
        profile.notes.append(
            f"{passes - done} of {passes} passes (at most {CAP_S:g} s are profiled)"
        )
    if engine.device.host:
        profile.copies = []
        profile.notes.append(
            "kernels launched, transfers: on the host a compute region is a call, and data stays where it is"
        )
    elif not interrupted:
        _record(profile, engine, images, probabilities, batch)
    profile.openacc = _timing(engine, found)
    return profile, plain_s[1:], profiled_s[1 : len(plain_s)]


def _record(
    profile: Profile, engine: Engine, images: np.ndarray, probabilities: np.ndarray, batch: int
) -> None:
    """Adds what CUPTI has of more passes: the GPU's activities and the driver's calls; or why it has none."""
    done = 0
    try:
        for most in (1, RECORDED):  # the first recording sets CUPTI up
            passes = islice(timing.batches(engine, images, probabilities, batch), most)
            with activity.record() as trace:
                for done, (plan, _) in enumerate(passes, 1):  # noqa: B007
                    plan.run()
    except UnsupportedError as error:
        profile.notes.append(str(error))
        return
    except KeyboardInterrupt:
        profile.interrupted = True
        return
    profile.gpu = profile_tables.activities(trace)
    profile.api = profile_tables.api_calls(trace.api)
    profile.notes.append(
        f"GPU activities and CUDA API calls of the profiled passes: they are of {done} more, for CUPTI"
    )


def _add(found: dict[tuple, dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        key = tuple(row[name] for name in ("file", "line", "kind", "event", "kernel", "variable"))
        if (kept := found.setdefault(key, row)) is row:
            continue
        for name in ("count", "bytes", "total_s", "excl_s"):
            kept[name] += row[name]
        for name in ("min_s", "excl_min_s"):
            kept[name] = min(kept[name], row[name])
        for name in ("max_s", "excl_max_s"):
            kept[name] = max(kept[name], row[name])


def _timing(engine: Engine, found: dict[tuple, dict[str, Any]]) -> Timing:
    device = engine.device
    mapping = openacc_mapping.of(device.kernels)
    kinds = ("data", "copyin", "region", "implicit", "kernel", "copyout", "wait")
    order = {kind: i for i, kind in enumerate(kinds)}
    rows = []
    for one in sorted(
        found.values(), key=lambda r: (r["file"], r["line"], order[r["kind"]], r["variable"])
    ):
        directive = mapping.at(one["file"], one["line"])
        source, said = (directive.source, directive.said) if directive else ("", [])
        rows.append(Row(source=source, said=list(said), **one))
    where = "host" if device.host else "NVIDIA"
    return Timing(where, max(device.number, 0), device.host, device.kernels.compiler, rows)
