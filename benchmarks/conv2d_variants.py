"""Times ``tiled`` and ``blocked`` for every convolution of many networks on a GPU: data for ``auto``'s rule.

``python -m benchmarks.conv2d_variants --json conv2d.json --markdown conv2d.md``

The shapes are those of torchvision's and timm's networks of :mod:`benchmarks.models` (one group, and what
follows the sum left out: only ``blocked`` takes that up), each once. A time is a kernel's on the device, the
least of some turns of both; both kernels' outputs are compared before.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cnn_engine import _cpu, cli, devices, export
from cnn_engine.errors import CnnEngineError, expected
from cnn_engine.measure import environment

from . import models, result_file
from .models_worker import ignore_compiled_operators

TURNS = 5
TURN_S = 200e-6  # of launches that are timed together
MOST_LAUNCHES = 20

#: Filters of a layer, by which the rule is made.
FILTERS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1 << 31)

KERNELS = ("tiled", "blocked")
COMPARED = 1 << 20  # outputs, at most

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
        # Launches wait for the device, and not it for them.
        device.delay(20e-6 + 10e-6 * launches)
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


class Task:
    """A convolution of a batch, and how many numbers its images, weights and outputs are."""

    def __init__(self, batch: int, sizes: Shape) -> None:
        channels, height, width, filters, *kernel = sizes[:6]
        self.batch, self.sizes, self.filters = batch, sizes, filters
        self.shape = _cpu.Conv2dShape(batch, *sizes, 1)
        self.images = batch * channels * height * width
        self.weights = filters * channels * math.prod(kernel)
        self.outputs = batch * filters * self.shape.out_h * self.shape.out_w


class Bench:
    """Memory on the device for the largest of some convolutions: random numbers to read, and two outputs."""

    def __init__(self, device: Any, tasks: Sequence[Task]) -> None:
        source = max(task.images + task.weights + task.filters for task in tasks)
        output = max(task.outputs for task in tasks)
        packed = max(task.shape.packed_size for task in tasks)
        random = np.random.default_rng(0).random(source, np.float32) - np.float32(0.5)
        self.device = device
        self._source = device.upload(random)
        self._outputs = {name: device.allocate(4 * output) for name in KERNELS}
        self._packed = device.allocate(4 * packed)

    def measure(self, task: Task) -> dict[str, float]:
        """Returns the seconds of a convolution by each kernel, whose first outputs are compared."""
        device, native, stream = self.device, self.device.kernels, self.device.stream_handle
        shape, x = task.shape, self._source.address
        w, bias = x + 4 * task.images, x + 4 * (task.images + task.weights)
        native.conv2d_pack(w, self._packed.address, shape, stream)
        space = device.allocate(native.conv2d_blocked_workspace(shape, device.target.native))
        to = {name: buffer.address for name, buffer in self._outputs.items()}
        tiled = (x, w, bias, to["tiled"], shape, _cpu.Conv2dVariant.tiled, False, stream)
        blocked = (x, self._packed.address, bias, 0, to["blocked"], space.address, shape)
        blocked += (-math.inf, math.inf, stream)
        found = times(
            device,
            {
                "tiled": lambda: native.conv2d(*tiled),
                "blocked": lambda: native.conv2d_blocked(*blocked),
            },
        )
        made = [np.empty(min(task.outputs, COMPARED), np.float32) for _ in to]
        for array, address in zip(made, to.values(), strict=True):
            device.copy_d2h(_cpu.address_of(array), address, array.nbytes)
        device.synchronize()
        difference, largest = np.abs(np.subtract(*made)).max(), np.abs(made[1]).max()
        if not difference <= 1e-4 * largest:
            raise RuntimeError(f"expected equal outputs, found {difference} of {largest}")
        return found


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


def markdown(document: dict[str, Any]) -> str:
    """Returns the page."""
    found = document["environment"]
    lines = [
        f"# `tiled` and `blocked` over the convolutions of {len(document['networks'])} networks",
        "",
        f"- Machine: {found['gpu']}, {found['driver']}",
        f"- Command: `{document['command']}`, commit {found['commit'] or 'not known'}, "
        f"{document['started']}",
        "- Times of kernels on the device, the least of some turns; convolutions of one group,",
        "  each shape once.",
        "",
        *summary(document["rows"]),
    ]
    return "\n".join(lines) + "\n"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("conv2d_variants", __doc__, "json", "markdown")
    p.add_argument("--device", default="cuda", help="cuda or cuda:N; default: cuda")
    p.add_argument(
        "--networks", type=models.networks, default=list(models.TORCHVISION + models.TIMM), metavar="A,B",
        help="names, torchvision, timm (groups), or module:function; default: both groups",
    )  # fmt: skip
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1, 16], metavar="N"
    )
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    ignore_compiled_operators()
    warnings.simplefilter("ignore")  # of models' constructors
    device = devices.select(options.device)
    if device.kind != "cuda":
        raise expected("--device", "a CUDA device", device.name)
    found = result_file.ResultFile(
        "conv2d_variants", options, arguments, environment=environment.describe(device)
    )
    shapes: dict[Shape, None] = {}
    names: list[str] = []
    for name in options.networks:
        try:
            shapes |= dict.fromkeys(shapes_of(name))
            names.append(name)
        except (CnnEngineError, RuntimeError, NotImplementedError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
    print(f"{len(shapes)} shapes of {len(names)} networks", flush=True)
    tasks = [Task(batch, sizes) for batch in options.batch for sizes in shapes]
    tasks = [task for task in tasks if _cpu.fits_conv2d_tiled(task.shape)]
    rows: list[dict[str, Any]] = []
    with device.context, device.stream:
        bench = Bench(device, tasks)
        for task in tasks:
            times = {f"{name}_s": seconds for name, seconds in bench.measure(task).items()}
            rows.append({"shape": list(task.sizes), "batch": task.batch, **times})
    found.document |= {"networks": names, "rows": rows}
    print("\n".join(summary(rows)))
    found.write(markdown)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
