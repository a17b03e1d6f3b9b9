"""A kernel of a user's own as a row of the table of kernels: from a file, or a Python callable."""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError, expected
from ...graph.graph import Graph, Node
from ..kernel import Bound, Call, Kernel
from ..strided import unused
from . import cpp, expressions, nvrtc, source
from .contracts import CONTRACTS, Contract, structs
from .source import Launch, Source

#: Of a launch, by CUDA's rules: the most blocks along each dimension, and threads.
GRID = (2**31 - 1, 65535, 65535)
BLOCK = (1024, 1024, 64)


def from_file(path: str | Path, library: str | None = None) -> Kernel:
    """Returns the row of a kernel file; it is compiled when an engine prepares its nodes.

    Args:
        library: what a C++ file was compiled to, to be loaded in its place.

    Raises:
        InputError: the file cannot be read, or what it says of itself is at fault.
    """
    read = source.read(path)

    def prepare(node: Node, graph: Graph, device: Any) -> Any:
        return cpp.Library(read, library) if device.kind == "cpu" else nvrtc.Module(read, device)

    def why_not(node: Node, graph: Graph) -> str | None:
        if reason := read.contract.refuses(node, graph):
            return reason
        if read.requires is not None:
            given, tree = numbers(read, node, graph), read.requires
            whole = isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)
            parts = tree.values if whole else [tree]
            broken = [expressions.text(p) for p in parts if not expressions.value(p, given)]
            if broken:
                return f"{read.name} requires {' && '.join(broken)}"
        return None

    def workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
        if read.workspace is None:
            return 0
        given = {**numbers(read, node, graph), "threads": threads}
        return max(_number(read, expressions.value(read.workspace, given)), 0)

    def make(call: Call) -> Bound:
        return _bound(read, call)

    return Kernel(
        read.contract.op, read.name, read.device, make, computes=(read.computes,), why_not=why_not,
        workspace=workspace, rewrite=apart, prepare=prepare, packs=(), file=str(path),
        again=partial(from_file, path, library),
    )  # fmt: skip


def numbers(read: Source, node: Node, graph: Graph) -> dict[str, float]:
    """Returns the numbers that a file's expressions may name, for ``node``."""
    values = read.contract.values(node.op, graph.inputs_of(node), graph.outputs_of(node)[0])
    return {**read.macros, **values}


def _number(read: Source, found: Any) -> int:
    if isinstance(found, tuple):
        raise InputError(f"{read.path}: expected a number, found dim3")
    return int(found)


def apart(node: Node, graph: Graph) -> Sequence[Node] | None:
    """Returns a sum alone and nodes for the operators that rewrites put after it, or None."""
    op = node.op
    activation = getattr(op, "activation", None)
    residual = node.inputs[3] if len(node.inputs) > 3 else None
    if activation is None and residual is None:
        return None
    from ...operators.binary import Add

    value, made = node.outputs[0], []
    plain = unused(graph, f"{value} before")
    made.append(
        replace(node, op=replace(op, activation=None), inputs=node.inputs[:3], outputs=(plain,))
    )
    if residual is not None:
        summed = value if activation is None else unused(graph, f"{value} summed")
        made.append(Node(unused(graph, f"{node.name}.add"), Add(), (plain, residual), (summed,)))
        plain = summed
    if activation is not None:
        name = unused(graph, f"{node.name}.{activation.kind}")
        made.append(Node(name, activation, (plain,), (value,)))
    return made


def _bound(read: Source, call: Call) -> Bound:
    """Returns what runs every launch of a file, and the addresses that it takes."""
    contract = read.contract
    output = call.outputs[0]
    given = contract.values(call.node.op, call.inputs, output)
    shape = structs()[contract.struct].type(*given.values())
    given = {**read.macros, **given, "threads": call.threads}
    at = [*call.input_addresses, *[0] * (len(contract.inputs) - len(call.input_addresses))]
    addresses = [*at, call.output_addresses[0], call.workspace]
    if output.size == 0:
        return _nothing, []
    positions = {name: index for index, name in enumerate((*contract.tensors, "workspace"))}
    prepare = _cuda_call if read.device == "cuda" else _cpu_call
    calls = [prepare(read, call, launch, positions, given, shape) for launch in read.launches]
    if len(calls) == 1:
        return calls[0], addresses

    def run(*addresses: int) -> None:
        for each in calls:
            each(*addresses)

    return run, addresses


