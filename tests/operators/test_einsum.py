"""Einsum is products of matrices, and NumPy's where it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import one_node

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import load
from cnn_engine.graph.reference import reference

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 1}


def arrays_of(equation: str, rng) -> list[np.ndarray]:
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    shapes = [[SIZES[label] for label in term.replace("...", "de")] for term in terms]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def check(equation: str, arrays: list[np.ndarray]):
    """In float64 exactly, and by kernels."""
    proto, inputs = one_node("Einsum", arrays, 12, equation=equation)
    graph = load(proto)
    wide = [array.astype(np.float64) for array in arrays]
    wanted = np.einsum(equation.replace(" ", ""), *wide)
    (found,) = reference(graph, inputs).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run(inputs).values()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    return graph


@pytest.mark.parametrize(
    "equation",
    [
        "abcd,abed->abce", "abcd,abde->abce", "ab,bc->ac", "ab,cb->ca", "ab,bc", "ab , ab -> a",
        "ab,ab->", "a,b->ab", "ab,cd->acbd", "abc,b->ac", "abc,cd->ab", "abc->ca", "abc->b", "ab->",
        "ab,bc,cd->ad", "a,ab,b->", "abc,abd,ace->de", "...a,ab->...b", "a...,...->a...", "ab,c->c",
    ],
)  # fmt: skip
def test_products_are_matrix_products(equation, rng):
    graph = check(equation, arrays_of(equation, rng))
    assert all(node.op.kind != "einsum" for node in graph.nodes)


@pytest.mark.parametrize("equation", ["aa->a", "aa", "aab,b->a"])
def test_diagonals_stay(equation, rng):
    graph = check(equation, arrays_of(equation, rng))
    assert [node.op.kind for node in graph.nodes] == ["einsum"]


def test_a_dimension_of_1_is_repeated(rng):
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 1), (3, 4))]
    check("ab,bc->ac", arrays)


def test_no_terms_of_a_sum():
    graph = check("ab,bc->ac", [np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)])
    assert graph.values[graph.outputs[0]].shape == (2, 3)


def test_integers_are_exact():
    a, b = np.arange(6).reshape(2, 3) + 2**40, np.arange(12).reshape(3, 4)
    proto, inputs = one_node("Einsum", [a, b], 12, equation="ab,bc->ca")
    (found,) = reference(load(proto), inputs).values()
    np.testing.assert_array_equal(found, (a @ b).T)


def test_sizes_that_differ_are_refused(rng):
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (4, 5))]
    with pytest.raises(InputError, match="expected one size for 'b', found 3 and 4"):
        load(one_node("Einsum", arrays, 12, equation="ab,bc->ac")[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_terms(data):
    terms = data.draw(
        st.lists(st.permutations("abcde").map(lambda p: "".join(p[:3])), min_size=1, max_size=3)
    )
    known = sorted(set("".join(terms)))
    out = "".join(data.draw(st.lists(st.sampled_from(known), unique=True, max_size=4)))
    equation = f"{','.join(terms)}->{out}"
    check(equation, arrays_of(equation, np.random.default_rng(0)))
