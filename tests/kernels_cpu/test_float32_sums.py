"""The model of what tensor cores lose of float32's sums: its instruction, and what is given back."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import ROOT

from benchmarks import float32_sums as model


def test_parts_hold_all_of_23_bits_and_three_of_four_of_24(rng):
    x = rng.integers(2**22, 2**23, 4000).astype(np.float64) * 2.0**-8
    assert np.array_equal(sum(model.parts(x)), x)
    x = rng.integers(2**23, 2**24, 4000).astype(np.float64) * 2.0**-9
    wrong = sum(model.parts(x)) - x
    assert 0.2 < (wrong != 0).mean() < 0.3
    assert np.abs(wrong).max() == 2.0**-9


def test_scales_bring_the_largest_to_float16s_range(rng):
    x = rng.standard_normal((5, 7)) * np.logspace(-20, 20, 5)[:, None]
    x[3] = 0
    largest = np.abs(x * model.scale_of(x, 1)).max(1)
    assert ((largest >= 2**14) & (largest < 2**15))[[0, 1, 2, 4]].all()


def test_an_instruction_is_exact_for_few_bits_and_cuts_towards_zero(rng):
    a, b = rng.integers(-9, 10, (3, 16)) * 1.0, rng.integers(-9, 10, (16, 4)) * 1.0
    assert np.array_equal(model.instruction(np.ones((3, 4)), a, b), a @ b + 1)
    a, b = rng.standard_normal((3, 16)), rng.standard_normal((16, 4))
    found = model.instruction(np.zeros((3, 4)), a, b)
    assert np.array_equal(model.instruction(np.zeros((3, 4)), -a, b), -found)
    positive = model.instruction(np.zeros((3, 4)), np.abs(a), np.abs(b)) / (np.abs(a) @ np.abs(b))
    assert ((positive <= 1) & (positive > 1 - 2.0**-21)).all()


@pytest.mark.parametrize("channels", [16, 32, 48, 128])
def test_what_is_lost_is_given_back_on_average(rng, channels):
    x = np.maximum(rng.standard_normal((channels, 900)), 0).astype(np.float32).astype(np.float64)
    weight = rng.standard_normal((64, channels)).astype(np.float32).astype(np.float64)
    wanted = weight @ x
    before, after = (
        ((wanted - model.product(weight, x, channels, gives)) * wanted).sum() / (wanted**2).sum()
        for gives in (False, True)
    )
    assert 0.5 < before * 2**24 < 1.1
    assert abs(after) * 2**24 < 0.25


def test_whole_numbers_are_exact(rng):
    x, weight = rng.integers(-9, 10, (144, 30)) * 1.0, rng.integers(-9, 10, (8, 144)) * 1.0
    assert np.array_equal(model.product(weight, x, 48, True), weight @ x)


def test_what_is_given_back_is_what_the_kernel_gives():
    text = (ROOT / "csrc/cuda/sm90/conv2d_nhwc_wgmma.cu").read_text()
    (line,) = re.findall(r"const float lost = (.*?);", text, re.DOTALL)
    found = re.findall(r"channels <= (\d+) *\? ([\d.]+)f", line)
    *known, (_, last) = model.LOST
    assert [(int(most), float(lost)) for most, lost in found] == known
    assert float(re.findall(r": ([\d.]+)f$", line)[0]) == last