def _nothing() -> None:
    return None


def _evaluated(read: Source, launch: Launch, tree: ast.expr | None, given: dict) -> Any:
    try:
        return 0 if tree is None else expressions.value(tree, given)
    except ValueError as error:
        raise InputError(f"{read.path}:{launch.line}: {error}") from None


def _argument(read: Source, launch: Launch, tree: ast.expr, given: dict) -> Any:
    """Returns an expression's value as C has it."""
    found = _evaluated(read, launch, tree, given)
    if isinstance(found, float):
        return ctypes.c_float(found)
    if isinstance(found, tuple) or not -(2**31) <= found < 2**31:
        raise expected(f"{read.path}:{launch.line}", "arguments that fit into an int", found)
    return ctypes.c_int(int(found))


def _cpu_call(read, call, launch, positions, given, shape) -> Callable[..., None]:
    function = call.prepared.function(launch.function, launch.line)
    function.restype = None
    kinds, fixed, moving = [], [], []
    for index, argument in enumerate(launch.arguments):
        if argument == "shape":
            kinds.append(type(shape))
            fixed.append(shape)
        elif isinstance(argument, str):
            kinds.append(ctypes.c_void_p)
            moving.append((index, positions[argument]))
            fixed.append(None)
        else:
            made = _argument(read, launch, argument, given)
            kinds.append(type(made))
            fixed.append(made)
    function.argtypes = kinds

    def run(*addresses: int) -> None:
        arguments = list(fixed)
        for index, place in moving:
            arguments[index] = addresses[place]
        function(*arguments)

    return run


