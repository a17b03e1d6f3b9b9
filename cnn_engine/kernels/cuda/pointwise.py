"""CUDA's kernel of functions in a row: one is written for each region, and compiled at first use."""

from __future__ import annotations

from itertools import chain
from typing import Any

from ... import _cpu
from ...devices.described import DescribedDevice
from ...graph.graph import Graph, Node
from ...graph.passes.fuse.pointwise import MOST_INPUTS, POINTWISE
from ...operators.binary import Binary
from ...operators.region import Region
from ..kernel import Bound, Call, Kernel, storage_of, storing
from ..pointwise import region_why_not, walk_of

#: What a tensor's elements are in a program.
_TYPES = {"": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}

_PROGRAM = """#include "cuda/common/pointwise.cuh"

namespace cnn_engine::cuda {{

struct Tree {{
  template <int width>
  static __device__ void evaluate(const PointwiseCall& call,
                                  const std::int64_t (&at)[kPointwiseTensors]) {{
    {reads}
    float y[width];
    bool is_pole = false;  // a function of finite numbers is none, in 16 bits
#pragma unroll
    for (int i = 0; i < width; ++i) {{
      {functions}
      y[i] = {result};
      is_pole |= {finite_inputs} && !({finite_results});
    }}
    if ({is_rounded} && is_pole) tell(call.overflow);
    store_neighbours<width>(static_cast<{type}*>(call.tensors[0]) + at[0], y, call.overflow);
  }}
}};

}}  // namespace cnn_engine::cuda

CNN_ENGINE_POINTWISE(cnn_engine::cuda::Tree)
"""


def program_of(region: Region, types: list[str]) -> str:
    """Returns the CUDA source of a region.

    Args:
        types: how each input and then the output lies in memory: ``float16``, ``bfloat16`` or "", its own.
    """
    *read, made = (_TYPES[one] for one in types)
    reads = [
        f"float {name}[width];\n    read<{kind}>(call, {index}, at[{index}], {name});"
        for index, (name, kind) in enumerate(zip(region.inputs, read, strict=True), start=1)
    ]
    known = {name: f"{name}[i]" for name in region.inputs}
    written = []
    for part in region.nodes:
        arguments = [known[name] for name in part.inputs]
        kind = "binary" if isinstance(part.op, Binary) else "unary"
        if kind == "unary":
            arguments += [_number(part.op.alpha), _number(part.op.beta)]
        call = f"{kind}_{part.op.function}::of({', '.join(arguments)})"
        written.append(f"const float {part.role} = {call};")
        known[part.role] = part.role
    return _PROGRAM.format(
        reads="\n    ".join(reads), functions="\n      ".join(written), type=made,
        result=region.outputs[0], is_rounded="true" if any(types) else "false",
        finite_inputs=" && ".join(f"isfinite({name}[i])" for name in region.inputs),
        finite_results=" && ".join(f"isfinite({part.role})" for part in region.nodes),
    )  # fmt: skip


def _number(value: float) -> str:
    """Returns a float32 as C has it, exactly."""
    value = float(value)
    if value != value:
        return "__int_as_float(0x7fffffff)"
    if abs(value) == float("inf"):
        return f"{'-' if value < 0 else ''}__int_as_float(0x7f800000)"
    return f"static_cast<float>({value.hex()})"


def _stored(node: Node, graph: Graph) -> list[str]:
    values = (*graph.inputs_of(node), *graph.outputs_of(node))
    return [value.storage_dtype or "" for value in values]


def _why_not_fuse(node: Node, graph: Graph, device: Any) -> str | None:
    from ..user import nvrtc

    if not isinstance(device, DescribedDevice):
        if not hasattr(device.kernels, "PointwiseProgram"):
            return "expected a device for which kernels can be compiled"
        if reason := nvrtc.why_not():
            return reason
    return _why_not(node, graph)


def _why_not(node: Node, graph: Graph) -> str | None:
    if len(set(_stored(node, graph)) - {""}) > 1:
        return "expected one type of 16 bits"
    return region_why_not(node, graph)


def _prepare(node: Node, graph: Graph, device: Any) -> Any:
    from ..user import nvrtc

    source = program_of(node.op, _stored(node, graph))
    code = nvrtc.compile_program(source, device.kernels.program_headers, device.target)
    with device.context:
        return device.kernels.PointwiseProgram(code)


def _make(call: Call) -> Bound:
    shape = _cpu.PointwiseShape(*chain(*walk_of(call)), len(call.node.op.nodes))
    first = call.input_addresses[0]
    inputs = [*call.input_addresses, *[first] * (MOST_INPUTS - len(call.inputs))]
    types = [storage_of(value) for value in call.inputs]
    types += [types[0]] * (MOST_INPUTS - len(types))
    storage = _cpu.PointwiseStorage(storage_of(call.outputs[0]), *types)
    return call.native(
        "pointwise_compiled", call.prepared.address, *inputs, call.output_addresses[0], shape,
        storage, call.overflow,
    )  # fmt: skip


ROWS = [
    Kernel(
        POINTWISE, "pointwise", "cuda", _make, why_not=_why_not, why_not_fuse=_why_not_fuse,
        prepare=_prepare, packed_for=lambda node, graph, device: tuple(_stored(node, graph)), packs=(),
        in_place=True, pitched=(None, *range(MOST_INPUTS)), stores=storing(None, *range(MOST_INPUTS)),
    ),
]  # fmt: skip
