"""The course network (48x48 Fashion-MNIST) on a GPU: each convolution, both as one kernel, and the whole.

Part of :mod:`benchmarks.gpu_peers`. Weights and images are random: the times do not depend on them.
"""

from __future__ import annotations

import statistics

import numpy as np
from cnn_engine.workloads.fashion_mnist.network import NETWORK

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.graph import reference

from .gpu_contestants import Contestant, sample

IMAGE = (1, 48, 48)
#: Up to the end of the second convolution: kind, out_channels, kernel, weight's name.
LAYERS = (
    ("conv2d", 6, 5, "conv1"), ("tanh", 0, 0, ""), ("max_pool2d", 0, 2, ""), ("conv2d", 16, 5, "conv2"),
)  # fmt: skip
#: Largest difference from float64, as a share of the largest value.
ERROR = {"float32": 1e-5, "tf32": 1e-2, "float16": 1e-2}
CHECKED = 32


def random_weights() -> dict[str, np.ndarray]:
    """Weights that keep every layer's output near 1."""
    draw = np.random.default_rng().standard_normal
    weights = {
        "conv1": draw((6, 1, 5, 5)) / 5 / 128, "conv2": draw((16, 6, 5, 5)) / 12,
        "fc1": draw((140, 5184)) / 72, "fc1.bias": draw(140) / 4,
        "fc2": draw((10, 140)) / 12, "fc2.bias": draw(10) / 4,
    }  # fmt: skip
    return {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}


def expected(weights: dict[str, np.ndarray], images: np.ndarray) -> dict[str, np.ndarray]:
    """Every stage's output in float64."""
    conv1 = reference.conv2d(images, weights["conv1"])
    pooled = reference.max_pool2d(reference.tanh(conv1), 2)
    conv2 = reference.conv2d(pooled, weights["conv2"])
    features = conv2.reshape(len(images), -1)
    hidden = reference.tanh(reference.linear(features, weights["fc1"], weights["fc1.bias"]))
    whole = reference.softmax(reference.linear(hidden, weights["fc2"], weights["fc2.bias"]))
    return {"conv1": conv1, "conv2": conv2, "convolutions": features, "whole": whole}


def ours(weights, images, pooled):
    """Our contestants: each convolution by the tiled kernel, the fused convolutions, the whole network."""
    import cupy

    module, stream = cuda_module.load(), cupy.cuda.get_current_stream()
    count = len(images)
    floats = images.astype(np.float32)
    for name, x, channels in (("conv1", floats, 6), ("conv2", pooled, 16)):
        shape = _cpu.Conv2dShape(*x.shape, channels, 5, 5, 1, 1, 0, 0)
        out = cupy.full((count, channels, shape.out_h, shape.out_w), -1, np.float32)
        weight = cupy.asarray(weights[name])

        def tiled(x=x, weight=weight, out=out, shape=shape):
            module.conv2d_step(
                x.data.ptr, weight.data.ptr, 0, out.data.ptr, shape, False, False, stream.ptr
            )

        yield name, ours_of("tiled float32", "float32", tiled, out)
    for dtype in ("float32", "float16"):
        rows = []
        for kind, channels, kernel, name in LAYERS:
            stride = kernel if kind == "max_pool2d" else 1
            weight = weights[name].ctypes.data if name else 0
            rows.append((kind, channels, kernel, kernel, stride, stride, 0, 0, weight, 0))
        network = module.FusedNetwork(IMAGE, 1.0, 0.0, rows, dtype)
        out = cupy.full((count, network.outputs), -1, np.float32)

        def fused(network=network, out=out):
            network.run(images.data.ptr, True, count, out.data.ptr, stream.ptr)

        yield "convolutions", ours_of(f"fused {dtype}", dtype, fused, out)
        named = {
            name if "." in name else f"{name}.weight": array for name, array in weights.items()
        }
        engine = Engine(NETWORK, weights=named, device="cuda", variant="fused", dtype=dtype)
        out = cupy.full((count, NETWORK.classes), -1, np.float32)

        def whole(engine=engine, out=out):
            engine.predict(images, out=out)

        yield "whole", ours_of(f"fused {dtype}", dtype, whole, out)


def ours_of(name: str, dtype: str, run, out) -> Contestant:
    """Returns a contestant of ours whose result lies in ``out``."""
    import cupy

    return Contestant(name, True, dtype, run, lambda: cupy.asnumpy(out[:CHECKED]))


