"""Shared memory that its owner cuts while a server reads it: an error, and the process lives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from cnn_engine._cpu import FileMapping

import cnn_engine

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "region"
    path.write_bytes(bytes(range(256)) * (3 * PAGE // 256))
    with open(path, "r+b") as opened:
        yield opened


def test_a_cut_mapping_has_zeros_and_says_so(file):
    wanted = np.fromfile(file.name, np.uint8)
    whole, part = FileMapping(file.fileno(), 0, 3 * PAGE), FileMapping(file.fileno(), 100, PAGE)
    found = np.frombuffer(whole, np.uint8)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.frombuffer(part, np.uint8), wanted[100 : 100 + PAGE])
    assert not found.flags.writeable
    os.truncate(file.name, PAGE)
    assert not whole.was_cut  # nothing has been read of what is gone
    np.testing.assert_array_equal(found[:PAGE], wanted[:PAGE])
    assert not found[PAGE:].any()
    assert whole.was_cut
    assert not part.was_cut
    assert int(np.frombuffer(part, np.uint8)[-1]) == 0
    assert part.was_cut
    os.truncate(file.name, 3 * PAGE)
    assert not FileMapping(file.fileno(), 0, 3 * PAGE).was_cut


def test_mappings_are_given_back(file):
    for _ in range(5000):  # more than there may be at once
        FileMapping(file.fileno(), 0, PAGE)
    with pytest.raises((OSError, RuntimeError)):
        FileMapping(10_000, 0, PAGE)


def test_any_other_bus_error_ends_the_process_as_before(file):
    code = """
import mmap, os, sys
from cnn_engine._cpu import FileMapping
file = open(sys.argv[1], "r+b")
guarded = FileMapping(file.fileno(), 0, 4096)
plain = mmap.mmap(file.fileno(), 0)
os.truncate(sys.argv[1], 0)
print(memoryview(guarded)[0], flush=True)
plain[0]
"""
    done = subprocess.run([sys.executable, "-c", code, file.name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "0\n"), done.stderr


def test_a_region_cut_during_a_pass_is_refused():
    pytest.importorskip("starlette")
    pytest.importorskip("orjson")
    from cnn_engine.serve import http, protocol
    from cnn_engine.serve.errors import Refused
    from cnn_engine.serve.replicas import Settings
    from cnn_engine.serve.repository import Repository
    from cnn_engine.serve.shared_memory import FOLDER, Regions

    models, regions = Repository(["cifar10"], Settings(threads=1)), Regions(True)
    models.load("cifar10")
    model = models.get("cifar10", "")
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)
    key = f"cnn-engine-cut-{os.getpid()}"
    path = os.path.join(FOLDER, key)
    part = protocol.SharedPart("r", 0, images.nbytes)

    def asked():
        request = protocol.Request({})
        data = protocol.shared_bytes(request, part, regions, model.reads_in_place)
        request.inputs["images"] = protocol.from_bytes("images", images.dtype, images.shape, data)
        return request

    def answer(request):
        return asyncio.run(http.infer(http.Served(models, regions), model, request))[1]

    try:
        images.tofile(path)
        regions.register("r", key, 0, images.nbytes)
        request = asked()
        assert request.mapped  # what this test is of
        (found,) = answer(request)
        with cnn_engine.Engine("cifar10", device="cpu", threads=1) as engine:
            np.testing.assert_array_equal(found.array, engine.predict(images))
        request = asked()
        os.truncate(path, 0)
        with pytest.raises(Refused, match="it was cut"):
            answer(request)
        with pytest.raises(Refused, match="it was cut"):
            asked()
        images.tofile(path)
        np.testing.assert_array_equal(answer(asked())[0].array, found.array)
    finally:
        os.unlink(path)
        regions.unregister()
        models.close()
