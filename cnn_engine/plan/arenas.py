"""Plans the arenas of a placed graph, compares them with free memory, and allocates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import kernels
from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import InputError
from ..graph.dims import Sizes
from ..graph.graph import Graph, Node
from ..lower import batch_invariance
from ..lower.lowering import Program
from ..lower.placement import Placed, Placement
from . import memory
from .memory import MemoryPlan


def plan_memory(
    placed: Placed,
    device_of: Callable[[str], Any],
    threads: int,
    scratch: bool = True,
    batch_invariant: bool = False,
) -> MemoryPlan:
    """Plans the memory of a pass.

    Args:
        device_of: returns the device of a kind.
        scratch: whether kernels' scratch memory is planned, too.
        batch_invariant: whether some kernels are called for one image after the other.
    """
    graph, chosen = placed.graph, placed.kernels

    def workspace(node: Node) -> int:
        kernel = chosen.get(node.name)
        if kernel is None or not scratch:
            return 0
        called = batch_invariance.graph_of_calls(node, kernel, graph) if batch_invariant else graph
        return kernel.workspace(node, called, device_of(kernel.device), threads)

    def in_place(node: Node) -> bool:
        if node.name not in chosen or not chosen[node.name].in_place or node.inputs[0] is None:
            return False
        # Half as many numbers of twice the size are as many bytes, and are read again and again.
        x, y = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
        return (x.shape, x.storage_dtype) == (y.shape, y.storage_dtype)

    return memory.plan(
        graph,
        placed.memory_spaces.__getitem__,
        in_place=in_place,
        is_alias=lambda node: node.op.kind in kernels.ALIASES,
        workspace=workspace,
        workspace_arena=lambda node: placed.spaces[node.name],
        allows_pitch=lambda node, place: (
            node.name in chosen and chosen[node.name].allows_pitch(node, place)
        ),
    )


def check_fits(placement: Placement, nbytes: Mapping[str, int], sizes: Sizes) -> None:
    """Raises InputError where arenas of so many bytes exceed free memory."""
    device = placement.device
    if managed := nbytes.get("managed", 0):
        device.check_managed(managed)
    for where, owner in (("cpu", CpuDevice()), (device.kind, device)):
        wanted = nbytes.get(where, 0)
        if wanted and wanted > (free := owner.free_memory()):
            raise InputError(
                f"{_named(sizes)} need {wanted / 2**30:.1f} GiB on {owner.name} for "
                f"activations at their peak, expected at most the {free / 2**30:.1f} GiB that are free"
            )


def kept_of(graph: Graph) -> Graph | None:
    """Returns the keeper of memory of constants that are of one size only, for plans that use it."""
    return graph if graph.sized else None


def _named(sizes: Sizes) -> str:
    """Returns what sizes are called in errors."""
    if sizes.images is None or len(sizes.numbers) > 1:
        return f"inputs: {sizes or 'these'}"
    return f"batch: {sizes.images} images"


def allocate(program: Program, planned: MemoryPlan) -> dict[str, Buffer]:
    """Returns the arenas of a plan, which live as long as that."""
    device = program.placement.device
    allocators = {
        device.kind: device.allocate,
        "cpu": program.allocate,
        "managed": getattr(device, "allocate_managed", None),
    }
    return {arena: allocators[arena](nbytes) for arena, nbytes in planned.sizes.items()}
