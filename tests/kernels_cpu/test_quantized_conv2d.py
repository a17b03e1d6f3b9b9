"""quantized_conv2d with every set of instructions: equal to int64 arithmetic in every element."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from cnn_engine import _cpu

Type = _cpu.ElementType
INTEGERS = {np.int8: Type.int8, np.uint8: Type.uint8}
OUTPUTS = {**INTEGERS, np.float32: Type.float32, np.int32: Type.int32}


@pytest.fixture(params=_cpu.integer_instructions())
def instructions(request):
    before = _cpu.selected_integer_instructions()
    _cpu.select_integer_instructions(request.param)
    yield request.param
    _cpu.select_integer_instructions(before)


class Case:
    """A random convolution, its arguments, and what NumPy makes of them in int64."""

    def __init__(self, rng, **fixed):
        def pick(name, *values):
            return fixed.get(name, values[rng.integers(len(values))])

        self.n = pick("n", 1, 2, 3)
        self.groups = pick("groups", 1, 1, 1, 2, 3, 5)
        self.c = self.groups * pick("channels", 1, 2, 3, 4, 5, 8, 16, 20, 31, 64, 68, 130)
        self.k = self.groups * pick("filters", 1, 3, 15, 16, 17, 32, 33, 70)
        if pick("depthwise", False, False, False, True):
            self.groups = self.c = self.k = pick("channels", 3, 7, 16, 24, 33, 40, 100, 200)
        self.kernel = pick("kernel", (1, 1), (1, 1), (3, 3), (5, 5), (2, 5), (7, 3))
        self.stride = pick("stride", (1, 1), (1, 1), (2, 2), (3, 1))
        self.dilation = pick("dilation", (1, 1), (1, 1), (2, 1), (1, 3))
        pads = [int(rng.integers(0, 4)) for _ in range(4)]
        self.padding = pick("padding", (0, 0, 0, 0), (1, 1, 1, 1), tuple(pads))
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        self.sizes = pick("sizes", *(
            tuple(span + int(rng.integers(0, most)) for span in spans) for most in (1, 6, 20, 40)
        ))  # fmt: skip
        self.x_type, self.y_type = pick("x_type", *INTEGERS), pick("y_type", *OUTPUTS)
        self.residual_type = pick("residual_type", None, *INTEGERS)
        if self.y_type in (np.float32, np.int32):
            self.residual_type = None
        self.table = self.inner = None
        if self.y_type in INTEGERS and pick("table", False, False, True):
            self.table = numbers(rng, self.y_type, 256)
        self.planar = self.groups == 1 and self.c < 9 and pick("planar", False, True)
        h, w = self.sizes
        self.x_zero = zero_of(rng, self.x_type)
        self.x = numbers(rng, self.x_type, (self.n, h, w, self.c))
        self.wide = pick("wide", 127, 127, 127, 128, 255)
        low = max(-255, -self.wide - 1)
        shape = (self.k, self.c // self.groups, *self.kernel)
        self.weight = rng.integers(low, self.wide + 1, shape).astype(np.int16)
        self.weight.flat[0] = low if rng.integers(2) else self.wide
        self.bias = rng.integers(-(2**31), 2**31, self.k).astype(np.int32)
        if rng.integers(3):
            self.bias //= 1 << 18
        spread = abs(self.weight).sum(axis=(1, 2, 3)) * 40 + 1
        self.scale = (rng.uniform(0.1, 8, self.k) * 100 / spread).astype(np.float32)
        for hostile in (np.nan, np.inf, -1, 0, 2.0**-140):
            if not rng.integers(8):
                self.scale[rng.integers(self.k)] = hostile
        if self.y_type is np.float32:
            self.scale = np.nan_to_num(self.scale, posinf=1e30)
        self.y_zero, self.low, self.high = 0, 0, 0
        if self.y_type in INTEGERS:
            ends = np.iinfo(self.y_type)
            self.y_zero = zero_of(rng, self.y_type)
            self.low, self.high = pick(
                "range", (ends.min, ends.max), (self.y_zero, ends.max), (ends.min + 100, ends.max - 99)
            )  # fmt: skip

    def windows(self, x):
        top, left, bottom, right = self.padding
        x = np.pad(x.astype(np.int64) - self.x_zero, ((0, 0), (top, bottom), (left, right), (0, 0)))
        spans = tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        view = np.lib.stride_tricks.sliding_window_view(x, spans, axis=(1, 2))
        rows, columns = self.stride
        return view[:, ::rows, ::columns, :, :: self.dilation[0], :: self.dilation[1]]

    def wanted(self, residual, residual_zero, residual_scale):
        view = self.windows(self.x)
        parts = [
            np.einsum("nijcrs,kcrs->nijk", part, weight.astype(np.int64), optimize=True)
            for part, weight in zip(
                np.split(view, self.groups, axis=3), np.split(self.weight, self.groups), strict=True
            )
        ]
        total = (np.concatenate(parts, axis=-1) + self.bias).astype(np.int32)
        if self.y_type is np.int32:
            return total
        with np.errstate(all="ignore"):
            v = total.astype(np.float32) * self.scale
            if residual is not None:
                if self.inner is not None:
                    scale, low, high = self.inner
                    whole = np.clip(np.nan_to_num(np.rint(v), nan=low), low, high)
                    v = whole.astype(np.float32) * np.float32(scale)
                steps = (residual.astype(np.int32) - residual_zero).astype(np.float32)
                v = v + steps * np.float32(residual_scale)
            if self.y_type is np.float32:
                return v
            whole = np.rint(v).astype(np.float64) + self.y_zero
        whole = np.where(np.isnan(whole), self.low, np.clip(whole, self.low, self.high))
        y = whole.astype(self.y_type)
        return y if self.table is None else self.table[y.view(np.uint8)]

    def run(self, rng, threads):
        """Returns what the kernel makes, and what it should."""
        (h, w), (top, left, bottom, right) = self.sizes, self.padding
        shape = _cpu.Conv2dShape(
            self.n, self.c, h, w, self.k, *self.kernel, *self.stride, top, left, bottom, right,
            *self.dilation, self.groups,
        )  # fmt: skip
        more = rng.integers(0, 6, 3)
        if self.planar:
            more[0] = 0
        x_kept, x_there = at_the_end(columns(rng, self.x, more[0]))
        if self.planar:
            x_kept, x_there = at_the_end(np.ascontiguousarray(self.x.transpose(0, 3, 1, 2)))
        residual, residual_kept, residual_zero, residual_scale = None, None, 0, 0.0
        residual_there, residual_type = 0, np.int8
        places = (self.n, shape.out_h, shape.out_w)
        if self.residual_type is not None:
            residual_type = self.residual_type
            residual = numbers(rng, residual_type, (*places, self.k))
            if rng.integers(2):
                self.inner = (
                    float(rng.uniform(0, 2)),
                    int(rng.integers(-255, 1)),
                    int(rng.integers(0, 256)),
                )
            residual_zero, residual_scale = zero_of(rng, residual_type), float(rng.uniform(0, 2))
            residual_kept, residual_there = at_the_end(columns(rng, residual, more[2]))
        types = _cpu.QuantizedTypes(
            INTEGERS[self.x_type], self.x_zero, OUTPUTS[self.y_type], self.y_zero, int(self.low),
            int(self.high), INTEGERS[residual_type], residual_zero, residual_scale, *(self.inner or ()),
        )  # fmt: skip
        largest = max(int(self.weight.max()), -1 - int(self.weight.min()), 0)
        packed = aligned(_cpu.quantized_conv2d_packed(shape, largest))
        _cpu.quantized_conv2d_pack(
            *map(_cpu.address_of, (self.weight, self.bias, self.scale, packed)), shape, types, largest
        )  # fmt: skip
        workspace = aligned(_cpu.quantized_conv2d_workspace(shape, self.planar, threads))
        found = np.full((*places, self.k + more[1]), 77, self.y_type)
        _cpu.quantized_conv2d(
            x_there, _cpu.address_of(packed), residual_there,
            0 if self.table is None else _cpu.address_of(self.table), _cpu.address_of(found),
            _cpu.address_of(workspace), shape,
            _cpu.Conv2dPitches(self.c + int(more[0]), self.k + int(more[1]), self.k + int(more[2])),
            types, self.planar, threads,
        )  # fmt: skip
        del x_kept, residual_kept
        assert (found[..., self.k :] == 77).all()
        return found[..., : self.k], self.wanted(residual, residual_zero, residual_scale)


def zero_of(rng, dtype) -> int:
    ends = np.iinfo(dtype)
    return int((ends.min, ends.max, 0, rng.integers(ends.min, ends.max + 1))[rng.integers(4)])


def numbers(rng, dtype, shape):
    ends = np.iinfo(dtype)
    return rng.integers(ends.min, ends.max + 1, shape).astype(dtype)


def columns(rng, array, more):
    """Returns ``array`` with so many columns of other numbers behind its own."""
    return np.concatenate([array, numbers(rng, array.dtype, (*array.shape[:-1], more))], axis=-1)


def aligned(nbytes):
    return np.empty(max(nbytes, 1), np.uint8)


def at_the_end(array):
    """Copies ``array`` to the end of readable memory; returns what keeps it, and its address."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    address = start + size - array.nbytes
    ctypes.memmove(address, array.ctypes.data, array.nbytes)
    return memory, address


