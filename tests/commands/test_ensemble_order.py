"""The order of samples, whose part of a batch is whose, and random numbers by counter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine.ensemble import augment, order, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with Random123, the authors' own implementation
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers(counter, key, expected):
    def words(text):
        return [int(word, 16) for word in text.split()]

    drawn = philox.philox(np.array([words(counter)] * 3, np.uint32), tuple(words(key)))
    assert [f"{word:08x}" for word in drawn[1]] == expected.split()
    assert (drawn == drawn[0]).all()


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_an_epoch_has_every_sample_once(samples, seed, epoch):
    found = order.permutation(samples, seed, epoch)
    assert sorted(found) == list(range(samples))
    assert (found == order.permutation.__wrapped__(samples, seed, epoch)).all()


def test_epochs_and_seeds_differ():
    first = order.permutation(1000, 0, 0)
    assert (first != order.permutation(1000, 0, 1)).sum() > 900
    assert (first != order.permutation(1000, 1, 0)).sum() > 900


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 64))
def test_parts_cover_a_length_evenly(length, parts):
    ranges = order.split(length, parts)
    assert len(ranges) == parts
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == length
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 70), st.integers(1, 3), st.booleans(),
    st.one_of(st.none(), st.integers(1, 20)), st.integers(0, 20), st.integers(1, 8),
)  # fmt: skip
def test_batches_cover_an_epoch_in_order(samples, batch, epochs, shuffle, steps, start, parts):
    run = order.Order(samples, batch, epochs, shuffle, 7, steps, start)
    batches = [run[number] for number in run.numbers]
    assert len(batches) == len(run)
    assert run.images == sum(map(len, batches))
    for one in batches:
        slices = [one.part(index, parts).samples for index in range(parts)]
        assert (np.concatenate(slices) == one.samples).all()
    if start == 0 and steps is None:
        for epoch in range(epochs):
            seen = np.concatenate([one.samples for one in batches if one.epoch == epoch])
            assert sorted(seen) == list(range(samples))
            assert shuffle or (seen == np.arange(samples)).all()


def test_a_number_beyond_the_end_is_refused():
    with pytest.raises(IndexError):
        order.Order(10, 5)[2]


@settings(deadline=None)
@given(st.sampled_from(augment.KINDS), st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 9))
def test_an_image_is_augmented_the_same_in_any_company(kind, seed, height, width):
    images = np.random.default_rng(0).integers(0, 256, (12, 3, height, width), np.uint8)
    whole = order.Order(12, 12, shuffle=True)[0]
    parts = order.Order(12, 5, shuffle=True)
    together = augment.augmented(images[whole.samples], whole, kind, seed)
    apart = [
        augment.augmented(images[parts[k].samples], parts[k], kind, seed) for k in parts.numbers
    ]
    assert (together == np.concatenate(apart)).all()
    assert together.dtype == np.uint8


def test_fast_mirrors_about_half_of_the_images_and_nothing_else():
    images = np.random.default_rng(1).integers(0, 256, (1000, 3, 4, 4), np.uint8)
    batch = order.Order(1000, 1000)[0]
    found = augment.augmented(images, batch, "fast", 3)
    same = (found == images).all(axis=(1, 2, 3))
    mirrored = (found == images[..., ::-1]).all(axis=(1, 2, 3))
    assert (same | mirrored).all()
    assert 400 < mirrored.sum() < 600


def test_full_shifts_with_the_border_reflected():
    rows, columns = augment.positions(order.Order(2000, 2000)[0], (3, 32, 32), "full", 0)
    assert rows.min() == columns.min() == 0
    assert rows.max() == columns.max() == 31
    # Where row 16 comes from tells the shift: each of five, about equally often.
    counts = np.bincount(rows[:, 16] - 14, minlength=5)
    assert len(counts) == 5
    assert counts.min() > 300
    assert (np.abs(np.diff(rows, axis=1)) <= 1).all()


def test_tensors_are_augmented_as_arrays_are():
    torch = pytest.importorskip("torch")
    images = np.random.default_rng(2).integers(0, 256, (9, 3, 32, 32), np.uint8)
    batch = order.Order(9, 9, shuffle=True)[0]
    expected = augment.augmented(images, batch, "full", 5)
    assert (augment.augmented(torch.from_numpy(images), batch, "full", 5).numpy() == expected).all()
