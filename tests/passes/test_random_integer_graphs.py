"""Random quantized networks: the same integers by every instruction set, batch and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
from integer_graphs import Generator, exact
from onnx_models import onnxruntime_outputs

from cnn_engine import Engine, _cpu
from cnn_engine.graph import passes
from cnn_engine.graph.model import Model
from cnn_engine.graph.onnx import load
from cnn_engine.graph.reference import reference

BATCH = 3


@pytest.fixture
def select():
    before = _cpu.selected_integer_instructions()
    yield _cpu.select_integer_instructions
    _cpu.select_integer_instructions(before)


def generated(seed: int, dyadic: bool = False):
    """Returns (file, its input, the graph as imported, the lowered one)."""
    generator = Generator(seed, dyadic=dyadic)
    proto, x = generator.network(1 + seed % 6), generator.input(BATCH)
    base, refused = Model(load(proto, batch=BATCH)).base, []
    lowered = passes.lower_qdq(base, refused)
    assert not refused
    assert not [
        name for name, value in lowered.values.items()
        if value.dtype == "float32" and name not in lowered.constants
    ]  # fmt: skip
    return proto, {"x": x}, base, lowered


@pytest.mark.parametrize("seed", [5, 36, 51, 74, 99, 107])
def test_integers_are_those_of_exact_arithmetic(select, seed):
    proto, given, _, lowered = generated(seed)
    wanted = reference(lowered, given, exact)
    for instructions in _cpu.integer_instructions():
        select(instructions)
        for threads, batch in ((1, BATCH), (3, 1)):
            engine = Engine(proto, device="cpu", threads=threads)
            found = engine.run({"x": given["x"][:batch]})
            for name, array in wanted.items():
                assert found[name].dtype == array.dtype
                assert np.array_equal(found[name], array[:batch]), (instructions, threads, name)
    names = [value.name for value in proto.graph.output]
    for name, other in zip(names, onnxruntime_outputs(proto, given, optimized=False), strict=True):
        apart = np.abs(other.astype(int) - wanted[name])
        assert apart.max() <= 1
        assert (apart > 0).mean() <= 0.02


@pytest.mark.parametrize("seed", [4, 40, 176, 244])
def test_lowering_changes_nothing_where_float_arithmetic_is_exact(seed):
    """Scales are powers of 2: every tie is one in the file's arithmetic, too."""
    _, given, base, lowered = generated(seed, dyadic=True)
    wanted = reference(base, given)
    for name, found in reference(lowered, given, exact).items():
        assert np.array_equal(found, wanted[name]), name
