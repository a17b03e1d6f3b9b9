from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, _cpu, ops
from cnn_engine.operators.conv_transpose2d import ConvTranspose2d

# n, c, h, w, k, r, s, stride, (above, left, below, right), output padding, dilation, groups
CASES = [
    (1, 1, 1, 1, 1, 1, 1, (1, 1), (0, 0, 0, 0), (0, 0), (1, 1), 1),
    (2, 3, 5, 7, 4, 3, 3, (1, 1), (1, 1, 1, 1), (0, 0), (1, 1), 1),
    (1, 4, 8, 8, 6, 2, 2, (2, 2), (0, 0, 0, 0), (0, 0), (1, 1), 1),
    (3, 6, 4, 5, 9, 4, 3, (2, 3), (1, 0, 2, 1), (1, 2), (1, 1), 3),
    (1, 4, 6, 6, 4, 3, 3, (2, 2), (1, 1, 1, 1), (1, 1), (2, 1), 4),
    (0, 2, 3, 3, 2, 3, 3, (1, 1), (0, 0, 0, 0), (0, 0), (1, 1), 1),
    (1, 2, 1, 9, 3, 1, 4, (1, 3), (0, 2, 0, 0), (0, 1), (1, 2), 1),
    (1, 2, 3, 3, 2, 5, 5, (3, 3), (4, 4, 4, 4), (0, 0), (1, 1), 2),
    (1, 2, 3, 3, 2, 2, 2, (4, 4), (0, 1, 0, 1), (3, 3), (1, 1), 1),
    (2, 17, 12, 9, 33, 3, 3, (2, 1), (0, 1, 1, 0), (0, 0), (1, 1), 1),
]


def check(device, rng, case, bias=True, threads=None):
    n, c, h, w, k, r, s, stride, padding, added, dilation, groups = case
    record = ConvTranspose2d(stride, padding, added, dilation, groups)
    x = rng.standard_normal((n, c, h, w)).astype(np.float32)
    weight = rng.standard_normal((c, k // groups, r, s)).astype(np.float32)
    b = rng.standard_normal(k).astype(np.float32) if bias else None
    wanted = record.reference(x, weight, b)
    magnitude = record.reference(np.abs(x), np.abs(weight), None if b is None else np.abs(b))
    out, memory = device.guarded(wanted.shape)
    arguments = [device.put(x), device.put(weight), None if b is None else device.put(b)]
    options = {"stride": stride, "padding": padding, "output_padding": added, "dilation": dilation}
    found = ops.conv_transpose2d(*arguments, **options, groups=groups, out=out, threads=threads)
    assert found is out
    device.check_guards(memory)
    bound = tolerances.sum_of_products(c // groups * r * s + 1, magnitude)
    tolerances.assert_close(device.get(out), wanted, bound, case=case, bias=bias)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(device, rng, case):
    check(device, rng, case)
    check(device, rng, case, bias=False)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 2), c=st.integers(1, 4), h=st.integers(1, 8), w=st.integers(1, 8),
    k=st.integers(1, 4), r=st.integers(1, 4), s=st.integers(1, 4),
    stride=st.tuples(*[st.integers(1, 3)] * 2), padding=st.tuples(*[st.integers(-1, 2)] * 4),
    added=st.tuples(*[st.integers(0, 2)] * 2), dilation=st.tuples(*[st.integers(1, 2)] * 2),
    groups=st.integers(1, 3), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(n, c, h, w, k, r, s, stride, padding, added, dilation, groups, seed):
    from conftest import Device

    case = (n, c * groups, h, w, k * groups, r, s, stride, padding, added, dilation, groups)
    rng = np.random.default_rng(seed)
    rows = (h - 1) * stride[0] + dilation[0] * (r - 1) + 1 + added[0] - padding[0] - padding[2]
    columns = (w - 1) * stride[1] + dilation[1] * (s - 1) + 1 + added[1] - padding[1] - padding[3]
    if min(rows, columns) < 1:
        with pytest.raises(InputError, match="expected an output|output height|output width"):
            check(Device("cpu"), rng, case)
    else:
        check(Device("cpu"), rng, case, threads=3)


@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_on_every_instruction_set(rng, isa):
    from conftest import Device

    selected = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(isa)
    try:
        for case in CASES:
            check(Device("cpu"), rng, case)
    finally:
        _cpu.select_instruction_set(selected)


def test_errors():
    x, weight = np.zeros((1, 4, 3, 3), np.float32), np.zeros((4, 2, 3, 3), np.float32)
    with pytest.raises(InputError, match="weight: expected 4 channels in 1 groups, found 3"):
        ops.conv_transpose2d(x, weight[:3])
    with pytest.raises(InputError, match="groups: expected a whole number from 1, found 0"):
        ops.conv_transpose2d(x, weight, groups=0)
    with pytest.raises(InputError, match="output height: expected 1 to"):
        ops.conv_transpose2d(x, weight, padding=3)
    with pytest.raises(InputError, match="stride width: expected 1 to"):
        ops.conv_transpose2d(x, weight, stride=(1, 0))
    with pytest.raises(InputError, match=r"bias: expected shape \[2\], found \[3\]"):
        ops.conv_transpose2d(x, weight, np.zeros(3, np.float32))
