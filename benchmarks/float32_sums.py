"""What Hopper's tensor cores lose of float32's sums, and what giving it back leaves: a model on the CPU.

    python -m benchmarks.float32_sums --network squeezenet1_1 --batch 1 2 5 --layers

``csrc/cuda/sm90/conv2d_nhwc_wgmma_split.cuh`` multiplies both numbers as two parts of float16. Here an
instruction adds 16 products and the sum before it, each cut off at 2^-26 of the largest one's power of two,
and cuts its sum off at 24 bits: what was measured of an H100 is met within 0.08 of 2^-24
(docs/explanation/numerics.md). Convolutions of a network are so made, but for grouped ones and those of few
channels; these and all else are float64, rounded to float32 after every layer. Its logits are compared with
float64's, so that what is packed, or given back, can be judged without a GPU.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cnn_engine import cli, export

from .low_batch_contestants import ignore_compiled_operators, spec_of

#: Bits below the largest number's power of two that an instruction keeps of each, and those of a sum.
KEPT, SUM_BITS = 26, 24
#: Terms of an instruction, and channels of a step.
TERMS, STEP = 16, 32
#: Places that are modelled at once.
PLACES = 1024

#: Of a sum's 2^-24, what is given back of taps of at most so many channels, as ``cut_off_of`` has it.
LOST = ((16, 0.63), (32, 0.75), (48, 0.8), (np.inf, 0.9))


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest float16 numbers and those nearest to what these leave, as float64."""
    large = x.astype(np.float16).astype(np.float64)
    return large, (x - large).astype(np.float16).astype(np.float64)