@pytest.mark.parametrize("seed", range(3))
def test_every_element_is_that_of_int64(instructions, seed):
    rng = np.random.default_rng(seed)
    for number in range(100):
        case = Case(rng)
        found, wanted = case.run(rng, threads=int(rng.integers(1, 4)))
        assert found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted, err_msg=f"{number} {vars(case)}")


def test_large_weights_are_read_once_for_several_images(instructions):
    """Images that share a task, and a last task of fewer, of rows that are unrolled and not."""
    rng = np.random.default_rng(3)
    large = {
        "groups": 1, "channels": 260, "filters": 520, "depthwise": False, "kernel": (3, 3),
        "stride": (1, 1), "dilation": (1, 1), "wide": 127,
    }  # fmt: skip
    for sizes, padding in (((4, 3), (1, 1, 1, 1)), ((2, 12), (1, 1, 1, 1)), ((3, 14), (0,) * 4)):
        case = Case(rng, n=3, sizes=sizes, padding=padding, **large)
        for threads in (1, 2):
            np.testing.assert_array_equal(*case.run(rng, threads))


def test_long_rows_and_many_channels_of_depthwise_layers(instructions):
    """Rows longer than what is interleaved at once, and blocks of channels that threads share out."""
    rng = np.random.default_rng(7)
    depthwise = {"depthwise": True, "dilation": (1, 1), "wide": 127, "residual_type": None}
    for kernel in ((3, 3), (5, 5)):
        for stride in ((1, 1), (2, 2)):
            for channels, sizes in ((24, (7, 300)), (200, (6, 9))):
                case = Case(
                    rng, **depthwise, kernel=kernel, stride=stride, channels=channels, sizes=sizes
                )
                found, wanted = case.run(rng, threads=3)
                np.testing.assert_array_equal(found, wanted, err_msg=str(vars(case)))