def torchs(peer, weights, images, pooled):
    """PyTorch's contestants, each as a CUDA graph."""
    torch, functional = peer.torch, peer.torch.nn.functional
    device = {name: torch.from_numpy(value.copy()).cuda() for name, value in weights.items()}
    batch, between = torch.as_tensor(images, device="cuda"), torch.as_tensor(pooled, device="cuda")
    for dtype in ERROR:
        kind = torch.float16 if dtype == "float16" else torch.float32
        for layout in (torch.contiguous_format, torch.channels_last):
            w = {
                name: v.to(kind).contiguous(memory_format=layout) if v.dim() == 4 else v.to(kind)
                for name, v in device.items()
            }
            first = batch.to(kind).contiguous(memory_format=layout)
            second = between.to(kind).contiguous(memory_format=layout)

            def convolutions(kind=kind, layout=layout, w=w):
                x = batch.to(kind).contiguous(memory_format=layout)
                x = functional.max_pool2d(torch.tanh(functional.conv2d(x, w["conv1"])), 2)
                return functional.conv2d(x, w["conv2"]).flatten(1)

            def whole(w=w, convolutions=convolutions):
                x = torch.tanh(functional.linear(convolutions(), w["fc1"], w["fc1.bias"]))
                return functional.softmax(functional.linear(x, w["fc2"], w["fc2.bias"]).float(), 1)

            stages = {
                "conv1": lambda first=first, w=w: functional.conv2d(first, w["conv1"]),
                "conv2": lambda second=second, w=w: functional.conv2d(second, w["conv2"]),
                "convolutions": convolutions,
                "whole": whole,
            }
            for part, stage in stages.items():
                peer.precision(dtype)
                with torch.no_grad():
                    for _ in range(3):
                        stage()
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = stage()
                name = f"PyTorch {dtype}" + (
                    ", channels-last" if layout is torch.channels_last else ""
                )
                yield (
                    part,
                    Contestant(
                        name,
                        False,
                        dtype,
                        graph.replay,
                        lambda out=out: out[:CHECKED].float().cpu().numpy(),
                        keep=(stages, w, first, second, batch),
                    ),
                )


def measure(peer, images: int, rounds: int) -> list[dict]:
    """Checks and times everything, interleaved; returns one row for each stage and contestant."""
    if images == 0:
        return []
    import cupy

    weights = random_weights()
    host = np.random.default_rng().integers(0, 256, (images, *IMAGE), np.uint8)
    wanted = expected(weights, host[:CHECKED])
    # What the second convolution reads: any values of the right size do for its time.
    between = cupy.random.standard_normal((images, 6, 22, 22), np.float32)
    wanted["conv2"] = reference.conv2d(cupy.asnumpy(between[:CHECKED]), weights["conv2"])
    device = cupy.asarray(host)
    entries = list(ours(weights, device, between))
    if peer is not None:
        entries += torchs(peer, weights, device, between)
    timed = []
    for part, contestant in entries:
        contestant.run()
        cupy.cuda.Device().synchronize()
        found = contestant.probabilities().reshape(wanted[part].shape).astype(np.float64)
        error = float(np.abs(found - wanted[part]).max() / np.abs(wanted[part]).max())
        if not error <= ERROR[contestant.dtype]:
            if contestant.ours:
                raise SystemExit(
                    f"course {part}: {contestant.name}: {error:.3g} from float64: not timed"
                )
            continue
        timed.append((part, contestant, error, []))
    for _ in range(rounds):
        for _, contestant, _, samples in timed:
            samples.append(sample(contestant, 1))
    return [
        {
            "stage": part, "name": contestant.name, "ours": contestant.ours, "dtype": contestant.dtype,
            "images": images, "milliseconds": statistics.median(samples), "lowest": min(samples),
            "highest": max(samples), "relative_error": error,
        }
        for part, contestant, error, samples in timed
    ]  # fmt: skip


def markdown(rows: list[dict]) -> list[str]:
    """The rows as tables, the fastest first."""
    lines = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        chosen = sorted((r for r in rows if r["stage"] == stage), key=lambda r: r["milliseconds"])
        lines += ["", f"## course network, {stage}, {chosen[0]['images']:,} images", ""]
        lines += ["| | ms | lowest to highest | relative error |", "|---|---|---|---|"]
        for row in chosen:
            name = f"**{row['name']}**" if row["ours"] else row["name"]
            spread = f"{row['lowest']:.4g} to {row['highest']:.4g}"
            lines.append(
                f"| {name} | {row['milliseconds']:.4g} | {spread} | {row['relative_error']:.1e} |"
            )
    return lines
