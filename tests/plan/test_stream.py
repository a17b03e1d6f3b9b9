"""The data mode stream without a GPU: what its steps move, on a device that copies at once."""

from __future__ import annotations

import copy
import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from cnn_engine import _cpu
from cnn_engine.plan import stream
from cnn_engine.plan.plan import Plan, Slot, Step

IMAGE_BYTES, CLASSES = 3 * 32 * 32, 10


class Device:
    """Memory of the host in a device's place; ``free`` bytes of it."""

    name, free, context = "cuda:0", 1 << 40, nullcontext()

    def lane(self):
        return copy.copy(self)

    def is_current(self):
        return True

    def free_memory(self):
        return self.free

    def allocate(self, nbytes):
        array = np.zeros(nbytes, np.uint8)
        return SimpleNamespace(address=_cpu.address_of(array), nbytes=nbytes, array=array)

    def empty_pinned(self, shape, dtype):
        return np.empty(shape, dtype)

    def queue_copy(self, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)

    def synchronize(self):
        pass


def first_bytes(images, rows, count):
    """In the network's place: row i is the first bytes of image i."""
    source = np.ctypeslib.as_array((ctypes.c_uint8 * (count * IMAGE_BYTES)).from_address(images))
    to = np.ctypeslib.as_array((ctypes.c_float * (count * CLASSES)).from_address(rows))
    to.reshape(count, CLASSES)[:] = source.reshape(count, IMAGE_BYTES)[:, :CLASSES]


def plan_of(monkeypatch, batch, chunk, pinned=(False, False)):
    def graph_of(count, pixels):
        images = SimpleNamespace(name="images", nbytes=count * IMAGE_BYTES)
        rows = SimpleNamespace(nbytes=count * CLASSES * 4)
        return SimpleNamespace(
            inputs=[images], outputs=["probabilities"], values={"probabilities": rows}
        )

    def build(program, count, pixels, images_on_device):
        slots = [Slot("images"), Slot("probabilities"), count]
        return Plan(count, [Step("net", "fused", "cuda", first_bytes, slots)], {}, [])

    monkeypatch.setattr(stream, "build", build)
    program = SimpleNamespace(
        placement=SimpleNamespace(device=Device(), threads=2), graph_of=graph_of, replays=True
    )
    program.on = lambda device: program
    return stream.build_stream(program, batch, True, chunk, pinned)


@pytest.mark.parametrize("pinned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("past_caches", [0, 1 << 40])
@pytest.mark.parametrize("batch", [1, 64, 130, 1001])
def test_every_image_goes_in_and_every_row_comes_out(monkeypatch, rng, batch, past_caches, pinned):
    monkeypatch.setattr(stream, "PAST_CACHES_BYTES", past_caches)
    plan = plan_of(monkeypatch, batch, 64, pinned)
    for _ in range(2):
        images = rng.integers(0, 256, (batch, IMAGE_BYTES), np.uint8)
        rows = np.full((batch, CLASSES), -1, np.float32)
        plan.bind(_cpu.address_of(images), _cpu.address_of(rows))
        plan.run()
        np.testing.assert_array_equal(rows, images[:, :CLASSES])


@pytest.mark.parametrize(
    ("chunk", "function"), [(660, _cpu.stage), (3071, _cpu.stage), (3072, _cpu.copy)]
)
def test_small_chunks_are_staged_past_the_caches(monkeypatch, chunk, function):
    plan = plan_of(monkeypatch, 3 * chunk + 7, chunk)
    staged = {step.name: set() for step in plan.steps if step.direction == "h2h"}
    for step in plan.steps:
        if step.direction == "h2h":
            staged[step.name].add(step.function)
    assert staged == {"images": {function}, "probabilities": {_cpu.copy}}
