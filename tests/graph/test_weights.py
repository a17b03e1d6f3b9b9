from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from cnn_engine.workloads.cifar10 import WORKLOAD
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cnn_engine import InputError, Linear, Network, Softmax
from cnn_engine.graph import reference
from cnn_engine.io import weights

NETWORK = WORKLOAD.network
TINY = Network("tiny", (1, 1, 2), (Linear("fc", 2), Softmax("softmax")))


def test_safetensors_round_trip(tmp_path):
    wanted = NETWORK.random_weights(5)
    save_file(wanted, tmp_path / "w.safetensors")
    found = weights.read(tmp_path / "w.safetensors", NETWORK)
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_bfloat16_is_read_as_float32(tmp_path):
    """Beside other types, with every exponent and sign; the bits are the upper half of float32's."""
    wanted = np.float32([[1.0, -2.5], [1.0078125, 3.3895314e38]])
    tiny = np.float32([-1e-40, 0.0])  # a subnormal, as bfloat16 has it
    halves = [(values.view(np.uint32) >> 16).astype("<u2") for values in (wanted, tiny)]
    entries = {
        "fc.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
        "fc.bias": {"dtype": "F16", "shape": [2], "data_offsets": [8, 12]},
    }
    path = tmp_path / "w.safetensors"
    path.write_bytes(hostile(entries, halves[0].tobytes() + np.float16([0.5, -7]).tobytes()))
    found = weights.read(path, TINY)
    assert found["fc.weight"].dtype == np.float32
    assert np.array_equal(found["fc.weight"], (halves[0].astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(found["fc.weight"][:, 0], wanted[:, 0])
    assert list(found["fc.bias"]) == [0.5, -7]
    entries["fc.bias"]["dtype"] = "BF16"
    path.write_bytes(hostile(entries, halves[0].tobytes() + halves[1].tobytes()))
    found = weights.read(path, TINY)["fc.bias"]
    assert found[0] == pytest.approx(-1e-40, rel=0.01)
    assert found[1] == 0
    path.write_bytes(hostile(entries, halves[0].tobytes()))  # cut off
    with pytest.raises(InputError, match=r"w\.safetensors: expected"):
        weights.read(path, TINY)


def test_convnetjs_golden_output_of_conv1(test_data):
    found = weights.read(test_data("convnetjs-cifar10"), NETWORK)
    gold = test_data("convnetjs-cifar10/conv1_image0.gold.txt").read_text().split()[1:]
    record = np.fromfile(test_data("cifar-10-batches-bin/data_batch_1.bin"), np.uint8, 3073)
    x = record[1:].reshape(1, 3, 32, 32) / 255 - 0.5
    y = reference.conv2d(x, found["conv1.weight"], found["conv1.bias"], 1, 2)[0]
    assert np.abs(y - np.array(gold, float).reshape(16, 32, 32)).max() < 1e-5


def test_convnetjs_order(tmp_path):
    """Each number goes where the format says, told apart by its value."""
    numbers = [*range(1, 5), 0.5, 0.25]
    (tmp_path / "layer7_fc.txt").write_text("2 2\n" + "\n".join(map(str, numbers)) + "\n")
    found = weights.read(tmp_path, TINY)
    np.testing.assert_array_equal(found["fc.weight"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(found["fc.bias"], [0.5, 0.25])


GOOD = "2 2\n1\n2\n3\n4\n5\n6\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("6\n", ""), "expected 4 weights and 2 biases, found 5 numbers"),
        (GOOD + "7\n", "expected 4 weights and 2 biases, found 7 numbers"),
        (GOOD.replace("3", "three"), "line 4: expected a number, found 'three'"),
        (GOOD.replace("3", "nan"), "line 4: expected a finite number, found 'nan'"),
        (GOOD.replace("3", "1e999"), "line 4: expected a finite number, found '1e999'"),
        (GOOD.replace("2 2", "3 2"), "expected the header 2 2 for fc of tiny, found '3 2'"),
        ("", "expected the header 2 2"),
        ("2 2\n\xff\n", "expected text, found byte 0xff"),
    ],
)
def test_convnetjs_errors(tmp_path, text, message):
    (tmp_path / "layer1_fc.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=f"layer1_fc.txt: .*{message}"):
        weights.read(tmp_path, TINY)


def test_convnetjs_files_of_another_network(tmp_path, test_data):
    with pytest.raises(
        InputError, match=r"expected the files layer\*_fc.txt for tiny, found layer1_conv"
    ):
        weights.read(test_data("convnetjs-cifar10"), TINY)
    with pytest.raises(InputError, match="found none"):
        weights.read(tmp_path, NETWORK)


def hostile(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"", b"x", b"\xff" * 100, struct.pack("<Q", 2**62), hostile(b"{"), hostile([1]),
        hostile({"fc.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}),
        hostile({"fc.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, bytes(16)),
        hostile({"fc.weight": {"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16)),
        hostile({"fc.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16)),
    ],
)  # fmt: skip
def test_safetensors_errors(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="w.safetensors: expected"):
        weights.read(path, TINY)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200), text=st.booleans())
def test_any_bytes_give_weights_or_an_error(tmp_path_factory, content, text):
    folder = tmp_path_factory.mktemp("weights")
    path = folder / ("layer1_fc.txt" if text else "w.safetensors")
    path.write_bytes(b"2 2\n" + content if text else content)
    try:
        found = weights.read(folder if text else path, TINY)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert found["fc.weight"].shape == (2, 2)


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(InputError, match="expected a file or folder, found none"):
        weights.read(tmp_path / "none.safetensors", TINY)
    (tmp_path / "w.pickle").write_bytes(b"x")
    with pytest.raises(InputError, match="expected a .safetensors file or a ConvNetJS folder"):
        weights.read(tmp_path / "w.pickle", TINY)
