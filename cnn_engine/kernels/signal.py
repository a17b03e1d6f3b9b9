"""The kernels of Fourier transforms: NumPy's, in float32."""

from __future__ import annotations

from typing import Any

from ..floating_point import usual_mode
from .kernel import Bound, Call, Kernel
from .numpy import array_at


def _make(call: Call) -> Bound:
    op, inputs, (output,) = call.node.op, call.inputs, call.outputs

    @usual_mode()
    def run(*addresses: Any) -> None:
        arrays = [
            None if value is None else array_at(address, value)
            for address, value in zip(addresses, inputs, strict=False)
        ]
        array_at(addresses[len(inputs)], output)[...] = op.transform(*arrays)

    return run, [*call.input_addresses, *call.output_addresses]


ROWS = [Kernel(kind, "fft", "cpu", _make) for kind in ("dft", "stft")]
