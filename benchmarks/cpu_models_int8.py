"""What :mod:`benchmarks.cpu_models` asks of quantized networks: peaks, goals, and whether they are met."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cnn_engine import _cpu

#: The type of the contestants that read a quantized file.
INT8 = "int8"
#: Seconds for which a peak is measured, and rounds of a burst.
PEAK_S, PEAK_ROUNDS = 0.05, 2_000
#: Below this share of the VNNI peak the better library is to be beaten by RATIO; where it is above, ours is
#: to be ahead and at LEAST of that peak.
SHARE, RATIO, LEAST = 0.65, 1.25, 0.88
#: How many times as fast as our float32 a network is to be.
TO_FLOAT32 = {"resnet50": 2.8}


@dataclass
class Cell:
    """Our quantized network at one batch and number of threads, beside the better library.

    Attributes:
        vnni_share, peer_vnni_share: multiply-adds as a part of the cores' VNNI peak, which AMX can pass.
        goal: what is asked for, in words; ``met``: whether it is reached.
        to_float32: how many times as fast as our float32, where that was timed.
    """

    network: str
    batch: int
    threads: int
    seconds: float
    best_peer: str
    peer_seconds: float
    ratio: float
    vnni_share: float
    peer_vnni_share: float
    goal: str
    met: bool
    to_float32: float | None = None


def vnni() -> str:
    """Returns the widest VNNI instructions of this CPU; those that are selected where it has none."""
    known = [name for name in _cpu.integer_instructions() if name.endswith("vnni")]
    return known[-1] if known else _cpu.selected_integer_instructions()


def peak(instructions: str) -> float:
    """Measures the multiply-adds a second of 8-bit integers of one core."""
    before = _cpu.selected_integer_instructions()
    _cpu.select_integer_instructions(instructions)
    try:
        best, end = 0.0, time.perf_counter() + PEAK_S
        while (start := time.perf_counter()) < end:
            count = _cpu.integer_burst(PEAK_ROUNDS)
            best = max(best, count / (time.perf_counter() - start))
    finally:
        _cpu.select_integer_instructions(before)
    return best


def cell(rows: Sequence[Any], multiply_adds: int, vnni_peak: float) -> dict[str, Any] | None:
    """Returns the :class:`Cell` of the rows of one network, batch and number of threads, as a dictionary.

    Args:
        multiply_adds: of the batch.
        vnni_peak: multiply-adds a second of one core.
    """
    own = next((row for row in rows if row.ours and row.dtype == INT8), None)
    if own is None or own.ratio is None:
        return None
    peer_seconds = own.seconds * own.ratio
    ours, peers = (
        multiply_adds / seconds / (vnni_peak * own.threads)
        for seconds in (own.seconds, peer_seconds)
    )
    if peers < SHARE:
        goal, met = f"{RATIO:g} times the peer", own.ratio >= RATIO
    else:
        goal, met = f"ahead, {LEAST:.0%} of the VNNI peak", own.ratio > 1 and ours >= LEAST
    whole = next((row for row in rows if row.ours and row.dtype == "float32"), None)
    to_float32 = whole.seconds / own.seconds if whole else None
    if own.network in TO_FLOAT32 and to_float32 is not None:
        goal += f"; {TO_FLOAT32[own.network]:g} times our float32"
        met = met and to_float32 >= TO_FLOAT32[own.network]
    found = Cell(
        own.network, own.batch, own.threads, own.seconds, own.best_peer, peer_seconds, own.ratio,
        ours, peers, goal, met, to_float32,
    )  # fmt: skip
    return asdict(found)


def verdict(found: Mapping[str, Any]) -> str:
    """Returns a cell's shares, its goal and whether that is met, in a line."""
    return (
        f"VNNI peak: ours {found['vnni_share']:.0%}, {found['best_peer']} {found['peer_vnni_share']:.0%}; "
        f"{'meets' if found['met'] else 'MISSES'}: {found['goal']}"
    )


def table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a page's section on the goals."""
    ahead, met = (
        sum(bool(test(one)) for one in cells)
        for test in (lambda c: c["ratio"] > 1, lambda c: c["met"])
    )
    lines = [
        "", f"## int8: ahead in {ahead} of {len(cells)} cells, {met} meet their goal", "",
        "| network | batch | threads | ours, ms | better library | its ms | ratio | of the VNNI peak "
        "| its share | goal | met | to our float32 |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|---|---|--:|",
    ]  # fmt: skip
    for one in cells:
        speedup = "-" if one["to_float32"] is None else f"{one['to_float32']:.2f}"
        lines.append(
            f"| {one['network']} | {one['batch']} | {one['threads']} | {one['seconds'] * 1e3:.2f} "
            f"| {one['best_peer']} | {one['peer_seconds'] * 1e3:.2f} | {one['ratio']:.2f} "
            f"| {one['vnni_share']:.0%} | {one['peer_vnni_share']:.0%} | {one['goal']} "
            f"| {'yes' if one['met'] else '**no**'} | {speedup} |"
        )
    return lines


def openvino_crashes(path: str, shape: Sequence[int]) -> bool:
    """Whether OpenVINO ends the process as it compiles a file that it reads itself; tried in another one."""
    code = (
        "import sys, openvino\n"
        "model = openvino.Core().read_model(sys.argv[1])\n"
        "model.reshape([int(size) for size in sys.argv[2:]])\n"
        "openvino.Core().compile_model(model, 'CPU')\n"
    )
    words = [sys.executable, "-c", code, path, *map(str, shape)]
    return subprocess.run(words, capture_output=True, check=False).returncode < 0
