"""Compares fused networks that are compiled at first use with PyTorch's fastest way.

``python -m benchmarks.fused_networks --json chains.json --markdown chains.md``: LeNet-5, a VGG-like network
of 3x3 kernels, one of strides of 2, one of one channel, and one of 100 classes, at batch 1 and 10,000. All
run in CUDA graphs, PyTorch in either layout and compiled, with their images on the device: at batch 1 a
call of ``predict`` takes the host longer than the device. Weights and images are random: the times do not
depend on them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Engine, cli, devices
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh
from cnn_engine.measure import environment

from . import low_batch_contestants as who
from . import result_file

#: Name -> the shape of an image, and the layers: kind, outputs, kernel, padding, stride.
CHAINS = {
    "LeNet-5": (
        (1, 32, 32),
        "conv 6 5, tanh, pool, conv 16 5, tanh, pool, linear 120, tanh, linear 84, tanh, linear 10, softmax",
    ),
    "VGG-like": (
        (3, 32, 32),
        "conv 16 3 1, relu, conv 16 3 1, relu, pool, conv 32 3 1, relu, conv 32 3 1, relu, pool, "
        "linear 10, softmax",
    ),
    "strides of 2": (
        (3, 32, 32),
        "conv 16 3 1 2, relu, conv 32 3 1 2, relu, conv 32 3 1 2, relu, linear 10, softmax",
    ),
    "one channel": (
        (1, 28, 28),
        "conv 8 3 1, relu, pool, conv 16 3 1, relu, pool, linear 10, softmax",
    ),
    "100 classes": (
        (3, 32, 32),
        "conv 16 5 2, relu, pool, conv 32 5 2, relu, pool, conv 32 3 1, relu, pool, linear 100, softmax",
    ),
}

DTYPES = ("float32", "tf32", "float16")

#: Images whose logits are compared.
CHECKED = 64


def layers_of(text: str) -> list[tuple[str, int, int, int, int]]:
    """Returns kind, outputs, kernel, padding and stride of layers such as ``conv 6 5 2, tanh, linear 10``."""
    found = []
    for kind, *numbers in (one.split() for one in text.split(",")):
        values = [int(number) for number in numbers]
        outputs, kernel, padding, stride = values + [0, 0, 0, 1][len(values) :]
        found.append((kind, outputs, kernel, padding, stride))
    return found


def network(name: str, shape: tuple[int, int, int], text: str) -> Network:
    """Returns a network of such layers."""
    plain = {"relu": Relu, "tanh": Tanh, "softmax": Softmax}
    layers: list[Any] = []
    for number, (kind, outputs, kernel, padding, stride) in enumerate(layers_of(text)):
        at = f"{kind}{number}"
        if kind == "conv":
            layers.append(Conv2d(at, outputs, kernel, stride=stride, padding=padding))
        elif kind == "linear":
            layers.append(Linear(at, outputs))
        else:
            layers.append(MaxPool2d(at, 2) if kind == "pool" else plain[kind](at))
    return Network(name=name, input_shape=shape, layers=tuple(layers), scale=1 / 255, offset=-0.5)


def random_weights(made: Network) -> dict[str, np.ndarray]:
    """Weights that keep activations near 1."""
    rng, weights = np.random.default_rng(0), {}
    for name, shape in made.parameters.items():
        scale = 0.3 if name.endswith("bias") else 1.5 / np.sqrt(np.prod(shape[1:]))
        weights[name] = np.ascontiguousarray(rng.standard_normal(shape) * scale, np.float32)
    return weights


class Model:
    """A chain as PyTorch has it: what :class:`benchmarks.low_batch_contestants.PyTorch` takes."""

    device = "cuda"

    def __init__(self, made: Network, weights: dict[str, np.ndarray], text: str) -> None:
        import torch

        self.torch, self.shape = torch, made.input_shape
        modules: list[Any] = []
        channels, flat = made.input_shape[0], False
        features = iter(weights[f"{kind}{n}.weight"].shape[1]
                        for n, (kind, *_) in enumerate(layers_of(text)) if kind == "linear")  # fmt: skip
        for number, (kind, outputs, kernel, padding, stride) in enumerate(layers_of(text)):
            if kind == "conv":
                modules.append(torch.nn.Conv2d(channels, outputs, kernel, stride, padding))
                channels = outputs
            elif kind == "linear":
                if not flat:
                    modules.append(torch.nn.Flatten())
                flat = True
                modules.append(torch.nn.Linear(next(features), outputs))
            else:
                nn = torch.nn
                modules.append({"relu": nn.ReLU(), "tanh": nn.Tanh(), "pool": nn.MaxPool2d(2),
                                "softmax": nn.Softmax(1)}[kind])  # fmt: skip
                continue
            for part in ("weight", "bias"):
                value = torch.from_numpy(weights[f"{kind}{number}.{part}"])
                getattr(modules[-1], part).data.copy_(value)
        self.module = torch.nn.Sequential(*modules).to(self.device)

    def exact(self, images: np.ndarray) -> np.ndarray:
        """Returns PyTorch's probabilities in float64."""
        with self.torch.no_grad():
            there = self.torch.from_numpy(images).to(self.device).double()
            found = self.module.double()(there).cpu().numpy()
        self.module.float()
        return found


