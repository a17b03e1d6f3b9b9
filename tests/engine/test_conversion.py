"""What predict and run take beside arrays of the network's own types, and what an engine logs."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx_models
import pytest
from image_files import picture
from onnx import TensorProto, helper

from cnn_engine import Engine, InputError
from cnn_engine.io.model_metadata import entries
from cnn_engine.io.preprocess import Preprocess


@pytest.fixture(scope="module")
def cifar10():
    return Engine("cifar10", weights="random", device="cpu", threads=1)


def test_lists_and_other_number_types_give_what_arrays_give(cifar10):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), np.uint8)
    wanted = cifar10.predict(pixels)
    for given in (pixels.tolist(), list(pixels), pixels.astype(np.int64), pixels.astype(">u2")):
        assert cifar10.predict(given).tobytes() == wanted.tobytes()
    for _ in range(2):  # the second call finds what the first remembered
        assert cifar10.predict(pixels.astype(np.int16)[:, :, :, ::-1][:, :, :, ::-1]).tobytes() == (
            wanted.tobytes()
        )
    floats = np.random.default_rng(1).standard_normal((2, 3, 32, 32))
    wanted = cifar10.predict(floats.astype(np.float32))
    for given in (floats, floats.tolist(), np.asfortranarray(floats), floats.astype(np.longdouble)):
        assert cifar10.predict(given).tobytes() == wanted.tobytes()
    halves = floats.astype(np.float16)
    assert cifar10.predict(halves).tobytes() == cifar10.predict(halves.astype(np.float32)).tobytes()
    nothing = cifar10.predict(np.zeros((0, 3, 32, 32)))
    assert nothing.shape == (0, 10)


@pytest.mark.parametrize("given", ["photo.jpg", Path("photo.jpg"), ["photo.jpg", "other.jpg"]])
def test_paths_belong_to_a_classifier(cifar10, given):
    with pytest.raises(InputError, match=r"^images: .*Classifier takes paths.*found 'photo\.jpg'"):
        cifar10.predict(given)


def test_nan_and_infinity_stay_what_they_are(cifar10):
    floats = np.zeros((1, 3, 32, 32))
    floats[0, 0, 3, 3] = np.nan
    assert np.isnan(cifar10.predict(floats)).all()


def test_pillows_images_are_prepared_as_the_models_file_says(cifar10):
    photos = [picture(32, 32, seed) for seed in range(3)]
    pixels = np.stack([np.asarray(photo).transpose(2, 0, 1) for photo in photos]).copy()
    assert cifar10.predict(photos).tobytes() == cifar10.predict(pixels).tobytes()
    assert cifar10.predict(photos[0]).tobytes() == cifar10.predict(pixels[:1]).tobytes()
    words = r"images: expected an image of 32x32 \(preprocess= of cnn_engine.*found 40x32"
    with pytest.raises(InputError, match=words):
        cifar10.predict(picture(40, 32))

    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    made = onnx_models.model(
        nodes, [onnx_models.tensor("x", ["n", 3, 8, 8])], [onnx_models.tensor("y", ["n", 3])]
    )
    with pytest.raises(InputError, match="preprocess: expected imagenet or other settings"):
        Engine(made, device="cpu").predict(picture(20, 30))
    prepared = Preprocess(9, (8, 8), (0.5, 0.25, 0.125), (0.5, 2.0, 4.0))
    helper.set_model_props(made, entries(prepared, None))
    from cnn_engine.io.images import pixels_of

    wanted = prepared.normalised(pixels_of(picture(20, 30), prepared, (3, 8, 8))[None])
    found = Engine(made, device="cpu").predict([picture(20, 30)])
    np.testing.assert_allclose(found, wanted.mean((2, 3), np.float64), rtol=1e-5)


def test_inputs_by_name_are_converted_where_no_value_changes():
    made = onnx_models.model(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        [onnx_models.tensor("x", ["n", 3]), onnx_models.tensor("i", [2], TensorProto.INT64)],
        [onnx_models.tensor("y", [2, 3])],
    )
    engine = Engine(made, device="cpu", input_shape={"x": (4, 3)})
    x = np.arange(12.0).reshape(4, 3)
    found = engine.run({"x": x.tolist(), "i": [3, 1]})
    np.testing.assert_array_equal(found["y"], x[[3, 1]])
    found = engine.run({"x": x.astype(int), "i": np.array([3, 1], np.uint8)})
    np.testing.assert_array_equal(found["y"], x[[3, 1]])
    for given, words in (
        ({"x": x, "i": [0.0, 1.0]}, "inputs: i: expected int64, found float64"),
        ({"x": x + 2**24 + 0.5, "i": [True, False]}, "inputs: i: expected int64, found bool"),
        ({"x": (x + 2**24 + 1).astype(int), "i": [0, 1]}, "x: expected whole numbers that float32 has"),
        ({"x": x * 1e300, "i": [0, 1]}, "inputs: x: expected numbers in the range of float32"),
        ({"x": [[1.0], [2.0, 3.0]], "i": [0, 1]}, "inputs: x: expected lists of equal lengths"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            engine.run(given)


def test_what_is_done_is_logged_under_the_packages_name(caplog):
    with caplog.at_level(logging.DEBUG, "cnn_engine"):
        engine = Engine("cifar10", weights="random", device="cpu", variant="pad")
        engine.predict(np.zeros((3, 3, 32, 32), np.uint8))
    made = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert made == ["cifar10 on cpu: variant pad, float32, weights random"]
    built = [record for record in caplog.records if record.levelno == logging.DEBUG]
    assert "plan built" in built[0].getMessage()
    assert {record.name.partition(".")[0] for record in caplog.records} == {"cnn_engine"}
    handlers = logging.getLogger("cnn_engine").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]
