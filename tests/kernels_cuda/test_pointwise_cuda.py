"""Functions in a row on CUDA: what is written for a region, and what its kernel makes."""

from __future__ import annotations

import re
from itertools import chain
from types import SimpleNamespace

import halves
import numpy as np
import pytest
from conftest import Device
from engines import built
from graphs import Builder
from native import address, dims, strides
from test_pointwise import fused, random_tree, regions, response_norm

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.graph import reference
from cnn_engine.graph.passes.fuse.pointwise import MOST_INPUTS
from cnn_engine.kernels.cuda.pointwise import program_of
from cnn_engine.kernels.user import nvrtc
from cnn_engine.operators.binary import Mul
from cnn_engine.operators.mathematics import Exp, Reciprocal

#: How the inputs and the output lie in memory.
STORED = ["float32", "float16", "bfloat16"]


def compiled_program(region, types: list[str]):
    """Returns the program of a region on the current device; its kernel's own types are ""."""
    kernels = cuda_module.load()
    own = ["" if one == "float32" else one for one in types]
    target = cuda_module.target(0)
    code = nvrtc.compile_program(program_of(region, own), kernels.program_headers, target)
    return kernels.PointwiseProgram(code)


def run(region, arrays: list[np.ndarray], shape, types: list[str], word: int = 0, shift: int = 0):
    """Returns what the kernel makes of ``arrays``; each lies ``shift`` elements past an aligned address."""
    device = Device("cuda")
    program = compiled_program(region, types)
    placed = []
    for array, kind in zip(arrays, types, strict=False):
        flat = np.concatenate([np.zeros(shift), array.ravel()])
        placed.append(halves.put(device, flat, kind)[shift:])
    out = halves.put(device, np.full(shift + int(np.prod(shape)), np.nan), types[-1])[shift:]
    steps = [strides(array, shape) for array in arrays]
    steps += [[0] * 8] * (MOST_INPUTS - len(arrays))
    at = [address(array) for array in placed]
    at += [at[0]] * (MOST_INPUTS - len(at))
    kinds = [halves.kind(kind) for kind in types[:-1]]
    kinds += [kinds[0]] * (MOST_INPUTS - len(kinds))
    cuda_module.load().pointwise_compiled(
        program.address, *at, address(out),
        _cpu.PointwiseShape(*dims(shape), *chain(*steps, strides(np.empty(shape), shape)), len(region.nodes)),
        _cpu.PointwiseStorage(halves.kind(types[-1]), *kinds), _cpu.Overflow(word, 7), 0,
    )  # fmt: skip
    return halves.get(device, out, types[-1]).reshape(shape)


def trees(rng, count: int):
    """Yields regions of random trees, and the arrays that they read."""
    while count:
        graph = fused(random_tree(rng))
        for node in regions(graph):
            values = graph.inputs_of(node)
            arrays = [rng.normal(size=value.shape).astype(np.float32) for value in values]
            yield node.op, arrays, graph.outputs_of(node)[0].shape
            count -= 1
            if not count:
                return


def test_the_program_names_each_function_and_type(rng):
    b = Builder((2, 8, 6, 5))
    (region,) = regions(fused(b.graph(response_norm(b, b.conv("images", 8)))))
    text = program_of(region.op, ["float16", "", "", "", "float16"])
    assert re.findall(r"(\w+)::of", text) == [
        "binary_mul",
        "binary_mul",
        "binary_add",
        "binary_add",
    ]
    assert re.findall(r"read<(\w+)>", text) == ["__half", "float", "float", "float"]
    assert "store_neighbours<width>(static_cast<__half*>" in text
    included = cuda_module_headers()
    assert "cuda/common/pointwise.cuh" in included


def cuda_module_headers():
    try:
        return cuda_module.load().program_headers
    except Exception as error:
        pytest.skip(f"needs an installation with the CUDA kernels: {error}")


@pytest.mark.gpu
def test_random_trees_in_float32_have_the_bits_of_their_functions(rng):
    device = SimpleNamespace(kind="cuda")
    for op, arrays, shape in trees(rng, 12):
        found = run(op, arrays, shape, ["float32"] * (len(arrays) + 1), shift=int(rng.integers(2)))
        made = dict(zip(op.inputs, arrays, strict=True))
        for part in op.nodes:
            made[part.role] = one_function(
                device, part, [made[name] for name in part.inputs], shape
            )
        np.testing.assert_array_equal(found, made[op.outputs[0]])


def one_function(device, part, arrays, shape):
    """Returns what the kernel of one function makes."""
    there = Device("cuda")
    arrays = [np.ascontiguousarray(np.broadcast_to(array, shape)) for array in arrays]
    placed = [there.put(array) for array in arrays]
    out, memory = there.guarded(shape)
    kernels, size = cuda_module.load(), int(np.prod(shape))
    if len(arrays) == 1:
        function = getattr(_cpu.UnaryFunction, part.op.function)
        numbers = float(part.op.alpha), float(part.op.beta)
        kernels.unary(address(placed[0]), address(out), size, function, *numbers, 0)
    else:
        flat = _cpu.BinaryShape(*dims((size,)), *3 * ([0] * 7 + [1]))
        function = getattr(_cpu.BinaryFunction, part.op.function)
        kernels.binary(*map(address, placed), address(out), flat, function, 0)
    there.check_guards(memory)
    return there.get(out)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_random_trees_in_16_bits_are_their_float32_rounded(rng, storage):
    for op, arrays, shape in trees(rng, 12):
        types = [str(rng.choice(["float32", storage])) for _ in (*arrays, None)]
        arrays = [halves.rounded(a, kind) for a, kind in zip(arrays, types, strict=False)]
        wide = run(op, arrays, shape, ["float32"] * len(types))
        found = run(op, arrays, shape, types, shift=int(rng.integers(2)))
        np.testing.assert_array_equal(found, halves.rounded(wide, types[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [7, 64])
def test_a_number_past_float16_and_a_pole_are_reported(rng, inner):
    b = Builder((1, 1, 3, inner))
    large = regions(fused(b.graph(b.add(Mul(), b.add(Exp(), "images"), b.constant((1,))))))[0].op
    b = Builder((1, 1, 3, inner))
    pole = regions(fused(b.graph(b.add(Exp(), b.add(Reciprocal(), "images")))))[0].op
    shape, device = (1, 1, 3, inner), Device("cuda")
    for op, arrays, bad in (
        (large, [np.ones(shape, np.float32), np.float32([1.0])], 12.0),
        (pole, [np.full(shape, -1.0, np.float32)], 0.0),
    ):
        types = ["float16"] * (len(arrays) + 1)
        for value, code in ((1.0, 0), (bad, 7)):
            word = device.put(np.zeros(4, np.int32), np.int32)
            arrays[0][0, 0, 2, inner - 1] = value
            run(op, arrays, shape, types, word=address(word))
            assert device.get(word)[0] == code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_response_norms_run_as_one_kernel(rng, dtype, batch):
    b = Builder((batch, 16, 9, 7))
    x = b.conv("images", 40, 3)
    for _ in range(2):
        x = b.conv(response_norm(b, x), 40, 1)
    graph = b.graph(b.head(x, 10))
    assert len(regions(built(graph, dtype, batch)[0])) == 2
    engine = Engine(graph, device="cuda", dtype=dtype)
    images = rng.normal(size=(batch, 16, 9, 7)).astype(np.float32)
    wanted = reference.reference(graph, {"images": images})
    limit = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    for name, array in engine.run({"images": images}).items():
        assert abs(array - wanted[name]).max() <= limit * abs(wanted[name]).max()
