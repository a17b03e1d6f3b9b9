"""Every convolution of many networks by ``tiled`` and by ``blocked`` on a GPU: what ``auto``'s rule rests on.

``python -m benchmarks.conv2d_variants --json conv2d.json --markdown conv2d.md``

The shapes are those of torchvision's and timm's networks of :mod:`benchmarks.models` (one group, and what
follows the sum left out: only ``blocked`` takes that up), each once. A time is a kernel's on the device, the
least of some turns of both; both kernels' outputs are compared before.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cnn_engine import _cpu, cli, devices, export
from cnn_engine.errors import CnnEngineError, expected
from cnn_engine.io.files import write_text
from cnn_engine.measure import environment

from . import models
from .models_worker import ignore_compiled_operators

TURNS = 5
TURN_S = 200e-6  # of launches that are timed together
MOST_LAUNCHES = 20

#: Filters of a layer, by which the rule is made.
FILTERS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1 << 31)

Shape = tuple[int, ...]  # C, H, W, K, R, S, strides, paddings, dilations: see Conv2dShape


def shapes_of(name: str) -> Iterator[Shape]:
    """Yields the convolutions of a network of PyTorch's, those of one group, in order."""
    import torch

    found: list[Shape] = []

    def look(module: Any, inputs: Any, output: Any) -> None:
        if module.groups == 1 and isinstance(module.padding, tuple):
            rows, columns = module.padding
            paddings = (rows, columns, rows, columns)
            found.append(
                (*inputs[0].shape[1:], module.out_channels, *module.kernel_size, *module.stride, *paddings,
                 *module.dilation)
            )  # fmt: skip

    with torch.device("meta"), torch.no_grad():
        module, _ = export.build(models.spec_of(name), "random")
        for part in module.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.register_forward_hook(look)
        module(torch.empty(1, *export.images_shape(module, None)))
    yield from found


