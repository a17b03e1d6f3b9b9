"""``python -m benchmarks.plain_call``: predict without options against the best that any options give.

For 1, 100, 10,000 and many images, and on CUDA for float32 and float16 and for pageable and page-locked
memory: the wall time of ``Engine.predict(images)`` as it comes, interleaved with the same call with every
batch, data mode and chunk of a sweep named. Medians; the best is the best median. On the CPU the sweep is
over batches, with 1 thread and with all. What a call returns is compared with the plain one's before it is
timed. Where one call takes longer than a row may, the sweep is over the first images, and its best are
interleaved with the plain call over all of them.

``--python-threads``: instead, images per second with 1 and 2 Python threads that call one engine.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks import result_file
from cnn_engine import Engine, cli
from cnn_engine.devices import threads
from cnn_engine.errors import CnnEngineError
from cnn_engine.measure import environment
from cnn_engine.report import units

CPU_BATCHES = (1, 16, 64, 256, 1024, 4096, 16384)
CUDA_BATCHES = (1, 100, 1000, 10_000, 50_000, 1_000_000)
CHUNKS = (660, 1320, 2640, 3960, 7920)
NEEDED = 0.9
WORTH_S = 1e-3  # of a sample: shorter calls are repeated
FEWEST = 7  # turns: medians of three were up to 9 % apart for the same call made twice
SWEPT = 10_000  # images of a sweep where all would take too long
CLOSEST = 2  # of the sweep that are timed over all images then


def sample(call: Callable[[], Any]) -> float:
    """Returns the seconds of one call, the mean of as many as fill a millisecond."""
    calls = 0
    start = perf_counter()
    while True:
        call()
        calls += 1
        seconds = perf_counter() - start
        if seconds >= WORTH_S:
            return seconds / calls


def race(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Returns the median seconds of each of ``calls``, made interleaved for about ``seconds``.

    Each turn has an order of its own, so that none always comes after the same other. Calls that take twice
    the fastest's time at their first turns are left out of the others.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = perf_counter() + seconds
    running = dict(calls)
    turns = 0
    while turns < FEWEST or (perf_counter() < end and turns < 200):
        for name in order.sample(sorted(running), len(running)):
            times[name].append(sample(running[name]))
        turns += 1
        if turns == 2:
            fastest = min(min(values) for values in times.values())
            running = {
                name: call
                for name, call in running.items()
                if min(times[name]) <= 2 * fastest or name == "plain"
            }
    return {name: median(values) for name, values in times.items()}


def variants_on_cpu(
    count: int, threads: int
) -> tuple[Engine, dict[str, tuple[Engine, int | None]]]:
    engine = Engine(device="cpu", threads=threads)
    batches = [batch for batch in CPU_BATCHES if batch < count and count // batch <= 10_000]
    return engine, {f"batch={batch}": (engine, batch) for batch in [*batches, count]}


def variants_on_cuda(count: int, dtype: str) -> tuple[Engine, dict[str, tuple[Engine, int | None]]]:
    engine = Engine(device="cuda", dtype=dtype)
    resident = Engine(device="cuda", dtype=dtype, data_mode="resident")
    batches = [batch for batch in CUDA_BATCHES if batch < count and count // batch <= 1000]
    named = {f"resident, batch={batch}": (resident, batch) for batch in batches}
    if count <= 100_000:
        named[f"resident, batch={count}"] = (resident, count)
    chunks = [chunk for chunk in CHUNKS if chunk < count] or [count]
    if count >= 1000:
        chunks += [-(-count // 4), -(-count // 2)] if count < 5280 else []
    for chunk in chunks:
        stream = Engine(device="cuda", dtype=dtype, data_mode="stream", chunk=chunk)
        named[f"stream, chunk={chunk}"] = (stream, count)
    return engine, named


def measure(
    count: int, engine: Engine, named: dict[str, tuple[Engine, int | None]], images: np.ndarray,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Returns a row of the table for ``count`` images."""
    start = perf_counter()
    wanted = engine.predict(images)
    swept = images[:SWEPT] if perf_counter() - start > seconds else images
    calls: dict[str, Callable[[np.ndarray], Any]] = {"plain": engine.predict}
    for name, (other, batch) in named.items():
        try:
            found = other.predict(swept, batch)
        except CnnEngineError as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        if np.abs(found - wanted[: len(swept)]).max() > 1e-5:
            raise RuntimeError(f"{name}: expected the plain call's probabilities, found others")
        calls[name] = lambda some, other=other, batch=batch: other.predict(some, batch)

    def race_over(some: np.ndarray) -> dict[str, float]:
        return race({name: partial(call, some) for name, call in calls.items()}, seconds)

    times = race_over(swept)
    closest = sorted(times.keys() - {"plain"}, key=times.__getitem__)
    if len(swept) < count:
        calls = {name: calls[name] for name in ["plain", *closest[:CLOSEST]]}
        times = race_over(images)
    best = min(times.keys() - {"plain"}, key=times.__getitem__)
    size = engine.batch_size(None, count)
    return {
        "images": count,
        "dtype": engine.dtype,
        "threads": engine.threads,
        "chosen": f"{engine.data_mode_of(size)}, batch={size}",
        "plain_images_per_s": count / times["plain"],
        "best": best,
        "best_images_per_s": count / times[best],
        "share": times[best] / times["plain"],
        "seconds": times,
    }


