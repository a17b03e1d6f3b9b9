"""Who takes part in :mod:`benchmarks.cpu_peers`: our variants, and the libraries that are installed.

Each maker takes a :class:`Task` and yields contestants; it raises ImportError where its library is missing.
Libraries get float32 input that is normalised already, in their own best layout; ours read the pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cnn_engine import Engine, InputError, _cpu
from cnn_engine.graph import reference
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh, pair
from cnn_engine.kernels import select
from cnn_engine.lower.fused_network import description

#: What OpenVINO and our engine compute in.
DTYPES = ("float32", "bfloat16")


@dataclass
class Contestant:
    """What is timed: ``run()`` computes one batch, complete on return."""

    name: str
    ours: bool
    dtype: str
    run: Callable[[], object]
    probabilities: Callable[[], np.ndarray]  # of the last run
    slow: bool = False  # takes few samples


@dataclass(frozen=True)
class Task:
    """One batch of images on a number of threads."""

    network: Network
    weights: dict[str, np.ndarray]
    pixels: np.ndarray  # uint8 [N, C, H, W]
    threads: int

    @property
    def batch(self) -> int:
        return len(self.pixels)

    @cached_property
    def input(self) -> np.ndarray:
        """What the network's first layer reads: float32 [N, C, H, W]."""
        x = reference.normalize(self.pixels, self.network.scale, self.network.offset)
        return x.astype(np.float32)


def fused(task: Task) -> Iterator[Contestant]:
    """Our whole network in one call."""
    for dtype in ("float32", "bfloat16"):
        arguments = (*description(task.network, task.weights), dtype)
        if reason := _cpu.FusedNetwork.why_not(*arguments):
            print(f"left out: fused {dtype}: {reason}")
            continue
        network = _cpu.FusedNetwork(*arguments)
        for images in (task.pixels, task.input):
            if dtype == "bfloat16" and images is task.input:
                continue
            out = np.empty((task.batch, task.network.classes), np.float32)
            address, is_uint8 = images.ctypes.data, images.dtype == np.uint8

            def run(network=network, address=address, is_uint8=is_uint8, out=out, images=images):
                network.run(address, is_uint8, len(images), out.ctypes.data, task.threads)

            name = f"fused, {images.dtype} input"
            yield Contestant(name, True, dtype, run, lambda out=out: out)


def layered(task: Task) -> Iterator[Contestant]:
    """Our layer by layer variants."""
    for name, row in select.VARIANTS.items():
        if "cpu" not in row.devices or name == "fused":
            continue
        for reduction in (False, True):
            try:
                engine = Engine(
                    task.network, weights=task.weights, device="cpu", variant=name, reduction=reduction,
                    threads=task.threads,
                )  # fmt: skip
                plan = engine.plan(task.batch, task.pixels.dtype)
            except InputError as error:
                print(f"left out: {name}: {error}")
                continue
            out = np.empty((task.batch, task.network.classes), np.float32)
            plan.bind(task.pixels.ctypes.data, out.ctypes.data)

            def run(plan=plan, engine=engine, out=out):
                plan.run()

            full = f"{name}, {'with' if reduction else 'no'} reduction"
            yield Contestant(full, True, "float32", run, lambda out=out: out, slow=True)


def numpy(task: Task) -> Iterator[Contestant]:
    """The float64 reference itself."""
    found = []

    def run():
        found[:] = [reference.forward(task.network, task.weights, task.pixels)]

    yield Contestant("NumPy reference", True, "float64", run, lambda: found[0], slow=True)


