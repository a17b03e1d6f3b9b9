"""The rule by which an engine chooses the images of a pass and of a chunk, where none is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_engine import NETWORK, engine, pixels

from cnn_engine.plan import schedule
from cnn_engine.plan.schedule import Schedule

CIFAR10 = 3 * 32 * 32
H200 = Schedule("auto", CIFAR10, 0, 16, multiprocessors=132, memory=139 << 30)
CPU = Schedule("resident", CIFAR10, 0, 2)


@pytest.mark.parametrize(
    ("images", "pixels", "batch", "chunk"),
    [
        (1, True, 1, None),
        (100, True, 100, None),
        (1_000, True, 1_000, None),
        (2_639, True, 2_639, None),
        (2_640, True, 2_640, 1_320),  # two chunks: where overlap begins
        (10_000, True, 10_000, 1_320),
        (50_000, True, 50_000, 3_960),  # the best that was measured of the fused kernel
        (50_000, False, 50_000, 1_320),
        (1_000_000, True, 1_000_000, 3_960),
        (100_000_000, True, 256 * 3_960, 3_960),
    ],
)
def test_on_an_h200(images, pixels, batch, chunk):
    assert H200.batch(images, pixels) == batch
    assert H200.overlaps(batch, pixels) == (chunk is not None)
    if chunk is not None:
        assert H200.chunk(batch, pixels) == chunk


@pytest.mark.parametrize(
    ("batch", "chunk"), [(2640, 660), (10_000, 660), (50_000, 3300), (10**6, 7920)]
)
def test_chunks_from_pageable_memory(batch, chunk):
    assert H200.chunk(batch, True, pageable=True) == chunk


@pytest.mark.parametrize("multiprocessors", [1, 30, 46, 82, 108, 132, 148])
@pytest.mark.parametrize("activations", [0, 5_000, 400_000, 1 << 33])
@pytest.mark.parametrize("image_bytes", [28 * 28, CIFAR10, 3 * 224 * 224, 3 * 4096 * 4096])
@pytest.mark.parametrize("as_pixels", [True, False])
def test_what_a_pass_takes_of_a_gpu_does_not_grow_with_the_images(
    multiprocessors, activations, image_bytes, as_pixels
):
    for mode in ("auto", "resident", "stream"):
        rule = Schedule(mode, image_bytes, activations, 16, multiprocessors, memory=24 << 30)
        for images in (1, 7, 1_000, 10_000, 1_000_000, 10**9):
            batch = rule.batch(images, as_pixels)
            assert 1 <= batch <= images
            chunk = rule.chunk(batch, as_pixels)
            moved = min(chunk, batch) if rule.overlaps(batch, as_pixels) else batch
            one = image_bytes * (1 if as_pixels else 4)
            assert moved * one <= schedule.GPU_BYTES or moved == 1
            assert moved * activations <= (24 << 30) // schedule.GPU_PART or moved == 1
            if chunk >= schedule.WAVE * multiprocessors:
                assert chunk % (schedule.WAVE * multiprocessors) == 0


@pytest.mark.parametrize(
    ("images", "batch"), [(0, 1), (1, 1), (178, 178), (179, 90), (256, 128), (1000, 167)]
)
def test_passes_over_images_on_a_gpu_are_about_the_same(images, batch):
    """Of two sizes two plans would be kept, and filled for."""
    rule = replace(H200, activation_bytes=6_000_000)  # room for 178 in a pass
    assert rule.batch_on_device(images) == batch


def test_on_a_cpu():
    assert CPU.batch(1, True) == 1
    assert CPU.batch(10**6, True) == 1024
    assert replace(CPU, threads=128).batch(10**6, True) == 8192
    layered = replace(CPU, activation_bytes=400_000)
    assert layered.batch(10**6, True) == 64
    assert replace(layered, activation_bytes=8 << 20).batch(10**6, True) == 4
    assert replace(layered, activation_bytes=1 << 30).batch(10**6, True) == 4
    assert not CPU.overlaps(10**6, True)


def test_a_named_batch_and_a_named_data_mode_stay_as_they_are(rng):
    with engine() as e:
        assert e.data_mode == "resident"
        assert e.batch_size(3, 10) == 3
        assert e.data_mode_of(10**6) == "resident"
    assert not replace(H200, data_mode="resident").overlaps(10**6, True)
    assert replace(H200, data_mode="stream").overlaps(2, True)
    assert replace(H200, data_mode="transfer").batch(10**6, True) == 100


@pytest.mark.parametrize("variant", ["fused", "pad"])
def test_what_was_chosen_is_told(rng, variant, monkeypatch):
    monkeypatch.setattr(schedule, "CPU_FUSED", 4)
    monkeypatch.setattr(schedule, "CPU_LAYERED", 4)
    monkeypatch.setattr(schedule, "CPU_FUSED_A_THREAD", 1)
    images = pixels(rng, 9)
    with engine(NETWORK, variant=variant) as e:
        result = e.profile(images, iterations=1)
        np.testing.assert_array_equal(e.predict(images), e.predict(images, 9))
    assert result.batch == 4
    assert result.data_mode == "resident"
    assert "batch: 4 of 9 images per pass, by rule, since none was named" in result.notes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pinned", [False, True])
def test_many_images_go_in_chunks_on_a_gpu_and_come_out_the_same(rng, dtype, pinned):
    with engine(device="cuda", dtype=dtype) as e, engine(
        device="cuda", dtype=dtype, data_mode="resident"
    ) as plain:  # fmt: skip
        count = 20_003
        images = e.empty_images(count) if pinned else np.empty((count, CIFAR10), np.uint8)
        images = images.reshape(count, 3, 32, 32)
        images[...] = pixels(rng, count)
        assert e.data_mode_of(count) == "stream"
        wanted = plain.predict(images)
        for _ in range(3):
            np.testing.assert_array_equal(e.predict(images), wanted)
        out = np.empty_like(wanted)
        assert e.predict(images, out=out) is out
        np.testing.assert_array_equal(out, wanted)
        result = e.profile(images, iterations=1, check=False)
    assert result.data_mode == "stream"
    assert result.batch == count


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fused", "tiled"])
def test_a_million_images_take_no_more_of_the_device_than_a_hundred_thousand(variant):
    import cupy

    pool = cupy.get_default_memory_pool()
    images = np.zeros((1_000_000, *NETWORK.input_shape), np.uint8)
    with engine(device="cuda", variant=variant) as e:
        e.predict(images[:100_000])
        before = pool.used_bytes()
        e.predict(images)
        assert pool.used_bytes() <= 3 * before  # both plans are kept; their chunks differ
        assert e._plans.pool.nbytes < 4 << 30
