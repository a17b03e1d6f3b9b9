"""``python -m benchmarks.staging``: how images in pageable memory are best staged for the bus, on CUDA.

Through the caches or past them: first by itself, the rate at which all threads fill page-locked memory, and
that at which the bus reads it directly afterwards, by the size of a chunk, out of 30 MiB, which a cache has
room for, and out of 320. Then whole passes of ``predict``, with every chunk staged one way, the other, and by
the rule (``schedule.PAST_CACHES_BYTES``), over the same images again and again and over others each time
("cold"): medians in turns, each turn in an order of its own. All ways' results are compared first.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import record
from cnn_engine import Engine, _cpu, cli
from cnn_engine.measure import environment
from cnn_engine.plan import stream

FUNCTIONS = {"through the caches": _cpu.copy, "past the caches": _cpu.stage}
LIMITS = {"through the caches": 0, "past the caches": 1 << 62, "by rule": stream.PAST_CACHES_BYTES}
SOURCES_MIB = (30, 320)
CHUNKS_MIB = (2, 4, 8, 16, 24)
IMAGES = (
    2640, 4000, 5000, 7000, 10_000, 15_000, 20_000, 30_000, 40_000, 49_000, 50_000, 60_000, 70_000, 89_000,
    100_000, 300_000,
)  # fmt: skip
COLD = (2640, 10_000, 30_000, 49_000, 70_000)
COLD_BYTES = 600 << 20  # of the arrays that are gone through: more than a cache holds
SAMPLES, FEWEST, MOST = 20, 9, 200


def rates(engine: Engine) -> Iterator[dict[str, Any]]:
    """Yields bytes a second of filling page-locked memory, and of the bus that reads it then."""
    device = engine.device
    most = max(CHUNKS_MIB) << 20
    source = np.random.default_rng(0).integers(0, 256, max(SOURCES_MIB) << 20, np.uint8)
    buffers = [device.empty_pinned((most,), np.uint8) for _ in range(stream.LANES)]
    remote = device.allocate(most)
    begin, end = device.event(), device.event()
    for whole in SOURCES_MIB:
        for chunk in CHUNKS_MIB:
            nbytes, first = chunk << 20, 0
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in FUNCTIONS}
            for index in range(SAMPLES):
                for way, fill in FUNCTIONS.items():
                    to = _cpu.address_of(buffers[index % len(buffers)])
                    start = perf_counter()
                    fill(_cpu.address_of(source) + first, to, nbytes, engine.threads)
                    filled = perf_counter() - start
                    begin.record(device.stream)
                    device.queue_copy(remote.address, to, nbytes)
                    end.record(device.stream)
                    device.synchronize()
                    times[way].append((filled, device.elapsed_s(begin, end)))
                    first = first + nbytes if first + 2 * nbytes <= whole << 20 else 0
            for way, found in times.items():
                fill_s, bus_s = (median(column) for column in zip(*found, strict=True))
                yield {"source_mib": whole, "chunk_mib": chunk, "way": way,
                       "fill_bytes_per_s": nbytes / fill_s, "bus_bytes_per_s": nbytes / bus_s}  # fmt: skip


def passes(engines: dict[str, Engine], count: int, cold: bool, seconds: float) -> dict[str, Any]:
    """Returns images a second of whole passes, in each of ``LIMITS``."""
    generator = np.random.default_rng(1)
    shape = engines["by rule"].network.input_shape
    some = generator.integers(0, 256, (min(count, 10_000), *shape), np.uint8)
    sets = -(-COLD_BYTES // (count * some[0].nbytes)) if cold else 1
    arrays = [np.resize(some, (count, *shape)) for _ in range(sets)]
    made = 0

    def call(way: str) -> tuple[float, np.ndarray]:
        nonlocal made
        made += 1
        images = arrays[made % sets]
        # Counts where a plan is built: at an engine's first call.
        stream.PAST_CACHES_BYTES = LIMITS[way]
        start = perf_counter()
        rows = engines[way].predict(images)
        return perf_counter() - start, rows

    wanted = call("by rule")[1]
    for way in LIMITS:
        if not np.array_equal(call(way)[1], wanted):
            raise RuntimeError(f"{way}: expected the same probabilities, found others")
    times: dict[str, list[float]] = {way: [] for way in LIMITS}
    order, end, turns = random.Random(0), perf_counter() + seconds, 0
    while turns < FEWEST or (perf_counter() < end and turns < MOST):
        for way in order.sample(sorted(LIMITS), len(LIMITS)):
            times[way].append(call(way)[0])
        turns += 1
    return {"images": count, "dtype": engines["by rule"].dtype, "cold": cold, "turns": turns,
            "images_per_s": {way: count / median(found) for way, found in times.items()}}  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    """Returns the page."""
    where = document["environment"]
    lines = [
        "# Staging through the caches, and past them",
        "",
        f"- Machine: {where['gpu']}, {where['cpu']}, {where['driver']}",
        *record.run_lines(document),
        "",
        "GB/s:",
        "",
        "| out of | chunk | through the caches: filled | then read by the bus | past: filled | read |",
        "|---|---|---|---|---|---|",
    ]
    pairs = zip(document["rates"][::2], document["rates"][1::2], strict=False)
    for through, past in pairs:
        cells = [one[key] / 1e9 for one in (through, past)
                 for key in ("fill_bytes_per_s", "bus_bytes_per_s")]  # fmt: skip
        lines.append(
            f"| {through['source_mib']} MiB | {through['chunk_mib']} MiB | "
            + " | ".join(f"{cell:.1f}" for cell in cells) + " |"
        )  # fmt: skip
    lines += [
        "",
        "Millions of images a second:",
        "",
        f"| images | | dtype | turns | {' | '.join(LIMITS)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["passes"]:
        cells = " | ".join(f"{row['images_per_s'][way] / 1e6:.2f}" for way in LIMITS)
        cold = "cold" if row["cold"] else ""
        lines.append(f"| {row['images']:,} | {cold} | {row['dtype']} | {row['turns']} | {cells} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    parser = cli.ArgumentParser(prog="python -m benchmarks.staging", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument(
        "--images", type=cli.whole_number(1, 10**7), nargs="+", default=list(IMAGES),
        help="of a pass (default: 16 numbers from 2,640 to 300,000)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=cli.number(0, 3600), default=0.5, help="of each row (default: 0.5)"
    )
    record.add_options(parser, "json", "markdown")
    options = parser.parse_args(arguments)
    with Engine(device=options.device) as engine:
        whole = record.Record(
            "staging", options, arguments, environment=environment.describe(engine.device),
            load=environment.host_load(), rates=[], passes=[],
        )  # fmt: skip
        whole.document["rates"] = list(rates(engine))
    for dtype in ("float32", "float16"):
        engines = {way: Engine(device=options.device, dtype=dtype) for way in LIMITS}
        sizes = [(count, False) for count in options.images]
        for count, cold in [*sizes, *((count, True) for count in COLD if count in options.images)]:
            row = passes(engines, count, cold, options.seconds)
            whole.document["passes"].append(row)
            print(row, file=sys.stderr, flush=True)
            whole.write(markdown)
        for engine in engines.values():
            engine.close()
    whole.write(markdown)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