def geometry(
    read: Source, launch: Launch, given: dict, most_shared: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Returns the grid, the block and the bytes of dynamic shared memory of a launch.

    Raises:
        InputError: CUDA has no such launch; names the line.
    """
    sizes = []
    for what, tree, most in (("grid", launch.grid, GRID), ("block", launch.block, BLOCK)):
        found = _evaluated(read, launch, tree, given)
        found = found if isinstance(found, tuple) else (found,)
        found = tuple(map(int, (*found, 1, 1)[:3]))
        for size, limit in zip(found, most, strict=True):
            if not 1 <= size <= limit:
                raise expected(
                    f"{read.path}:{launch.line}",
                    f"a {what} of 1 to {' x '.join(map(str, most))}",
                    " x ".join(map(str, found)),
                )
        sizes.append(found)
    threads = sizes[1][0] * sizes[1][1] * sizes[1][2]
    if threads > 1024:
        raise expected(f"{read.path}:{launch.line}", "at most 1024 threads per block", threads)
    shared = _evaluated(read, launch, launch.shared, given)
    if isinstance(shared, tuple) or not 0 <= shared <= most_shared:
        raise expected(
            f"{read.path}:{launch.line}", f"at most {most_shared} bytes of shared memory", shared
        )
    return sizes[0], sizes[1], int(shared)


def _cuda_call(read, call, launch, positions, given, shape) -> Callable[..., None]:
    module, device = call.prepared, call.device
    driver = module.driver
    function = module.function(launch.function, launch.line)
    needs = module.resources(function)
    most = device.context.attributes["MaxSharedMemoryPerBlockOptin"] - needs.shared
    grid, block, shared = geometry(read, launch, given, most)
    threads = block[0] * block[1] * block[2]
    if threads > needs.threads:
        raise expected(
            f"{read.path}:{launch.line}",
            f"at most {needs.threads} threads per block, for {needs.registers} registers per thread", threads,
        )  # fmt: skip
    if shared + needs.shared > nvrtc.PLAIN_SHARED and shared:
        driver.funcSetAttribute(
            function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared
        )
    values, moving = [], []
    for argument in launch.arguments:
        if argument == "shape":
            values.append(shape)
        elif isinstance(argument, str):
            values.append(ctypes.c_uint64(0))
            moving.append((values[-1], positions[argument]))
        else:
            values.append(_argument(read, launch, argument, given))
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    numbers = (function.ptr, *grid, *block, shared, device.stream_handle)
    start, parameters = driver.launchKernel, ctypes.addressof(pointers)

    def run(*addresses: int) -> None:
        for held, place in moving:
            held.value = addresses[place]
        start(*numbers, parameters, 0)

    run.keeps = pointers, values, module  # what the launch reads
    return run


def from_callable(
    function: Callable[..., None],
    op: str,
    device: str = "cuda",
    *,
    name: str | None = None,
    arrays: str | None = None,
    computes: str = "float32",
    why_not: Callable[[Node, Graph], str | None] | None = None,
) -> Kernel:
    """Returns the row of a Python callable: CuPy's RawKernel, Numba's or Triton's kernels and the like.

    Args:
        function: called as ``function(*tensors, shape)``, such as ``(x, weight, bias, y, shape)``, and fills
            ``y``. Tensors are arrays over the engine's own memory, ``bias`` may be None; ``shape`` is a named
            tuple of the sizes (:data:`CONTRACTS`). On CUDA the engine's stream is CuPy's, and PyTorch's,
            current one; a function with a parameter ``stream`` is given its handle by that name.
        op: the operator's kind.
        device: ``cpu`` or ``cuda``.
        name: what reports call it; None: the function's.
        arrays: what tensors are: ``numpy``; ``cupy`` (default on CUDA) or ``torch``.
        computes: what operands of products are rounded to.
        why_not: returns why it cannot run a node, or None where it can.

    Raises:
        InputError: an argument is at fault.
    """
    if op not in CONTRACTS:
        raise expected("op", f"one of {', '.join(CONTRACTS)}", repr(op))
    if device not in ("cpu", "cuda"):
        raise expected("device", "cpu or cuda", repr(device))
    if computes not in source.COMPUTES:
        raise expected("computes", f"one of {', '.join(source.COMPUTES)}", repr(computes))
    libraries = ("numpy",) if device == "cpu" else ("cupy", "torch")
    arrays = arrays or libraries[0]
    if arrays not in libraries:
        raise expected("arrays", " or ".join(libraries), repr(arrays))
    contract = CONTRACTS[op]
    called = name or getattr(function, "__name__", type(function).__name__)
    try:
        accepts_stream = "stream" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        accepts_stream = False

    def refuses(node: Node, graph: Graph) -> str | None:
        return contract.refuses(node, graph) or (why_not(node, graph) if why_not else None)

    def make(call: Call) -> Bound:
        return _callable_bound(function, contract, call, arrays, accepts_stream)

    return Kernel(
        op, called, device, make, computes=(computes,), why_not=refuses, rewrite=apart,
        again=partial(
            from_callable, function, op, device, name=name, arrays=arrays, computes=computes, why_not=why_not
        ),
    )  # fmt: skip


def _callable_bound(
    function: Callable[..., None], contract: Contract, call: Call, arrays: str, accepts_stream: bool
) -> Bound:
    values = contract.values(call.node.op, call.inputs, call.outputs[0])
    shape = structs()[contract.struct].sizes(**values)
    shapes = [None if value is None else value.shape for value in call.inputs]
    shapes += [None] * (len(contract.inputs) - len(shapes)) + [call.outputs[0].shape]
    at = [
        *call.input_addresses,
        *[0] * (len(contract.inputs) - len(call.input_addresses)),
        call.output_addresses[0],
    ]
    if call.outputs[0].size == 0:
        return _nothing, []
    device = call.device
    more = {"stream": device.stream_handle} if accepts_stream and device.kind == "cuda" else {}
    last: list[Any] = [None, None]  # addresses, and the arrays over them

    def over(addresses: tuple[int, ...]) -> list[Any]:
        if last[0] != addresses:
            last[1] = [
                None if shape is None else _array(address, shape, arrays, device)
                for address, shape in zip(addresses, shapes, strict=True)
            ]
            last[0] = addresses
        return last[1]

    if device.kind == "cpu":

        def run(*addresses: int) -> None:
            function(*over(addresses), shape)

        return run, at

    def run_cuda(*addresses: int) -> None:
        with device.context, device.stream:
            if arrays == "cupy":
                function(*over(addresses), shape, **more)
                return
            import torch

            with torch.cuda.stream(torch.cuda.ExternalStream(device.stream_handle)):
                function(*over(addresses), shape, **more)

    return run_cuda, at


def _array(address: int, shape: tuple[int, ...], library: str, device: Any) -> Any:
    size = 4 * int(np.prod(shape))
    if library == "numpy":
        memory = (ctypes.c_char * size).from_address(address)
        return np.frombuffer(memory, np.float32).reshape(shape)
    import cupy

    memory = cupy.cuda.UnownedMemory(address, size, None, device.index)
    array = cupy.ndarray(shape, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
    if library == "cupy":
        return array
    import torch

    return torch.as_tensor(array, device=f"cuda:{device.index}")