def captured(run: Callable[[], object]) -> Any:
    """Returns a CUDA graph of what ``run`` queues on the current stream, which the host launches at once."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        run()  # plans are built
        stream.synchronize()
        stream.begin_capture()
        run()
        return stream.end_capture()


def cells(options: Any) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each network, data type and batch, ours first."""
    import cupy

    clock = who.Clock("cuda")
    for name in options.network:
        shape, text = CHAINS[name]
        made = network(name, shape, text)
        weights = random_weights(made)
        model = Model(made, weights, text)
        for dtype in options.dtype:
            begin = perf_counter()
            engine = Engine(made, weights=weights, device="cuda", dtype=dtype, variant="fused")
            ready_s = perf_counter() - begin
            torch = who.PyTorch(model, dtype)
            for batch in options.batch:
                images = (
                    np.random.default_rng(batch).normal(size=(batch, *shape)).astype(np.float32)
                )
                there, out = cupy.asarray(images), cupy.empty((batch, made.classes), np.float32)
                graph = captured(lambda e=engine, x=there, y=out: e.predict(x, out=y))
                ours = who.Contestant(
                    "cnn_engine", True, graph.launch, lambda e=engine, x=images: e.predict(x),
                    lambda y=out: y, keep=(there, out),
                )  # fmt: skip
                contestants = [ours]
                for one in torch.contestants(images, options.peers):
                    if isinstance(one, tuple):
                        print(f"{name} {dtype} batch {batch}: {one[0]}: {one[1]}", flush=True)
                    else:
                        contestants.append(one)
                wanted = model.exact(images[:CHECKED])
                for one in contestants:
                    one.run()
                errors = [
                    float(np.abs(who.on_host(one.logits())[:CHECKED] - wanted).max())
                    for one in contestants
                ]
                clock.take_turns(contestants, options.rounds, options.milliseconds)
                yield [
                    {"network": name, "dtype": dtype, "batch": batch, "name": one.name, "ours": one.ours,
                     "device_ms": statistics.median(one.samples), "lowest_ms": min(one.samples),
                     "highest_ms": max(one.samples), "wall_ms": statistics.median(one.walls),
                     "error": error, "ready_s": ready_s if one.ours else None}
                    for one, error in zip(contestants, errors, strict=True)
                ]  # fmt: skip
            engine.close()


def best_of(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Returns our row, the best peer's, and how many times as long that takes."""
    ours, *peers = rows
    best = min(peers, key=lambda row: row["device_ms"])
    return ours, best, best["device_ms"] / ours["device_ms"]


def markdown(document: dict[str, Any]) -> str:
    """Returns the record's page."""
    where = document["environment"]
    lines = [
        "# Chains of layers as one kernel, compiled at first use", "",
        f"- Machine: {where['gpu']}, {where['cpu']}, {where['driver']}", *result_file.run_lines(document), "",
        "| network | dtype | batch | ours, ms | best peer | ms | times | error, ours and the peer's |",
        "|---|---|--:|--:|---|--:|--:|--:|",
    ]  # fmt: skip
    for rows in document["cells"]:
        ours, best, times = best_of(rows)
        lines.append(
            f"| {ours['network']} | {ours['dtype']} | {ours['batch']:,} | {ours['device_ms']:.4f} | "
            f"{best['name']} | {best['device_ms']:.4f} | {times:.2f} | {ours['error']:.1e}, "
            f"{best['error']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("fused_networks", __doc__, "json", "markdown")
    p.add_argument("--network", nargs="+", choices=list(CHAINS), default=list(CHAINS))
    p.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--batch", nargs="+", type=cli.whole_number(1, 10**6), default=[1, 10_000])
    p.add_argument(
        "--peers", nargs="+", choices=("torch", *who.COMPILE_MODES), default=["torch", "default"]
    )
    p.add_argument("--rounds", type=cli.whole_number(1, 1000), default=7)
    p.add_argument("--milliseconds", type=float, default=10.0, metavar="MS", help="of a sample")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile("chains", options, arguments, environment={}, cells=[])
    found.document["environment"] = environment.describe(devices.select("cuda"))
    for rows in cells(options):
        ours, best, times = best_of(rows)
        print(f"{ours['network']} {ours['dtype']} batch {ours['batch']}: {ours['device_ms']:.4f} ms, "
              f"{best['name']} {best['device_ms']:.4f}, {times:.2f} times; error {ours['error']:.1e} "
              f"({best['error']:.1e}); ready in {ours['ready_s']:.1f} s", flush=True)  # fmt: skip
        found.document["cells"].append(rows)
        found.write(markdown)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
