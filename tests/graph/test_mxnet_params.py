"""The reader of MXNet's ``.params``: the order of layers, and files that lie about themselves."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest
from cnn_engine.workloads.fashion_mnist import WORKLOAD
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cnn_engine import Conv2d, InputError, Linear, Network, Softmax, Tanh
from cnn_engine.io import weights
from cnn_engine.io.weights import mxnet

TINY = Network(
    "tiny",
    (1, 3, 3),
    (Conv2d("conv1", 2, kernel=2, bias=False), Tanh("t"), Linear("fc1", 2), Softmax("softmax")),
)
ARRAYS = {
    "arg:fullyconnected0_bias": np.array([1, 2], np.float32),
    "arg:fullyconnected0_weight": np.arange(16, dtype=np.float32).reshape(2, 8),
    "arg:convolution0_weight": np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2) / 8,
}
FLAGS = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4}


def array(
    value: np.ndarray, magic=0xF993FAC9, storage=0, ndim=None, shape=None, flag=None
) -> bytes:
    shape = value.shape if shape is None else shape
    flag = FLAGS[value.dtype.name] if flag is None else flag
    head = struct.pack("<IiI", magic, storage, len(shape) if ndim is None else ndim)
    return head + struct.pack(f"<{len(shape)}qiii", *shape, 1, 0, flag) + value.tobytes()


def name(text: str | bytes, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def params(
    arrays=ARRAYS, head=(0x112, 0), count=None, names=None, blobs=None, listed=None
) -> bytes:
    """A file of ``arrays``, or one that differs from it in what else is given."""
    blobs = [array(value) for value in arrays.values()] if blobs is None else blobs
    listed = [name(key) for key in arrays] if listed is None else listed
    count = len(arrays) if count is None else count
    names = len(arrays) if names is None else names
    numbers = struct.pack("<QQQ", *head, count)
    return numbers + b"".join(blobs) + struct.pack("<Q", names) + b"".join(listed)


def read(tmp_path, content: bytes, network: Network = TINY):
    path = tmp_path / "w.params"
    path.write_bytes(content)
    return weights.read(path, network)


def test_layers_are_matched_by_kind_whatever_their_place_in_the_file(tmp_path):
    found = read(tmp_path, params())
    assert list(found) == ["conv1.weight", "fc1.weight", "fc1.bias"]
    np.testing.assert_array_equal(found["conv1.weight"], ARRAYS["arg:convolution0_weight"])
    np.testing.assert_array_equal(found["fc1.weight"], ARRAYS["arg:fullyconnected0_weight"])
    np.testing.assert_array_equal(found["fc1.bias"], [1, 2])
    assert all(value.dtype == np.float32 for value in found.values())


def test_numbers_in_names_are_numbers(tmp_path):
    """fc10 comes after fc2, although its name sorts before."""
    network = Network(
        "three", (1, 1, 2), (*(Linear(f"l{n}", 2, bias=False) for n in range(3)), Softmax("s"))
    )
    arrays = {f"arg:fc{n}_weight": np.full((2, 2), n, np.float32) for n in (10, 2, 9)}
    found = read(tmp_path, params(arrays), network)
    assert [int(found[f"l{n}.weight"][0, 0]) for n in range(3)] == [2, 9, 10]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_floating_types_become_float32(tmp_path, dtype):
    found = read(tmp_path, params({key: value.astype(dtype) for key, value in ARRAYS.items()}))
    assert found["fc1.weight"].dtype == np.float32
    assert found["fc1.weight"][1, 7] == 15


def test_the_course_s_file(test_data):
    found = weights.read(test_data("ece408/ece408-0002.params"), WORKLOAD.network)
    assert sum(value.size for value in found.values()) == 150 + 2400 + 5184 * 140 + 140 + 1400 + 10
    assert {key: value.shape for key, value in found.items()} == WORKLOAD.network.parameters


def changed(key: str, value: np.ndarray | None, new: str | None = None) -> bytes:
    """The file with one array replaced, renamed or left out."""
    arrays = dict(ARRAYS)
    del arrays[key]
    if value is not None:
        arrays[new or key] = value
    return params(arrays)


FC = ARRAYS["arg:fullyconnected0_weight"]
BIG = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected 24 bytes for a header of 24 bytes at byte 0, found 0"),
        (params()[:23], "expected 24 bytes for a header of 24 bytes at byte 0, found 23"),
        (b"x" * 100, r"expected an MXNet list \(0x112 0x0\), found 0x78"),
        (params(head=(0x112, 1)), "found 0x112 0x1"),
        (params(count=0), "expected 1 to 65536 arrays, found 0"),
        (params(count=2**63), "expected 1 to 65536 arrays, found 9223372036854775808"),
        (params(count=60_000), "array 3: expected 0xf993fac9"),
        (params(count=2), "expected a name for each of 2 arrays, found"),
        (params(names=2), "expected a name for each of 3 arrays, found 2 names"),
        (params(names=4), "expected a name for each of 3 arrays, found 4 names"),
        (params() + b"x", "expected an end after .* bytes, found 1 bytes more"),
        (params()[:-1], "bytes for name 2 at byte .*, found"),
        (params(blobs=[array(FC, magic=0xF993FAC8)]), r"array 0: expected 0xf993fac9 .* 0xf993fac8"),
        (params(blobs=[array(FC, storage=1)]), r"array 0: expected dense storage \(0\), found 1"),
        (params(blobs=[array(FC, ndim=0)]), "array 0: expected 1 to 8 dimensions, found 0"),
        (params(blobs=[array(FC, ndim=2**32 - 1)]), "expected 1 to 8 dimensions, found 4294967295"),
        (params(blobs=[array(FC, shape=(2**62, 4))]), r"lengths that the file can hold, found \[46"),
        (params(blobs=[array(FC, shape=(-1, 8))]), r"lengths that the file can hold, found \[-1, 8"),
        (params(blobs=[array(FC, shape=(0, 8))]), r"lengths that the file can hold, found \[0, 8"),
        (params(blobs=[array(FC, shape=(100, 100))]), "expected 40000 bytes for array 0, float32"),
        (params(blobs=[array(FC, shape=(100,) * 8)]), "expected 40000000000000000 bytes for"),
        (params(blobs=[array(FC, flag=3)]), r"data type: expected one of 0 \(float32\), .* found 3"),
        (params(listed=[name("")]), "name 0: expected 1 to 256 bytes, found 0"),
        (params(listed=[name("a", 2**63)]), "name 0: expected 1 to 256 bytes, found 92233720"),
        (params(listed=[name(b"arg:\xff_weight")]), "name 0: expected printable ASCII, found b'arg"),
        (params(listed=[name("arg:a\nb_weight")]), r"name 0: expected printable ASCII, found b'arg:a\\n"),
        (params(listed=[name("arg:a_bias")] * 3), "expected different names, found 'arg:a_bias' twice"),
        (params(listed=[name("aux:mean"), name("b"), name("c")]), "expected names arg:<layer>_weight"),
        (changed("arg:convolution0_weight", None), "convolutions: expected 1 layers for tiny, found 0"),
        (changed("arg:fullyconnected0_weight", FC.T.copy()), r"expected shape \[2, 8\] .*found \[8, 2\]"),
        (changed("arg:fullyconnected0_bias", BIG), r"0_bias: expected shape \[2\] for fc1 of tiny, found"),
        (changed("arg:fullyconnected0_bias", None), "fullyconnected0: expected weight and bias for fc1"),
        (changed("arg:fullyconnected0_weight", None), "expected arg:fullyconnected0_weight beside"),
        (
            changed("arg:fullyconnected0_bias", BIG, "arg:convolution0_bias"),
            "convolution0: expected weight for conv1 of tiny, found weight and bias",
        ),
        (
            params(ARRAYS | {"arg:odd_weight": np.zeros((1, 1, 1), np.float32)}),
            r"expected weights of 4 dimensions \(convolutions\) or 2 .* found others: odd",
        ),
        (
            params(ARRAYS | {"arg:fullyconnected1_weight": FC}),
            r"fully connected: expected 1 layers for tiny, found 2 \(fullyconnected0, fullyconnected1",
        ),
        (changed("arg:fullyconnected0_bias", np.array([1, np.nan], "f4")), "expected finite numbers"),
    ],
)  # fmt: skip
def test_errors(tmp_path, content, message):
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(str(tmp_path / "w.params"))
    assert "\n" not in str(error.value)


def test_weights_of_another_network(test_data):
    with pytest.raises(InputError, match="convolutions: expected 1 layers for tiny, found 2"):
        weights.read(test_data("ece408/ece408-0002.params"), TINY)


def test_what_a_sparse_file_claims_is_not_read(tmp_path):
    """10 GB that are there, as holes: refused by their shape, before any memory is taken."""
    length = 10 * 2**28
    head = struct.pack("<QQQ", 0x112, 0, 1) + struct.pack(
        "<IiIqiii", 0xF993FAC9, 0, 1, length, 1, 0, 0
    )
    tail = struct.pack("<Q", 1) + name("arg:fc_weight")
    path = tmp_path / "w.params"
    with open(path, "wb") as file:
        file.write(head)
        file.seek(4 * length, os.SEEK_CUR)
        file.write(tail)
    tracemalloc.start()
    with pytest.raises(InputError, match="convolutions: expected 1 layers"):
        weights.read(path, TINY)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_missing_and_special_files(tmp_path):
    with pytest.raises(InputError, match="weights: expected a file or folder, found none"):
        weights.read(tmp_path / "none.params", TINY)
    os.mkfifo(tmp_path / "pipe.params")
    with pytest.raises(InputError, match="expected a regular file, found a special file"):
        weights.read(tmp_path / "pipe.params", TINY)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_give_weights_or_an_input_error(tmp_path, data):
    content = bytearray(params())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    try:
        found = read(tmp_path, bytes(content))
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 4000
    else:
        assert {key: value.shape for key, value in found.items()} == TINY.parameters


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200))
@example(content=struct.pack("<QQQ", 0x112, 0, 65_536) + bytes(64))
def test_arbitrary_bytes_are_an_input_error(tmp_path, content):
    with pytest.raises(InputError):
        read(tmp_path, content)
    with pytest.raises(InputError):
        read(tmp_path, struct.pack("<QQQ", 0x112, 0, 3) + content)


def test_natural_order_of_names():
    names = ["b", "a10", "a2", "a2b", "a"]
    assert sorted(names, key=mxnet._natural) == ["a", "a2", "a2b", "a10", "b"]
