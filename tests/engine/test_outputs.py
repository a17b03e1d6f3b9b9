"""Outputs of any rank and number, and inputs of any: by ``predict``, and by name by ``run``."""

from __future__ import annotations

import pickle

import fake_cuda
import numpy as np
import onnx
import pytest
import tolerances
from onnx import TensorProto, helper
from onnx_models import model, tensor

from cnn_engine import Engine, InputError, UnsupportedError
from cnn_engine.engine.outputs import Outputs
from cnn_engine.graph import reference


def detector(batch: int | str = "batch") -> onnx.ModelProto:
    """Boxes [N, 36, 4], a head whose name is no identifier, a mask, and a sum over all images."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, (4, 3, 3, 3)).astype(np.float32) for name in ("w", "v")}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["/head/0"], pads=[1] * 4),
        helper.make_node("Conv", ["x", "v"], ["features"], pads=[1] * 4),
        helper.make_node("Relu", ["features"], ["/head/1"]),
        helper.make_node("Reshape", ["/head/1", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["boxes"], perm=[0, 2, 1]),
        helper.make_node("ArgMax", ["/head/0"], ["mask"], axis=1, keepdims=0),
        helper.make_node("ReduceSum", ["boxes", "axes"], ["total"], keepdims=0),
    ]
    constants = {**weights, "shape": np.array([0, 4, 36]), "axes": np.array([0, 1])}
    outputs = [
        tensor("boxes", [batch, 36, 4]), tensor("/head/0", [batch, 4, 6, 6]),
        tensor("mask", [batch, 6, 6], TensorProto.INT64), tensor("total", [4]),
    ]  # fmt: skip
    return model(nodes, [tensor("x", [batch, 3, 6, 6])], outputs, constants)


def without_total(batch: int | str = "batch") -> onnx.ModelProto:
    made = detector(batch)
    del made.graph.output[3], made.graph.node[6]
    return made


def wanted_of(engine: Engine, images: np.ndarray) -> dict[str, np.ndarray]:
    return reference.reference(engine.network.graph(len(images)), {"x": images})


def assert_are(found, wanted) -> None:
    for name, exact in wanted.items():
        assert found[name].shape == exact.shape
        tolerances.assert_close(found[name], exact, 1e-5 * max(np.abs(exact).max(), 1))


@pytest.fixture
def images(rng):
    return rng.standard_normal((7, 3, 6, 6)).astype(np.float32)


def test_several_outputs_are_a_sequence_by_place_and_by_exact_name(images):
    with Engine(without_total(), device="cpu", threads=1) as e:
        wanted = wanted_of(e, images)
        for batch in (None, 1, 3, 7):
            found = e.predict(images, batch)
            assert found.names == ("boxes", "/head/0", "mask")
            assert_are(found, wanted)
            boxes, head, _ = found
            assert boxes is found[0] is found["boxes"]
            assert head is found["/head/0"] is found[1:][0]
            assert found["mask"].dtype == np.int64
        with pytest.raises(KeyError, match="expected one of boxes, /head/0, mask, found 'head/0'"):
            found["head/0"]
        again = pickle.loads(pickle.dumps(found))
        assert type(again) is Outputs
        assert again.names == found.names
        np.testing.assert_array_equal(again["boxes"], boxes)
        assert [a.shape[0] for a in e.predict(images[:0])] == [0, 0, 0]


@pytest.mark.parametrize("output", ["boxes", "/head/0"])
def test_one_output_is_its_array_of_any_rank(images, output):
    made = without_total()
    kept = [value for value in made.graph.output if value.name == output]
    del made.graph.output[:]
    made.graph.output.extend(kept)
    with Engine(made, device="cpu", threads=1) as e:
        wanted = wanted_of(e, images)[output]
        for _ in range(2):  # the second is a call like the last one
            found = e.predict(images)
            assert found.shape == wanted.shape
            tolerances.assert_close(found, wanted, 1e-5 * np.abs(wanted).max())
        out = np.empty_like(found)
        for _ in range(2):
            out[...] = np.nan
            assert e.predict(images, out=out) is out
            np.testing.assert_array_equal(out, found)
        with pytest.raises(InputError, match="out: expected shape"):
            e.predict(images, out=np.empty((7, 5), np.float32))


def test_what_images_share_takes_them_in_one_pass(images):
    with Engine(detector(), device="cpu", threads=1) as e:
        assert_are(e.predict(images), wanted_of(e, images))
        assert_are(e.predict(images[:1], batch=4), wanted_of(e, images[:1]))
        with pytest.raises(
            InputError, match="batch: expected 7, for an output .* no row per image"
        ):
            e.predict(images, batch=3)


def test_a_fixed_batch_takes_several_such_passes(images):
    with Engine(without_total(1), device="cpu", threads=1) as e:
        found = e.predict(images)
        for index in range(7):
            assert_are({n: a[index : index + 1] for n, a in found.to_dict().items()},
                       wanted_of(e, images[index : index + 1]))  # fmt: skip


def test_out_is_a_mapping_or_a_sequence_of_all(images):
    with Engine(without_total(), device="cpu", threads=1) as e:
        found = e.predict(images)
        rooms = {name: np.empty_like(array) for name, array in found.to_dict().items()}
        assert e.predict(images, out=rooms) is rooms
        assert e.predict(images, 2, out=tuple(rooms.values())) == tuple(rooms.values())
        for name, room in rooms.items():
            np.testing.assert_array_equal(room, found[name])
        for bad, message in (
            ({"boxes": rooms["boxes"]}, "out: expected boxes, /head/0, mask, found boxes"),
            ([rooms["boxes"]], "out: expected a mapping or a sequence of 3 arrays, found list"),
            (rooms["boxes"], "out: expected a mapping or a sequence of 3 arrays, found ndarray"),
            ({**rooms, "mask": rooms["mask"].astype(np.int32)}, "out: mask: expected int64"),
            ({**rooms, "/head/0": rooms["boxes"].reshape(7, 4, 6, 6)}, "out: /head/0: .* an overlap"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=message):
                e.predict(images, out=bad)


@pytest.mark.parametrize("place", [("cpu", "resident"), ("cuda", "resident"), ("cuda", "managed")])
def test_outputs_by_name(monkeypatch, images, place):
    fake_cuda.install(monkeypatch)
    device, mode = place
    with Engine(detector(), device=device, data_mode=mode, threads=1) as e:
        wanted = wanted_of(e, images)
        for names in (["total"], ["mask", "boxes"], None, ["total", "mask", "/head/0", "boxes"]):
            for _ in range(2):
                found = e.run({"x": images}, outputs=names)
                assert list(found) == list(names or wanted)
                assert_are(found, {name: wanted[name] for name in found})
        room = np.full((7, 36, 4), np.nan, np.float32)
        found = e.run({"x": images}, outputs=["boxes", "total"], out={"boxes": room})
        assert found["boxes"] is room
        assert_are(found, {name: wanted[name] for name in found})
        for more, message in (
            ({"outputs": ["box"]}, "outputs: expected names of boxes, /head/0, mask, total, found 'box'"),
            ({"outputs": "boxes"}, "outputs: expected a list of names, found 'boxes'"),
            ({"outputs": ["mask", "mask"]}, "outputs: expected each name once"),
            ({"outputs": ["mask"], "out": {"boxes": room}}, "out: expected names of outputs"),
            ({"out": [room]}, "out: expected a mapping from names to arrays, found list"),
            ({"out": {"boxes": room[:3]}}, "out: boxes: expected shape"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=message):
                e.run({"x": images}, **more)


def test_inputs_of_other_ranks_and_types():
    """Token ids of a table, a mask of bool and a setting of no batch."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"]),
        helper.make_node("Where", ["wide", "rows", "zero"], ["kept"]),
        helper.make_node("Mul", ["kept", "scale"], ["y"]),
    ]
    table = np.arange(30, dtype=np.float32).reshape(10, 3)
    inputs = [
        tensor("ids", ["batch", 5], TensorProto.INT64), tensor("mask", ["batch", 5], TensorProto.BOOL),
        tensor("scale", []),
    ]  # fmt: skip
    constants = {"table": table, "last": np.array([2]), "zero": np.float32(0)}
    made = model(nodes, inputs, [tensor("y", ["batch", 5, 3])], constants)
    ids, mask = np.arange(10).reshape(2, 5), np.arange(10).reshape(2, 5) % 3 == 0
    with Engine(made, device="cpu", threads=1) as e:
        (found,) = e.run({"ids": ids, "mask": mask, "scale": np.float32(2)}).values()
        np.testing.assert_array_equal(found, table[ids] * mask[..., None] * 2)
        with pytest.raises(UnsupportedError, match=r"found 3 \(ids, mask, scale\); Engine.run"):
            e.predict(ids)
        with pytest.raises(InputError, match=r"inputs: mask: expected shape \[2, 5\]"):
            e.run({"ids": ids, "mask": mask[:1], "scale": np.float32(2)})


@pytest.mark.parametrize("shape", [("batch", 40), ("batch", 8, 8, 3), (1, 40)])
def test_predict_takes_audio_and_channels_last(rng, shape):
    made = model(
        [helper.make_node("Sigmoid", ["x"], ["y"])], [tensor("x", shape)], [tensor("y", shape)]
    )
    count = 3 if shape[0] == "batch" else 2
    x = rng.standard_normal((count, *shape[1:])).astype(np.float32)
    with Engine(made, device="cpu", threads=1) as e:
        tolerances.assert_close(e.predict(x), 1 / (1 + np.exp(-x.astype(np.float64))), 1e-6)
        with pytest.raises(InputError, match=r"expected shape \[N, "):
            e.predict(np.ascontiguousarray(x[..., 1:]))


def test_a_network_of_pixels_takes_what_they_become_too(rng):
    with Engine("cifar10", device="cpu", threads=1) as e:
        x = rng.standard_normal((3, 3, 32, 32)).astype(np.float32)
        (found,) = e.run({"images": x}).values()
        np.testing.assert_array_equal(found, e.predict(x))
