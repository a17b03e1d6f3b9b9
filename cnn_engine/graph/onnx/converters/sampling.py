"""Operators that read between pixels or overlap windows, and Fourier transforms."""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError, UnsupportedError
from ....operators.operator import axis_in
from ....operators.overlap import Col2im, MaxUnpool
from ....operators.sampling import DeformConv, GridSample, RoiAlign
from ....operators.signal import Dft, Stft
from .. import model as protobuf
from ..refusal import Refusal
from . import converts
from .tables import bounded


@converts("GridSample")
def grid_sample(call) -> None:
    mode = call.text("mode", "linear" if call.opset >= 20 else "bilinear")
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    op = GridSample(mode, call.text("padding_mode", "zeros"), bool(call.number("align_corners", 0)))
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("RoiAlign")
def roi_align(call) -> None:
    # Opset 16 moved pixels' centres, and could say so.
    usual = "half_pixel" if call.opset >= 16 else "output_half_pixel"
    coordinates = call.text("coordinate_transformation_mode", usual)
    if coordinates not in ("half_pixel", "output_half_pixel"):
        raise Refusal("coordinate_transformation_mode", f"{coordinates!r} is not known")
    op = RoiAlign(
        call.number("output_height", 1), call.number("output_width", 1),
        call.number("sampling_ratio", 0), call.number("spatial_scale", 1.0),
        call.text("mode", "avg").lower(), coordinates == "half_pixel",
    )  # fmt: skip
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("DeformConv")
def deform_conv(call) -> None:
    weight = call.value(1).shape
    if len(weight) != 4 or len(call.value(0).shape) != 4:
        raise Refusal(None, f"expected images of 2 dimensions, found a weight {list(weight)}")
    kernel = call.integers("kernel_shape", weight[2:])
    if kernel != weight[2:]:
        raise InputError(f"kernel_shape: expected {list(weight[2:])}, found {list(kernel)}")
    op = DeformConv(
        call.integers("strides", (1, 1)), call.integers("pads", (0, 0, 0, 0)),
        call.integers("dilations", (1, 1)), call.number("group", 1), call.number("offset_group", 1),
    )  # fmt: skip
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("Col2Im")
def col2im(call) -> None:
    image = call.constant_integers(1, "image_shape") or ()
    kernel = call.constant_integers(2, "block_shape") or ()
    ones = (1,) * len(image)
    op = Col2im(
        image, kernel, call.integers("strides", ones), call.integers("pads", (0,) * 2 * len(image)),
        call.integers("dilations", ones),
    )  # fmt: skip
    call.refuse_others()
    call.finish(op, [call.input(0)])


@converts("MaxUnpool")
def max_unpool(call) -> None:
    shape = call.value(0).shape
    kernel = call.integers("kernel_shape")
    rank = len(shape) - 2
    if kernel is None or len(kernel) != rank:
        raise InputError(f"kernel_shape: expected {rank} numbers, found {kernel}")
    strides = call.integers("strides", (1,) * rank)
    pads = call.integers("pads", (0,) * 2 * rank)
    call.refuse_others()
    pooled = tuple(
        (size - 1) * strides[d] - pads[d] - pads[rank + d] + kernel[d]
        for d, size in enumerate(shape[2:])
    )
    whole = call.constant_integers(2, "output_shape") or (*shape[:2], *pooled)
    if len(whole) != len(shape) or whole[:2] != shape[:2]:
        raise InputError(f"output_shape: expected {list(shape[:2])} and an image, found {whole}")
    call.finish(MaxUnpool(pooled, whole[2:]), call.inputs[:2])


@converts("DFT")
def dft(call) -> None:
    rank = len(call.value(0).shape)
    length = call.constant_number(1, "dft_length", 0)
    since = call.opset >= 20
    axis = call.constant_number(2, "axis", -2) if since else call.number("axis", 1)
    op = Dft(
        int(length), axis_in(int(axis), rank), bool(call.number("inverse", 0)),
        bool(call.number("onesided", 0)),
    )  # fmt: skip
    call.refuse_others()
    call.finish(op, [call.input(0)])


@converts("STFT")
def stft(call) -> None:
    shape = call.value(0).shape
    step = call.constant_number(1, "frame_step")
    length = call.value(2).size if call.has(2) else shape[1] if len(shape) > 1 else 0
    length = call.constant_number(3, "frame_length", length)
    op = Stft(int(step), int(length), bool(call.number("onesided", 1)))
    call.refuse_others()
    call.finish(op, [call.input(0), call.inputs[2] if call.has(2) else None])


@converts("MelWeightMatrix")
def mel_weight_matrix(call) -> None:
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    bins, length, rate, low, high = (call.constant_number(i, name) for i, name in enumerate(names))
    number = call.number("output_datatype", 1)
    call.refuse_others()
    try:
        dtype = protobuf.dtype_name(number)
    except UnsupportedError as error:
        raise Refusal("output_datatype", str(error)) from None
    if bins < 1 or length < 1 or rate <= 0 or not 0 <= low < high <= rate / 2:
        raise InputError(
            f"expected bins and a length from 1 and edges up to half the rate, found {bins}, {length}, "
            f"{low} to {high} of {rate}"
        )
    size = length // 2 + 1
    bounded((size, bins), 8)
    # The bins' edges are equally far apart in mel, and rounded down to whole frequencies.
    mels = [2595 * math.log10(1 + edge / 700) for edge in (low, high)]
    edges = mels[0] + np.arange(bins + 2) * (mels[1] - mels[0]) / (bins + 2)
    edges = (length + 1) * 700 * (10 ** (edges / 2595) - 1) // rate
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    at = np.arange(size)[:, None]
    with np.errstate(all="ignore"):
        rising = np.where(middle > left, (at - left) / (middle - left), at == middle)
        falling = (right - at) / (right - middle)
    found = np.where((at >= left) & (at <= middle), rising, 0.0)
    found = np.where((at >= middle) & (at < right), falling, found)
    call.set_constant(found.astype(dtype), output=0)
