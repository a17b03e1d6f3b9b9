"""Weights of large files stay in the file: the same graphs, and the same errors, as when all is read."""

from __future__ import annotations

import mmap
import os
import pickle

import numpy as np
import onnx_models
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from cnn_engine import Engine, InputError, load
from cnn_engine.graph import mapped
from cnn_engine.graph.onnx import weights


@pytest.fixture
def small(monkeypatch):
    """Has files and tensors of any size count as large."""
    monkeypatch.setattr(weights, "LARGE_FILE", 1)
    monkeypatch.setattr(weights, "LARGE_TENSOR", 1)


def model():
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["images", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Flatten", ["y"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "fc"], ["z"], "fc", transB=1),
    ]
    constants = {
        "w": rng.standard_normal((5, 3, 3, 3)).astype(np.float32),
        "b": rng.standard_normal(5).astype(np.float32),
        "fc": rng.standard_normal((4, 5 * 6 * 6)).astype(np.float32),
    }
    inputs = [onnx_models.tensor("images", ("batch", 3, 6, 6))]
    outputs = [helper.make_empty_tensor_value_info("z")]
    return onnx_models.model(nodes, inputs, outputs, constants)


def origin(array):
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


def shrunk(path) -> None:
    os.truncate(path, 600)


def rewritten(path) -> None:
    with path.open("r+b") as file:
        file.seek(600)
        file.write(bytes(64))


def grown(path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.fixture
def written(small, tmp_path):
    """A file that was last written long ago: clocks of files may be coarse."""
    path = tmp_path / "net.onnx"
    path.write_bytes(model().SerializeToString())
    os.utime(path, (1e9, 1e9))
    return path


CHANGED = r"net\.onnx: expected the file as it was when it was loaded, found it changed since; load it again"


@pytest.mark.parametrize("change", [shrunk, rewritten, grown])
def test_a_file_that_has_changed_is_refused_before_it_is_read(written, rng, change):
    graph, images = load(written), rng.standard_normal((2, 3, 6, 6)).astype(np.float32)
    with Engine(graph, device="cpu", threads=1) as engine:
        wanted = engine.predict(images)
        change(written)
        np.testing.assert_array_equal(engine.predict(images), wanted)  # by what is packed
        for read in (
            lambda: engine.predict(images[:1]),
            lambda: engine.check(images),
            lambda: pickle.dumps(engine),
            lambda: Engine(graph, device="cpu"),
            lambda: pickle.dumps(graph),
        ):
            with pytest.raises(InputError, match=CHANGED):
                read()


def test_to_shrink_while_it_is_read_ends_no_process(written):
    graph = load(written)
    array = graph.constants["fc"]
    np.testing.assert_array_equal(mapped.read(array[1:3]), array[1:3])
    np.testing.assert_array_equal(mapped.read(array.T), array.T)
    os.truncate(written, 0)
    with pytest.raises(InputError, match=CHANGED):
        mapped.read(array)


def test_a_file_that_another_is_renamed_over_is_read_as_it_was(written, rng):
    images = rng.standard_normal((3, 3, 6, 6)).astype(np.float32)
    with Engine(written.read_bytes(), device="cpu", threads=1) as engine:
        wanted = engine.predict(images)
    graph = load(written)
    other = written.with_name("other.onnx")
    other.write_bytes(b"another network")
    other.replace(written)
    with Engine(graph, device="cpu", threads=1) as engine:
        for count in (1, 3):
            tolerances.assert_close(
                engine.predict(images[:count]), wanted[:count], tolerances.PROBABILITY
            )


def test_a_file_s_arrays_share_a_descriptor(written):
    constants = load(written).constants
    assert len({id(mapped._map_of(array).file) for array in constants.values()}) == 1


def test_weights_are_the_file_s_own_bytes(small, tmp_path, rng):
    path = tmp_path / "net.onnx"
    path.write_bytes(model().SerializeToString())
    found, wanted = load(path), load(path.read_bytes())
    assert found.constants.keys() == wanted.constants.keys()
    for name, array in wanted.constants.items():
        assert isinstance(origin(found.constants[name]), mmap.mmap), name
        weights.release(found.constants[name])
        np.testing.assert_array_equal(found.constants[name], array)
    images = rng.standard_normal((3, 3, 6, 6)).astype(np.float32)
    with Engine(path, device="cpu") as mapped, Engine(path.read_bytes(), device="cpu") as read:
        np.testing.assert_array_equal(mapped.predict(images), read.predict(images))
        assert mapped.check(images).passed


def test_files_elsewhere_are_read_whole(small, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "net.onnx").write_bytes(model().SerializeToString())
    link = tmp_path / "link.onnx"
    link.symlink_to(folder / "net.onnx")
    found = load(link)
    assert not any(isinstance(origin(array), mmap.mmap) for array in found.constants.values())


def test_small_files_are_read_whole(tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(model().SerializeToString())
    assert weights.without_weights(path) is None


WHOLE = model().SerializeToString()


@given(
    cut=st.integers(0, len(WHOLE)),
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_broken_files_are_what_they_are_when_read_whole(tmp_path_factory, cut, changes):
    data = bytearray(WHOLE)
    for place, byte in changes:
        data[place] = byte
    data = bytes(data[:cut] if not changes else data)
    path = tmp_path_factory.mktemp("broken") / "net.onnx"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "LARGE_FILE", 1)
        patch.setattr(weights, "LARGE_TENSOR", 1)
        found = outcome(path)
    wanted = outcome(path)
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)


def outcome(path):
    """Returns a model's constants, or that it is refused."""
    try:
        return dict(load(path).constants)
    except InputError:
        return None
