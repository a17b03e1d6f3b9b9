"""A CUDA device that is not there: its memory is the host's, its kernels are the CPU's.

What an engine plans for a GPU can so be looked at, and run for its numbers, on a machine without one.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cnn_engine import _cpu
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.target import Target


class FakeFused:
    """Takes what the CPU's fused network does, and runs it as that does, in float32."""

    def __init__(self, *arguments: Any) -> None:
        self._network = _cpu.FusedNetwork(*arguments[:4], "float32")

    @staticmethod
    def why_not(*arguments: Any) -> str:
        return _cpu.FusedNetwork.why_not(*arguments[:4], "float32")

    @staticmethod
    def source(*arguments: Any) -> str:
        return ""  # compiled in

    def run(self, images: int, pixels: bool, count: int, to: int, stream: int) -> None:
        self._network.run(images, pixels, count, to, 1)


class FakeKernels:
    """``_cuda``: the CPU's function of the same name, on one thread."""

    FusedNetwork = FakeFused
    quantized_conv2d_packed = staticmethod(_cpu.quantized_conv2d_packed)

    @staticmethod
    def quantized_conv2d_workspace(_shape: Any) -> int:
        return 0

    @staticmethod
    def quantized_conv2d_wgmma_takes(*_how: Any) -> bool:
        return False

    @staticmethod
    def quantized_conv2d_pack(*arguments: Any) -> None:
        _cpu.quantized_conv2d_pack(*arguments[:-1])

    @staticmethod
    def quantized_conv2d(
        x, packed, added, table, y, _workspace, shape, pitches, types, planar, _stream
    ):
        own = np.empty(_cpu.quantized_conv2d_workspace(shape, planar, 1), np.uint8)
        at = own.ctypes.data
        _cpu.quantized_conv2d(x, packed, added, table, y, at, shape, pitches, types, planar, 1)

    def __getattr__(self, name: str) -> Any:
        if name == "PointwiseProgram":  # nothing is compiled at first use
            raise AttributeError(name)
        function = getattr(_cpu, name, None)
        if function is None:  # only a plan is made of it
            return lambda *arguments: pytest.fail(f"{name}: expected a GPU")

        def launch(*arguments: Any) -> Any:
            *arguments, _stream = arguments
            direct = _cpu.Conv2dVariant.direct
            tiled = _cpu.Conv2dVariant.tiled
            return function(*(direct if a == tiled else a for a in arguments), 1)

        return launch


#: How the CPU computes what reads [N, H, W, C], and what reads [N, C, H, W].
METHODS = {False: _cpu.Conv2dMethod.direct, True: _cpu.Conv2dMethod.planar}


def function_of(activation: Any) -> tuple:
    """Returns an activation as the CPU's functions take it."""
    return activation.function, activation.alpha, activation.beta


class AxisShape(_cpu.AxisShape):
    """Keeps the numbers that the compiled record does not show."""

    def __init__(self, outer: int, axis: int, inner: int) -> None:
        super().__init__(outer, axis, inner)
        self.outer, self.inner = outer, inner


class RowLayer(_cpu.RowLayer):
    """Likewise."""

    def __init__(self, features: int, outputs: int, *function: Any) -> None:
        super().__init__(features, outputs, *function)
        self.features, self.outputs, self.function = features, outputs, function


class RowLayers(_cpu.RowLayers):
    """Likewise."""

    def __init__(self, n: int, softmax: bool, *layers: RowLayer) -> None:
        super().__init__(n, softmax, *layers)
        self.n, self.softmax, self.layers = n, softmax, layers

    def at(self, number: int) -> int:
        """Where the weights of a layer and then its bias lie among all, in bytes."""
        return 4 * sum((each.features + 1) * each.outputs for each in self.layers[:number])