def scale_of(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the powers of two that bring the largest magnitudes along ``axis`` to 2^14 and more."""
    largest = np.abs(x).max(axis, keepdims=True, initial=0.0)
    return np.exp2(14 - np.floor(np.log2(np.where(largest == 0, 1.0, largest))))


def instruction(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns sums [K, P] and products of a [K, terms] and b [terms, P], as a tensor core adds them up."""
    products = a[:, :, None] * b[None]
    largest = np.maximum(np.abs(products).max(1), np.abs(sums))
    shift = KEPT - np.frexp(largest)[1]
    whole = np.trunc(np.ldexp(products, shift[:, None])).sum(1) + np.trunc(np.ldexp(sums, shift))
    mantissa, exponent = np.frexp(np.ldexp(whole, -shift))
    return np.ldexp(np.trunc(np.ldexp(mantissa, SUM_BITS)), exponent - SUM_BITS)


def compensated(sums: np.ndarray, channels: int) -> np.ndarray:
    """Returns float32 sums with what was cut off given back, but to those of few bits."""
    lost = next(lost for most, lost in LOST if channels <= most)
    cut_off = (0.5 + lost / (7 / 8 * 2 / np.log(2))) * 2.0**-24
    grows = sums.astype(np.float32).view(np.uint32) % 8 != 0
    return np.where(grows, _narrow(sums * (1 + cut_off)), sums)


def product(weight: np.ndarray, x: np.ndarray, channels: int, gives_back: bool) -> np.ndarray:
    """Returns float32 sums [K, P] of weight [K, taps * channels] and x [taps * channels, P]."""
    scales = scale_of(weight, 1)
    large, small = parts(weight * scales)
    sums = np.zeros((len(weight), x.shape[1]))
    for first in range(0, len(x), channels):
        for begin in range(first, first + channels, STEP):
            end = min(begin + STEP, first + channels)
            scale = scale_of(x[begin:end], 0)
            x_large, x_small = parts(x[begin:end] * scale)
            of_step = np.zeros_like(sums)
            for w, z in ((small, x_large), (large, x_small), (large, x_large)):
                for at in range(begin, end, TERMS):
                    terms = slice(at, min(at + TERMS, end))
                    of_step = instruction(of_step, w[:, terms], z[at - begin : terms.stop - begin])
            sums = _narrow(sums + of_step / scale)
    return (compensated(sums, channels) if gives_back else sums) / scales


def in_parts(weight: np.ndarray, x: np.ndarray, channels: int) -> np.ndarray:
    """Returns sums of weights in two parts and of numbers as they are."""
    scales = scale_of(weight, 1)
    return (sum(parts(weight * scales)) / scales) @ x


#: What is compared, by its name in the table.
FORMS: dict[str, Callable[..., np.ndarray]] = {
    "weights in two parts": in_parts,
    "nothing given back": lambda *how: product(*how, gives_back=False),
    "given back": lambda *how: product(*how, gives_back=True),
}


def _tell(weight: np.ndarray, x: np.ndarray, channels: int) -> None:
    """Prints what a layer's first sums lose, in 2^-24 of them, with nothing given back and with it."""
    x = x[:, :PLACES]
    wanted = weight @ x
    lost = []
    for gives_back in (False, True):
        errors = wanted - product(weight, x, channels, gives_back)
        lost.append((errors * wanted).sum() / (wanted**2).sum() * 2**24)
    taps = weight.shape[1] // channels
    sizes = f"{channels:5} channels, {taps:2} taps, {len(weight):4} filters"
    print(f"{sizes}: lost {lost[0]:+.2f}, then {lost[1]:+.2f}", flush=True)


def _exact(weight: np.ndarray, x: np.ndarray, _channels: int) -> np.ndarray:
    return weight @ x


def _modelled(torch: Any, module: Any, form: Callable[..., np.ndarray], look: Any = None) -> Any:
    """Returns the module in float64 with its convolutions as ``form`` makes them and all else rounded.

    ``look``, where it is not None, is shown what each of them multiplies.
    """
    found = copy.deepcopy(module).double()

    def convolve(layer: Any, x: Any) -> Any:
        filters, channels, *window = layer.weight.shape
        if layer.groups > 1 or channels < TERMS:
            return layer._conv_forward(x, layer.weight, layer.bias)
        weight = layer.weight.permute(0, 2, 3, 1).reshape(filters, -1).numpy()
        how = {"padding": layer.padding, "stride": layer.stride, "dilation": layer.dilation}
        rows = torch.nn.functional.unfold(x, window, **how).numpy()
        images, _, places = rows.shape
        taps_first = rows.reshape(images, channels, -1, places).transpose(2, 1, 0, 3)
        flat = taps_first.reshape(-1, images * places)
        if look is not None:
            look(weight, flat, channels)
        made = [
            form(weight, flat[:, at : at + PLACES], channels)
            for at in range(0, flat.shape[1], PLACES)
        ]
        sums = np.concatenate(made, 1).reshape(filters, images, places).transpose(1, 0, 2)
        size = x.shape[2] + 2 * layer.padding[0] - layer.dilation[0] * (window[0] - 1) - 1
        y = torch.from_numpy(sums.copy()).reshape(images, filters, size // layer.stride[0] + 1, -1)
        return y if layer.bias is None else y.float().double() + layer.bias[:, None, None]

    for layer in found.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.forward = convolve.__get__(layer)
        if not list(layer.children()):
            layer.register_forward_hook(lambda _layer, _given, y: y.float().double())
    return found


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="python -m benchmarks.float32_sums",
        description="Models what tensor cores lose of float32's sums, and the logits' errors.",
    )
    p.add_argument("--network", default="squeezenet1_1", help="as benchmarks.low_batch has them")
    p.add_argument("--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1], metavar="N")
    p.add_argument("--layers", action="store_true", help="prints what each layer's sums lose, too")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    options = parser().parse_args(arguments)
    ignore_compiled_operators()
    import torch

    torch.manual_seed(0)
    module, _ = export.build(spec_of(options.network), "random")
    shape = export.images_shape(module, None)
    export.run_statistics(module, shape)
    module.eval()
    forms = {name: _modelled(torch, module, form) for name, form in FORMS.items()}
    forms = {"rounded alone": _modelled(torch, module, _exact)} | forms
    print(f"{options.network}, float32: the largest error, of the largest logit")
    for batch in options.batch:
        images = np.random.default_rng(batch).normal(size=(batch, *shape)).astype(np.float32)
        with torch.no_grad():
            given = torch.from_numpy(images)
            wanted = module.double()(given.double())
            made = {"PyTorch": module.float()(given)}
            made |= {name: form(given.double()) for name, form in forms.items()}
        largest = wanted.abs().max()
        errors = {name: float((y - wanted).abs().max() / largest) for name, y in made.items()}
        print(
            f"batch {batch}: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()),
            flush=True,
        )
    if options.layers:
        with torch.no_grad():
            _modelled(torch, module, _exact, _tell)(given[:1].double())
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