def rows(
    device: str, counts: list[int], kernels: list[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table; ``kernels``: numbers of threads on the CPU."""
    generator = np.random.default_rng(0)
    if device == "cpu":
        for number in kernels:
            for count in counts:
                engine, named = variants_on_cpu(count, number)
                images = generator.integers(0, 256, (count, *engine.network.input_shape), np.uint8)
                yield {"memory": "host", **measure(count, engine, named, images, seconds)}
        return
    for dtype in ("float32", "float16"):
        for count in counts:
            engine, named = variants_on_cuda(count, dtype)
            pageable = generator.integers(0, 256, (count, *engine.network.input_shape), np.uint8)
            for memory in ("pageable", "page-locked"):
                images = pageable
                if memory == "page-locked":
                    images = engine.empty_images(count)
                    images[...] = pageable
                yield {"memory": memory, **measure(count, engine, named, images, seconds)}
            for other in {engine, *(other for other, _ in named.values())}:
                other.close()


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['images']:>9,} {row['dtype']:<8} {row['memory']:<11} {row['threads']:>3} threads: plain "
        f"{row['plain_images_per_s']:>12,.0f}/s ({row['chosen']}), best {row['best_images_per_s']:>12,.0f}/s "
        f"({row['best']}): {100 * row['share']:.0f} %",
        file=sys.stderr,
        flush=True,
    )


def _lines(document: dict[str, Any]) -> str:
    return "".join(f"{row}\n" for row in document["rows"])


def markdown(document: dict[str, Any]) -> str:
    """Returns the page."""
    where = document["environment"]
    lines = [
        "# predict without options",
        "",
        f"- Machine: {where['gpu'] or where['cpu']}, {where['driver'] or where['cpu_instruction_set']}",
        *result_file.run_lines(document),
        f"- Load of the host before it: {units.number(document['load'])}",
        "",
        "| images | dtype | memory | threads | plain, images/s | chosen | best, images/s | of | plain/best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['images']:,} | {row['dtype']} | {row['memory']} | {row['threads']} "
            f"| {row['plain_images_per_s']:,.0f} | {row['chosen']} | {row['best_images_per_s']:,.0f} "
            f"| {row['best']} | {100 * row['share']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def python_threads(device: str, kernels: list[int], seconds: float) -> list[dict[str, Any]]:
    """Returns images per second of one engine with 1 and 2 Python threads, interleaved."""
    found = []
    variants = ("fused", "pad") if device == "cpu" else ("fused", "tiled")
    for variant in variants:
        for number in kernels if device == "cpu" else [None]:
            for batch in (1, 7, 100):
                with Engine(device=device, variant=variant, threads=number) as engine:
                    images = np.zeros((batch, *engine.network.input_shape), np.uint8)
                    rates = ([], [])
                    for _ in range(5):
                        for callers in (1, 2):
                            rate = _rate(engine, images, callers, seconds / 10)
                            rates[callers - 1].append(rate)
                    one, two = map(median, rates)
                    row = {"variant": variant, "threads": engine.threads, "batch": batch,
                           "one_images_per_s": one, "two_images_per_s": two}  # fmt: skip
                found.append(row)
                print(
                    f"{variant}, {row['threads']} threads of kernels, batch {batch}: 1 Python thread "
                    f"{one:,.0f}/s, 2 {two:,.0f}/s, ratio {two / one:.2f}",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def _rate(engine: Engine, images: np.ndarray, callers: int, seconds: float) -> float:
    rates = [0.0] * callers
    barrier = threading.Barrier(callers)

    def call(index: int) -> None:
        engine.predict(images)
        barrier.wait()
        start = perf_counter()
        calls, took = 0, 0.0
        while took < seconds:
            engine.predict(images)
            calls, took = calls + 1, perf_counter() - start
        rates[index] = calls * len(images) / took

    workers = [
        threading.Thread(target=call, args=(index,), daemon=True) for index in range(callers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(rates)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    parser = result_file.parser("plain_call", __doc__, "json", "markdown")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--images",
        type=cli.whole_number(1, 10**7),
        nargs="+",
        help="default: 1, 100, 10,000 and on CUDA 1,000,000; on the CPU 100,000 in its place, which is a "
        "hundred passes of the rule already and takes seconds per call",
    )
    parser.add_argument(
        "--seconds", type=cli.number(0, 3600), default=2.0, help="of each row (default: 2)"
    )
    parser.add_argument("--python-threads", action="store_true", help="see above")
    parser.add_argument(
        "--threads", type=cli.whole_number(1, threads.MOST), nargs="+",
        help="of the CPU (default: 1, and the CPUs granted)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    most = 100_000 if options.device == "cpu" else 1_000_000
    counts = options.images or [1, 100, 10_000, most]
    kernels = sorted(set(options.threads or (1, threads.default())))
    with Engine(device=options.device) as engine:
        described = environment.describe(engine.device)
    whole = result_file.ResultFile(
        "plain_call",
        options,
        arguments,
        environment=described,
        load=environment.host_load(),
        rows=[],
    )
    found = whole.document["rows"]
    if options.python_threads:
        found += python_threads(options.device, kernels, options.seconds)
        whole.write(_lines)
        return cli.DONE
    for row in rows(options.device, counts, kernels, options.seconds):
        show(row)
        found.append(row)
        whole.write(markdown)  # what is done stays where a later row takes too long
    good = sum(row["share"] >= NEEDED for row in found)
    print(f"{good} of {len(found)} rows reach {100 * NEEDED:.0f} %")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