def times(device: Any, calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Returns the seconds of each of ``calls`` on the device: the least of some turns."""
    events = device.event(), device.event()
    best = dict.fromkeys(calls, math.inf)

    def sample(call: Callable[[], None], launches: int) -> float:
        device.delay(
            20e-6 + 10e-6 * launches
        )  # so that launches wait for the device, and not it for them
        events[0].record(device.stream)
        for _ in range(launches):
            call()
        events[1].record(device.stream)
        device.synchronize()
        return device.elapsed_s(*events) / launches

    launches = {}
    for name, call in calls.items():
        sample(call, 1)
        once = sample(call, 2)
        launches[name] = min(max(int(TURN_S / once), 2), MOST_LAUNCHES)
    for _ in range(TURNS):
        for name, call in calls.items():
            best[name] = min(best[name], sample(call, launches[name]))
    return best


def measure(device: Any, batch: int, sizes: Shape) -> dict[str, Any] | None:
    """Returns a row: a convolution's time by each kernel; None where ``tiled`` does not take it."""
    shape = _cpu.Conv2dShape(batch, *sizes, 1)
    if not _cpu.fits_conv2d_tiled(shape):
        return None
    (channels, height, width, filters, *kernel), stream = sizes[:6], device.stream_handle
    random = np.random.default_rng(0)
    x = device.upload(random.normal(size=(batch, channels, height, width)).astype(np.float32))
    weight = random.normal(size=(filters, channels, *kernel)).astype(np.float32)
    w, b = device.upload(weight), device.upload(np.zeros(filters, np.float32))
    count = batch * filters * shape.out_h * shape.out_w
    outputs = {name: device.allocate(4 * count) for name in ("tiled", "blocked")}
    packed = device.allocate(4 * shape.packed_size)
    native = device.kernels
    native.conv2d_pack(w.address, packed.address, shape, stream)
    space = device.allocate(native.conv2d_blocked_workspace(shape, 1))
    tiled = (x.address, w.address, b.address, outputs["tiled"].address, shape)
    tiled += (_cpu.Conv2dVariant.tiled, False, stream)
    blocked = (x.address, packed.address, b.address, 0, outputs["blocked"].address, space.address)
    blocked += (shape, -math.inf, math.inf, stream)
    calls = {
        "tiled": lambda: native.conv2d(*tiled),
        "blocked": lambda: native.conv2d_blocked(*blocked),
    }
    found = times(device, calls)
    arrays = {name: np.empty(count, np.float32) for name in outputs}
    for name, array in arrays.items():
        device.copy_d2h(_cpu.address_of(array), outputs[name].address, array.nbytes)
    device.synchronize()
    difference = float(np.abs(arrays["tiled"] - arrays["blocked"]).max())
    largest = float(np.abs(arrays["blocked"]).max())
    if not difference <= 1e-4 * largest:
        raise RuntimeError(f"{sizes}: expected equal outputs, found {difference} of {largest}")
    return {
        "shape": list(sizes), "batch": batch, "tiled_s": found["tiled"],
        "blocked_s": found["blocked"], "gflop": 2e-9 * count * channels * math.prod(kernel),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields lines of a table: how often and by how much each kernel is faster, by batch and filters."""
    yield "| batch | filters | kernel | convolutions | tiled is faster | together: tiled / blocked | median |"
    yield "|--:|---|---|--:|--:|--:|--:|"
    for batch in sorted({row["batch"] for row in rows}):
        for low, high in zip((0, *FILTERS), FILTERS, strict=False):
            for one in (True, False):
                some = [
                    row for row in rows
                    if row["batch"] == batch and low < row["shape"][3] <= high
                    and (row["shape"][4:6] == [1, 1]) == one
                ]  # fmt: skip
                if not some:
                    continue
                ratios = [r["tiled_s"] / r["blocked_s"] for r in some]
                total = sum(r["tiled_s"] for r in some) / sum(r["blocked_s"] for r in some)
                to = f"{low + 1} to {high}" if high < 1 << 31 else f"from {low + 1}"
                faster = sum(ratio < 1 for ratio in ratios)
                yield (
                    f"| {batch} | {to} | {'1x1' if one else 'larger'} | {len(some)} | {faster} | "
                    f"{total:.2f} | {float(np.median(ratios)):.2f} |"
                )


def markdown(record: dict[str, Any]) -> str:
    """Returns the page."""
    found = record["environment"]
    lines = [
        f"# `tiled` and `blocked` over the convolutions of {len(record['networks'])} networks",
        "",
        f"- Machine: {found['gpu']}, {found['driver']}",
        f"- Command: `{record['command']}`, commit {found['commit'] or 'not known'}, {record['started']}",
        "- Times of kernels on the device, the least of some turns; convolutions of one group,",
        "  each shape once.",
        "",
        *summary(record["rows"]),
    ]
    return "\n".join(lines) + "\n"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="python -m benchmarks.conv2d_variants",
        description="Times the convolutions of many networks by tiled and by blocked on a GPU.",
    )
    p.add_argument("--device", default="cuda", help="cuda or cuda:N; default: cuda")
    p.add_argument(
        "--networks", type=models.networks, default=list(models.TORCHVISION + models.TIMM), metavar="A,B",
        help="names, torchvision, timm (groups), or module:function; default: both groups",
    )  # fmt: skip
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1, 16], metavar="N"
    )
    p.add_argument("--json", metavar="PATH", help="writes what was found")
    p.add_argument("--markdown", metavar="PATH", help="writes a page")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    options = parser().parse_args(arguments)
    ignore_compiled_operators()
    warnings.simplefilter("ignore")  # of models' constructors
    device = devices.select(options.device)
    if device.kind != "cuda":
        raise expected("--device", "a CUDA device", device.name)
    watch = environment.Stopwatch()
    shapes: dict[Shape, None] = {}
    names: list[str] = []
    for name in options.networks:
        try:
            shapes |= dict.fromkeys(shapes_of(name))
            names.append(name)
        except (CnnEngineError, RuntimeError, NotImplementedError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
    print(f"{len(shapes)} shapes of {len(names)} networks", flush=True)
    rows: list[dict[str, Any]] = []
    with device.context, device.stream:
        for batch in options.batch:
            for sizes in shapes:
                row = measure(device, batch, sizes)
                if row is not None:
                    rows.append(row)
    record = {
        "schema": "cnn_engine.conv2d_variants/1", "networks": names,
        "command": " ".join(["python -m benchmarks.conv2d_variants", *(arguments or sys.argv[1:])]),
        "environment": environment.describe(device), "rows": rows, **watch.stamp(),
    }  # fmt: skip
    print("\n".join(summary(rows)))
    if options.json:
        write_text(options.json, json.dumps(record) + "\n")
    if options.markdown:
        write_text(options.markdown, markdown(record))
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