class FakeTensorCores(FakeKernels):
    """The functions that only CUDA has, made of the CPU's; weights are packed as they are given.

    Images are float32 in memory: plans that store them in 16 bits can be looked at, but not run.
    """

    @staticmethod
    def conv2d_nhwc_packed(shape: Any, planar: bool, compute_dtype: Any, _threads: int) -> int:
        return 4 * _cpu.conv2d_nhwc_packed(shape, METHODS[planar])

    @staticmethod
    def conv2d_nhwc_workspace(
        shape: Any, planar: bool, compute_dtype: Any, x: Any, _threads: int
    ) -> int:
        return _cpu.conv2d_nhwc_workspace(shape, METHODS[planar], 1)

    @staticmethod
    def conv2d_nhwc_wgmma_takes(shape: Any, compute_dtype: Any, device: int) -> bool:
        return False

    @staticmethod
    def conv2d_nhwc_wgmma_planar_takes(shape: Any, compute_dtype: Any, device: int) -> bool:
        return False

    @staticmethod
    def conv2d_nhwc_wgmma_pool_takes(*how: Any) -> bool:
        return False

    @staticmethod
    def conv2d_nhwc_wgmma_planar_packed(shape: Any, compute_dtype: Any, _stream: int) -> int:
        return 4 * shape.weight_size

    @staticmethod
    def conv2d_nhwc_wgmma_planar_pack(*_arguments: Any) -> None: ...

    @staticmethod
    def conv2d_nhwc_wgmma_pair_takes(*how: Any) -> bool:
        return False

    @staticmethod
    def conv2d_nhwc_pack(weight, packed, shape, planar, compute_dtype, _stream) -> None:
        _cpu.conv2d_nhwc_pack(weight, packed, shape, METHODS[planar], 1)

    @staticmethod
    def conv2d_nhwc(
        x, x_pitch, _x, packed, y, y_pitch, _y, shape, _operands, scale, shift, by_image, floor,
        bias, added, added_pitch, _added, activation, _overflow, workspace, _ready, _holds, _rank, _stream,
    ) -> None:  # fmt: skip
        assert not scale or x % 16 == y % 16 == 0
        method = METHODS[x_pitch == 0]
        own = np.empty(0 if workspace else _cpu.conv2d_nhwc_workspace(shape, method, 1), "u1")
        _cpu.conv2d_nhwc(
            x, packed, bias, added, scale, shift, y, workspace or own.ctypes.data, shape,
            _cpu.Conv2dPitches(x_pitch or 4, y_pitch, added_pitch), method, by_image, floor,
            *function_of(activation), 1,
        )  # fmt: skip

    @staticmethod
    def conv2d_nhwc_depthwise_pack(weight, packed, shape, storage_dtype, _stream) -> None:
        wide = storage_dtype == _cpu.ElementType.float32
        _cpu.copy(weight, packed, (4 if wide else 2) * shape.weight_size, 1)

    @staticmethod
    def conv2d_nhwc_depthwise(
        x, x_pitch, _x, packed, y, y_pitch, _y, shape,
        bias, residual, residual_pitch, _residual, activation, _overflow, _stream,
    ) -> None:  # fmt: skip
        method = _cpu.Conv2dMethod.depthwise
        ours = np.empty(_cpu.conv2d_nhwc_packed(shape, method), np.float32)
        _cpu.conv2d_nhwc_pack(packed, ours.ctypes.data, shape, method, 1)
        workspace = np.empty(_cpu.conv2d_nhwc_workspace(shape, method, 1), np.uint8)
        _cpu.conv2d_nhwc(
            x, ours.ctypes.data, bias, residual, 0, 0, y, workspace.ctypes.data, shape,
            _cpu.Conv2dPitches(x_pitch, y_pitch, residual_pitch),
            method, False, -np.inf, *function_of(activation), 1,
        )  # fmt: skip

    @staticmethod
    def depthwise_means_takes(shape, device) -> int:
        return 0

    @classmethod
    def _depthwise(cls, x, packed, y, shape, *epilogue_and_stream) -> int:
        """Convolves images without pitches; returns their channels."""
        channels = 2 * shape.weight_size * shape.output_size // shape.flops
        cls.conv2d_nhwc_depthwise(
            x, channels, None, packed, y, channels, None, shape, *epilogue_and_stream
        )
        return channels

    @classmethod
    def depthwise_means(cls, x, packed, y, means, shape, parts, *epilogue_and_stream) -> None:
        channels = cls._depthwise(x, packed, y, shape, *epilogue_and_stream)
        made = np.empty(shape.output_size, np.float32)
        ctypes.memmove(made.ctypes.data, y, made.nbytes)
        made = made.reshape(-1, shape.out_h, shape.out_w, channels)
        across = -(-shape.out_w // 7)
        of = np.zeros((len(made), parts, channels), np.float32)
        for row, column in np.ndindex(shape.out_h, shape.out_w):
            of[:, row // 7 * across + column // 7] += made[:, row, column]
        of /= shape.out_h * shape.out_w
        ctypes.memmove(means, of.ctypes.data, of.nbytes)

    @staticmethod
    def depthwise_norm_takes(shape, storage_dtype, device) -> bool:
        return False

    @classmethod
    def depthwise_norm(
        cls, x, _x, packed, y, _y, shape, scale, shift, epsilon, *epilogue_and_stream
    ) -> None:
        channels = cls._depthwise(x, packed, y, shape, *epilogue_and_stream)
        rows = _cpu.NormalizeRowsShape(shape.output_size // channels, 1, channels, 1, epsilon, True)
        _cpu.normalize_rows(y, scale, shift, y, 0, 0, rows, 1)

    @staticmethod
    def linear_rows_packed(shape, compute_dtype, _stream) -> int:
        return 4 * shape.weight_size

    @staticmethod
    def linear_rows_pack(weight, packed, shape, compute_dtype, _stream) -> None:
        _cpu.copy(weight, packed, 4 * shape.weight_size, 1)

    @staticmethod
    def linear_rows(
        x,
        _x,
        packed,
        y,
        _y,
        shape,
        _operands,
        bias,
        _added,
        _pitch,
        _kind,
        activation,
        _overflow,
        _stream,
    ) -> None:
        _cpu.linear(x, packed, bias, y, shape, False, 1)
        _cpu.unary(y, y, shape.output_size, *function_of(activation), 1)

    @staticmethod
    def linear_layers_takes(shape, _device) -> int:
        return int(shape.n <= 32)

    @staticmethod
    def linear_layers_packed(shape, _stream) -> int:
        return shape.at(len(shape.layers))

    @staticmethod
    def linear_layers_pack(weight, bias, packed, shape, number, _stream) -> None:
        layer, to = shape.layers[number], packed + shape.at(number)
        _cpu.copy(weight, to, 4 * layer.features * layer.outputs, 1)
        there = to + 4 * layer.features * layer.outputs
        if bias:
            _cpu.copy(bias, there, 4 * layer.outputs, 1)
        else:
            ctypes.memset(there, 0, 4 * layer.outputs)

    @staticmethod
    def linear_layers(x, packed, y, shape, _stream) -> None:
        kept = []
        for number, layer in enumerate(shape.layers):
            kept.append(np.empty((shape.n, layer.outputs), np.float32))
            to, weight = kept[-1].ctypes.data, packed + shape.at(number)
            bias = weight + 4 * layer.features * layer.outputs
            how = _cpu.LinearShape(shape.n, layer.features, layer.outputs)
            _cpu.linear(x, weight, bias, to, how, False, 1)
            _cpu.unary(to, to, kept[-1].size, *layer.function, 1)
            x = to
        if shape.softmax:
            _cpu.softmax(x, x, _cpu.SoftmaxShape(*kept[-1].shape), False, 1)
        _cpu.copy(x, y, kept[-1].nbytes, 1)

    @staticmethod
    def expand_depthwise_takes(shape, _channels, _device) -> int:
        return -(-shape.out_h // 8) if shape.out_w <= 32 else 0

    @staticmethod
    def expand_depthwise_packed(shape, channels, _operands, _stream) -> int:
        return 2 * (shape.weight_size + channels)

    @staticmethod
    def expand_depthwise_pack(*_arguments) -> None: ...

    @staticmethod
    def bottleneck_takes(shape: Any, outputs: int, reduced: int, device: int) -> bool:
        return False

    @staticmethod
    def bottleneck_packed(shape, outputs, _reduced, _operands, _stream) -> int:
        return 2 * (shape.weight_size + outputs)

    @staticmethod
    def bottleneck_pack(*_arguments) -> None: ...

    @staticmethod
    def dense_layer_takes(shape: Any, before: int, filters: int, device: int) -> bool:
        return False

    @staticmethod
    def dense_layer_packed(shape, before, filters, _operands, _stream) -> int:
        return 2 * (shape.weight_size + (before + 32) * filters)

    @staticmethod
    def dense_layer_pack(*_arguments) -> None: ...

    @staticmethod
    def mlp_takes(shape: Any, outputs: int, compute_dtype: Any, device: int) -> bool:
        return False

    @staticmethod
    def mlp_packed(shape, outputs, _operands, _stream) -> int:
        return 2 * (shape.weight_size + outputs)

    @staticmethod
    def mlp_pack(*_arguments) -> None: ...

    @staticmethod
    def inverted_residual_takes(shape, _channels, _filters, _expands, _adds, _device) -> int:
        return shape.out_w <= 32

    @staticmethod
    def inverted_residual_packed(shape, channels, filters, _expands, _operands, _stream) -> int:
        return 2 * (shape.weight_size + channels + filters)

    @staticmethod
    def inverted_residual_pack(*_arguments) -> None: ...

    @staticmethod
    def mean_linear_takes(shape: Any, outputs: int, compute_dtype: Any, device: int) -> bool:
        return False

    @staticmethod
    def mean_linear_packed(shape, outputs, _operands, _stream) -> int:
        return 4 * shape.inner * outputs

    @staticmethod
    def mean_linear_pack(*_arguments) -> None: ...

    @staticmethod
    def stem_pool_takes(_shape, _pool, _operands, _device) -> int:
        return 1

    @staticmethod
    def squeeze_excite_packed(shape, hidden, compute_dtype, _stream) -> int:
        return 8 * shape.inner * hidden

    @staticmethod
    def squeeze_excite_pack(first, second, packed, shape, hidden, compute_dtype, _stream) -> None:
        half = 4 * shape.inner * hidden
        _cpu.copy(first, packed, half, 1)
        _cpu.copy(second, packed + half, half, 1)

    @staticmethod
    def squeeze_excite(
        x, _x, packed, _means, _parts, y, shape, hidden, _operands,
        b1, _x1, _pitch1, _kind1, inner, _overflow1, b2, _x2, _pitch2, _kind2, outer, _overflow2, _stream,
    ) -> None:  # fmt: skip
        n, c = shape.outer, shape.inner
        mean, sums = np.empty((n, c), np.float32), np.empty((n, hidden), np.float32)
        at, there = mean.ctypes.data, sums.ctypes.data
        _cpu.reduce(x, at, shape, _cpu.Reduction.mean, 1)
        _cpu.linear(at, packed, b1, there, _cpu.LinearShape(n, c, hidden), False, 1)
        _cpu.unary(there, there, sums.size, *function_of(inner), 1)
        second = packed + 4 * c * hidden
        _cpu.linear(there, second, b2, y, _cpu.LinearShape(n, hidden, c), False, 1)
        _cpu.unary(y, y, mean.size, *function_of(outer), 1)

    @staticmethod
    def squeeze_excite_scales(shape, _hidden, _device) -> int:
        return 1

    @staticmethod
    def max_pool2d_nhwc(*arguments: Any) -> None:
        *arguments, _stored, _stream = arguments
        _cpu.max_pool2d_nhwc(*arguments, 1)

    @staticmethod
    def average_pool2d_nhwc(*arguments: Any) -> None:
        *arguments, _stored, _stream = arguments
        _cpu.average_pool2d_nhwc(*arguments, 1)


class FakeReader:
    """``_cuda.FileReader``, on the caller's thread."""

    def read(self, descriptor: int, offset: int, nbytes: int, to: int) -> int:
        there = os.pread(descriptor, nbytes, offset)
        if to:
            ctypes.memmove(to, there, len(there))
        return len(there)


class FakeCuda(CpuDevice):
    """``cuda:0``; with Hopper's tensor cores, or so old that they take no tf32."""

    kind = "cuda"
    name = "cuda:0"
    index = 0
    stream_handle = 7
    model = "a fake"
    stream = None

    def __init__(self, tensor_cores: bool = False) -> None:
        super().__init__()
        self.tensor_cores = tensor_cores
        self.captured = 0
        self.kernels = FakeTensorCores() if tensor_cores else FakeKernels()
        self.context = nullcontext()
        self.properties = {
            "name": self.model,
            "managed_memory": True,
            "multiprocessors": 132,
            "total_memory": 2**37,
            "cache_bytes": 60 << 20,
            "compute_capability": (9, 0) if tensor_cores else (7, 5),
        }

    @property
    def target(self) -> Target:
        return Target.named("h200" if self.tensor_cores else "t4")

    def lane(self) -> FakeCuda:
        return FakeCuda(self.tensor_cores)

    def on(self, stream: int, apart: bool = False) -> FakeCuda:
        other = FakeCuda(self.tensor_cores)
        other.stream_handle = stream
        return other

    allocate_managed = CpuDevice.allocate

    def check_managed(self, nbytes: int) -> None: ...

    def sleep_while_waiting(self) -> None: ...

    def synchronize_streams(self) -> None: ...

    def file_reader(self, threads: int) -> FakeReader:
        return FakeReader()

    def empty_pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def is_pinned(self, address: int) -> bool:
        return False

    def copy_h2d(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        _cpu.copy(source, to, nbytes, 1)

    copy_d2h = queue_copy = copy_h2d

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def is_current(self) -> bool:
        return True

    def is_capturing(self, stream: int) -> bool:
        return False

    def stream_id(self, stream: int) -> int:
        return stream

    def release_graphs(self) -> None: ...

    def wait_for(self, streams: dict[int, Any]) -> bool:
        return True

    def beside(self, stream: int, run: Any) -> Any:
        """What is queued elsewhere is done at once."""
        run(stream)
        return lambda: None

    def capture(self, run: Any) -> tuple[Any, list[Any]]:
        """A graph that is no less work than its parts."""
        self.captured += 1
        return run, [self.stream_handle]


def install(monkeypatch, tensor_cores: bool = False, stores: bool = False) -> None:
    """Makes every device ``cuda...`` that is asked for a fake.

    Args:
        stores: whether plans may store images in 16 bits; they cannot be run then.
    """
    from cnn_engine import devices
    from cnn_engine.lower import reduced_precision

    for kept in (AxisShape, RowLayer, RowLayers):
        monkeypatch.setattr(_cpu, kept.__name__, kept)
    if not stores:
        monkeypatch.setattr(reduced_precision, "DTYPES", ())

    real = devices.select

    def select(name: str) -> Any:
        return FakeCuda(tensor_cores) if name.startswith("cuda") else real(name)

    monkeypatch.setattr(devices, "select", select)


def install_hopper(monkeypatch, **more: Any) -> None:
    """Installs a fake whose wgmma takes all convolutions; ``more``: others of its functions."""
    install(monkeypatch, tensor_cores=True, stores=True)
    own = {"takes": lambda *how: True, "packed": lambda *how: 64, "pack": lambda *how: None, **more}
    for name, function in own.items():
        function = staticmethod(function)
        monkeypatch.setattr(FakeTensorCores, f"conv2d_nhwc_wgmma_{name}", function, raising=False)