def to_onnx(network: Network, weights: dict[str, np.ndarray], batch: int):
    """Returns the network as an ONNX model that reads normalised float32 images."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, at = [], "images"
    for layer in network.layers:
        names = [f"{layer.name}.{part}" for part in ("weight", "bias")]
        inputs = [at, *(name for name in names if name in weights)]
        to = layer.name
        if isinstance(layer, Conv2d):
            rows, columns = pair("padding", layer.padding)
            nodes.append(
                helper.make_node(
                    "Conv", inputs, [to], kernel_shape=pair("kernel", layer.kernel),
                    strides=pair("stride", layer.stride), pads=[rows, columns, rows, columns],
                )
            )  # fmt: skip
        elif isinstance(layer, MaxPool2d):
            rows, columns = pair("padding", layer.padding)
            nodes.append(
                helper.make_node(
                    "MaxPool", [at], [to], kernel_shape=pair("kernel", layer.kernel),
                    strides=layer.strides, pads=[rows, columns, rows, columns],
                )
            )  # fmt: skip
        elif isinstance(layer, Linear):
            nodes.append(helper.make_node("Flatten", [at], [f"{to}.input"], axis=1))
            inputs[0] = f"{to}.input"
            nodes.append(helper.make_node("Gemm", inputs, [to], transB=1))
        else:
            kind = {Relu: "Relu", Tanh: "Tanh", Softmax: "Softmax"}[type(layer)]
            nodes.append(
                helper.make_node(kind, [at], [to], **({"axis": 1} if kind == "Softmax" else {}))
            )
        at = to
    tensor = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        network.name,
        [helper.make_tensor_value_info("images", tensor, [batch, *network.input_shape])],
        [helper.make_tensor_value_info(at, tensor, [batch, network.classes])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    # An older file format and operator set, which every release of the last years reads.
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def openvino_on(
    model: str | io.BytesIO,
    images: np.ndarray,
    threads: int,
    dtypes: Sequence[str] = DTYPES,
    converts: bool = False,
) -> Iterator[Contestant]:
    """OpenVINO on an ONNX model, given as a path or its bytes, in one precision or both.

    Args:
        converts: whether its converter reads the model, else the plug-in does.
    """
    import openvino

    core = openvino.Core()
    for dtype in dtypes:
        precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if isinstance(model, io.BytesIO):
            model.seek(0)
        if converts:
            read = openvino.convert_model(model, input=list(images.shape))
        else:
            read = core.read_model(model)
            read.reshape(list(images.shape))
        compiled = core.compile_model(read, "CPU", options)
        if compiled.get_property("INFERENCE_PRECISION_HINT").to_string() != precision:
            print(f"left out: OpenVINO {precision}: this CPU does not have it")
            continue
        request = compiled.create_infer_request()
        request.set_input_tensor(openvino.Tensor(images, shared_memory=True))
        yield Contestant(
            "OpenVINO", False, dtype, request.infer, lambda r=request: r.get_output_tensor().data
        )


def onnxruntime_on(
    model: str | bytes, images: np.ndarray, shape: Sequence[int], threads: int
) -> Iterator[Contestant]:
    """ONNX Runtime on a model, given as a path or its bytes; ``shape`` is its output's."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    out = np.empty(shape, np.float32)
    binding = session.io_binding()
    for bind, name, array in (
        (binding.bind_input, session.get_inputs()[0].name, images),
        (binding.bind_output, session.get_outputs()[0].name, out),
    ):
        bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    yield Contestant(
        "ONNX Runtime", False, "float32", lambda: session.run_with_iobinding(binding), lambda: out
    )


def openvino(task: Task) -> Iterator[Contestant]:
    import onnx  # noqa: F401
    import openvino  # noqa: F401

    model = to_onnx(task.network, task.weights, task.batch).SerializeToString()
    yield from openvino_on(io.BytesIO(model), task.input, task.threads)


def onnxruntime(task: Task) -> Iterator[Contestant]:
    import onnxruntime  # noqa: F401

    model = to_onnx(task.network, task.weights, task.batch).SerializeToString()
    shape = (task.batch, task.network.classes)
    yield from onnxruntime_on(model, task.input, shape, task.threads)


def torch(task: Task) -> Iterator[Contestant]:
    import torch

    torch.set_num_threads(task.threads)

    def model(dtype, memory_format):
        layers, shape = [], task.network.input_shape
        for info in task.network.infos:
            layer, shape = info.layer, info.input_shape
            if isinstance(layer, Conv2d):
                module = torch.nn.Conv2d(
                    shape[0], layer.out_channels, pair("kernel", layer.kernel), pair("stride", layer.stride),
                    pair("padding", layer.padding), bias=layer.bias,
                )  # fmt: skip
            elif isinstance(layer, MaxPool2d):
                padding = pair("padding", layer.padding)
                module = torch.nn.MaxPool2d(pair("kernel", layer.kernel), layer.strides, padding)
            elif isinstance(layer, Linear):
                layers.append(torch.nn.Flatten())
                module = torch.nn.Linear(int(np.prod(shape)), layer.out_features, bias=layer.bias)
            elif isinstance(layer, Softmax):
                module = torch.nn.Softmax(dim=1)
            else:
                module = torch.nn.Tanh() if isinstance(layer, Tanh) else torch.nn.ReLU()
            for part in ("weight", "bias"):
                if (name := f"{layer.name}.{part}") in task.weights:
                    getattr(module, part).data = torch.from_numpy(task.weights[name].copy())
            layers.append(module)
        return torch.nn.Sequential(*layers).eval().to(dtype=dtype, memory_format=memory_format)

    contiguous, last = torch.contiguous_format, torch.channels_last
    for name, dtype, memory_format, compiled in (
        ("PyTorch", "float32", contiguous, False),
        ("PyTorch, channels-last", "float32", last, False),
        ("PyTorch, torch.compile", "float32", contiguous, True),
        ("PyTorch, channels-last", "bfloat16", last, False),
    ):
        kind = getattr(torch, dtype)
        network = model(kind, memory_format)
        if compiled:
            network = torch.compile(network, dynamic=False)
        x = torch.from_numpy(task.input).to(dtype=kind, memory_format=memory_format)
        result = {}

        def run(network=network, x=x, result=result):
            with torch.inference_mode():
                result["y"] = network(x)

        try:
            run()
        except Exception as error:  # torch.compile needs a compiler of its own
            if not compiled:
                raise
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        yield Contestant(name, False, dtype, run, lambda r=result: r["y"].float().numpy())


#: Everyone, in the order of the tables.
MAKERS = (fused, layered, openvino, onnxruntime, torch, numpy)
