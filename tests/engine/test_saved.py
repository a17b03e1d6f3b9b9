"""Engines that are saved and loaded: the same bits; and files that are damaged, hostile or of others."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import graphs
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine, InputError, UnsupportedError, load_engine
from cnn_engine.engine import saved
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.shaping import Reshape


@pytest.fixture(scope="module")
def network() -> Graph:
    return graphs.resnet((2, 1), (1, 3, 20, 20), width=8)


@pytest.fixture(scope="module")
def path(network, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "engine.safetensors")
    with Engine(network, device="cpu", threads=1) as e:
        e.save(path)
    return path


def images_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, 20, 20)).astype(np.float32)


def test_a_loaded_engine_gives_the_same_bits_at_every_batch(network, path):
    with Engine(network, device="cpu", threads=1) as e, load_engine(path, threads=1) as loaded:
        for count in (1, 3, 8, 1, 0):
            np.testing.assert_array_equal(
                e.predict(images_of(count)), loaded.predict(images_of(count))
            )
        assert str(loaded) == str(e)
        assert loaded.choice == e.choice
        assert (loaded.inputs, loaded.outputs) == (e.inputs, e.outputs)
        assert loaded.check(images_of(2)).passed


def test_nothing_is_packed_or_rewritten_when_it_is_loaded(path, monkeypatch):
    from cnn_engine import _cpu
    from cnn_engine.lower import lowering

    def fail(*_):
        raise AssertionError("packed again")

    monkeypatch.setattr(lowering, "_first_stage", fail)
    for name in ("conv2d_nhwc_pack", "linear_pack", "conv2d_pack"):
        monkeypatch.setattr(_cpu, name, fail)
    with load_engine(path, threads=1) as e:
        e.predict(images_of(1))


def test_the_file_is_safetensors_and_loads_in_a_process_without_onnx(network, path):
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert file.metadata()["kind"] == saved.KIND
        names = set(file.keys())
        weights = [file.get_tensor(name) for name in names if name.startswith("constants/")]
    assert sum(array.nbytes for array in weights) >= network.constants["w0"].nbytes
    assert any(name.startswith("packed/") for name in names)
    with Engine(network, device="cpu", threads=1) as e:
        wanted = e.predict(images_of(2))
    code = (
        "import sys; sys.modules['onnx'] = None; import numpy as np, cnn_engine\n"
        f"e = cnn_engine.load_engine({path!r}, threads=1)\n"
        "x = np.random.default_rng(2).standard_normal((2, 3, 20, 20)).astype(np.float32)\n"
        "sys.stdout.buffer.write(e.predict(x).tobytes())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert found == wanted.tobytes()


def test_open_sizes_and_several_outputs_stay_as_they_were(tmp_path, rng):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["/head/0"]),
        helper.make_node("GlobalAveragePool", ["c"], ["pooled"]),
        helper.make_node("Clip", ["pooled", "", "most"], ["limited"]),
    ]
    outputs = [tensor("/head/0", ["n", 8, "p", "q"]), tensor("limited", ["n", 8, 1, 1])]
    constants = {
        "w": rng.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "most": np.float32(np.inf),
    }
    made = model(nodes, [tensor("x", ["n", 3, "height", "width"])], outputs, constants)
    with Engine(made, device="cpu", threads=1) as e:
        e.save(tmp_path / "e.safetensors")
        with load_engine(tmp_path / "e.safetensors", threads=1) as loaded:
            for shape in ((1, 3, 16, 16), (3, 3, 17, 30), (2, 3, 40, 9)):
                x = rng.standard_normal(shape).astype(np.float32)
                for a, b in zip(e.predict(x), loaded.predict(x), strict=True):
                    np.testing.assert_array_equal(a, b)
            assert loaded.predict(x).names == ("/head/0", "limited")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line(path, tmp_path_factory, data):
    """Cut off anywhere, longer, or with any bits other."""
    content = bytearray(Path(path).read_bytes())
    how = data.draw(st.sampled_from(["cut", "longer", "flip", "flip the header", "zeros"]))
    header = 8 + int.from_bytes(content[:8], "little")
    if how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "longer":
        content += bytes(data.draw(st.integers(1, 100)))
    elif how == "zeros":
        first = data.draw(st.integers(0, header - 64))
        content[first : first + 64] = bytes(64)
    else:
        last = header if how == "flip the header" else len(content)
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, last - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if bytes(content) == Path(path).read_bytes():
        return
    damaged = tmp_path_factory.mktemp("damaged") / "e.safetensors"
    damaged.write_bytes(content)
    try:
        # What packed weights were made of is read, and refused, where it is needed.
        with load_engine(damaged, threads=1) as e, pytest.raises(InputError, match="found others"):
            e.check(images_of(1))
    except InputError as error:
        assert str(damaged) in str(error)
        assert "\n" not in str(error)


def changed(path: str, to: str, change) -> None:
    """Writes a file whose header says something else, with the digest that goes with it."""
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    words = header.pop("__metadata__")
    strings = ("kind", "version", "target", "weights", "digest")
    document = {k: v if k in strings else json.loads(v) for k, v in words.items()}
    change(document, header)
    document.pop("digest")
    text = json.dumps({**document, "table": header}, sort_keys=True)
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    words = {k: v if isinstance(v, str) else json.dumps(v) for k, v in document.items()}
    made = json.dumps({"__metadata__": words, **header}).encode()
    made += b" " * (-(8 + len(made)) % 64)
    with open(to, "wb") as file:
        file.write(len(made).to_bytes(8, "little") + made + content[8 + length :])


def _set(*keys, to):
    def change(document, table):
        place = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


def _record(document) -> dict:
    nodes = document["variants"][0]["nodes"]
    return next(node[1] for node in nodes if "strides" in node[1] or "stride" in node[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", to="0.0.1"), "expected an engine of version .*, found 0.0.1: save it again"),
        (_set("target", to="cpu riscv64 rvv"), "target: expected cpu riscv64 rvv, found cpu"),
        (_set("kind", to="weights"), "expected a file that Engine.save wrote"),
        (_set("options", "dtype", to="float128"), "options: expected data of float32"),
        (_set("choice", to=["os.system", True, None]), ""),
        (_set("sizes", to={"numbers": [["batch", -3]], "batch": "batch"}), ""),
        (_set("variants", 0, "nodes", 0, 1, to={"record": "Popen", "args": "ls"}), "a record of an operator"),
        (_set("variants", 0, "nodes", 0, 1, to=[[]]), "expected an operator"),
        (_set("variants", 0, "nodes", 0, 2, 0, to="nothing"), "is not made before it is used"),
        (_set("variants", 0, "outputs", to=["nothing"]), "no node makes it"),
        (_set("variants", 0, "inputs", 0, "shape", to=[1, 3, 1 << 62, 20]), ""),
        (_set("variants", 0, "inputs", 0, "dtype", to="object"), ""),
        (_set("variants", 0, "guards", to=[["eval", [], True]]), "expected a decision"),
        (_set("variants", to=[]), ""),
        (_set("variants", to="x" * 1000), ""),
        (lambda document, _: _record(document).update(record="Relu"), "expected its fields"),
        (lambda document, _: document["arrays"][0].clear(), ""),
        (lambda document, _: document["packed"].update({k: v[:0] for k, v in document["packed"].items()}),
         "bytes of packed weights, found none"),
        (lambda document, _: document["packed"].update(
            {k: document["packed"][sorted(document["packed"])[0]] for k in document["packed"]}),
         "bytes of packed weights"),
        (lambda _, table: table.pop(next(iter(table))), "one after the other|bytes, found"),
        (lambda _, table: table[next(iter(table))].update(shape=[1 << 40]), "one after the other"),
        (lambda _, table: table[next(iter(table))].update(data_offsets=[-4, 0]), "expected sizes"),
        (lambda _, table: table[next(iter(table))].update(dtype="PICKLE"), ""),
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused_in_one_line(path, tmp_path, change, message):
    changed(path, str(tmp_path / "e.safetensors"), change)
    with pytest.raises((InputError, UnsupportedError), match=message or None) as caught:
        load_engine(tmp_path / "e.safetensors", threads=1)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_files_of_other_kinds_are_refused(tmp_path):
    for name, content in (("a", b""), ("b", b"\xff" * 100), ("c", b"\x02" + bytes(7) + b"{}")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name}: expected"):
            load_engine(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read: "):
        load_engine(tmp_path / "nowhere")


def test_what_cannot_be_saved_says_so_and_writes_nothing(tmp_path, network):
    with (
        Engine("cifar10", device="cpu") as e,
        pytest.raises(UnsupportedError, match="found the network"),
    ):
        e.save(tmp_path / "e")
    with (
        Engine(network, device="cpu", tune=True) as e,
        pytest.raises(UnsupportedError, match="tune="),
    ):
        e.save(tmp_path / "e")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("variant", ["fused", "if", "pad"])
def test_variants_stay_what_they_were(tmp_path, rng, variant):
    b = graphs.Builder((1, 3, 12, 12))
    b.add(Linear(), b.add(Reshape((0, -1)), b.relu(b.conv("images", 4))), b.constant((7, 576)))
    x = rng.standard_normal((5, 3, 12, 12)).astype(np.float32)
    with Engine(b.graph(), device="cpu", variant=variant, threads=1) as e:
        e.save(tmp_path / "e")
        with load_engine(tmp_path / "e", threads=1) as loaded:
            assert loaded.choice == e.choice
            np.testing.assert_array_equal(loaded.predict(x), e.predict(x))


def test_every_record_has_a_name_of_its_own():
    from cnn_engine.graph.serialized import records
    from cnn_engine.operators.operator import Operator

    def all_of(kind):
        return [kind for one in kind.__subclasses__() for kind in (one, *all_of(one))]

    # Without those of other tests.
    own = {kind for kind in all_of(Operator) if kind.__module__.startswith("cnn_engine.")}
    names = [kind.__name__ for kind in own]
    assert len(names) == len(set(names))
    assert set(names) <= set(records())


def test_an_unpicklable_model_keeps_its_metadata(tmp_path):
    made = model(
        [helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["n", 4])], [tensor("y", ["n", 4])]
    )
    helper.set_model_props(made, {"cnn_engine.classes": '["a", "b"]'})
    onnx.save(made, tmp_path / "m.onnx")
    with Engine(str(tmp_path / "m.onnx"), device="cpu", threads=1) as e:
        e.save(tmp_path / "e")
        with load_engine(tmp_path / "e") as loaded:
            assert loaded.network.metadata == e.network.metadata


def test_an_engine_that_ran_at_sizes_of_other_decisions_is_loaded(tmp_path):
    """Of more than 20 elements the sign changes: the file is for the sizes of its making alone."""
    same, negative = (
        helper.make_graph([helper.make_node(kind, ["x"], [kind])], kind, [], [tensor(kind, ["n"])])
        for kind in ("Identity", "Neg")
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Squeeze", ["shape"], ["size"]),
        helper.make_node("Greater", ["size", "limit"], ["large"]),
        helper.make_node("If", ["large"], ["z"], then_branch=negative, else_branch=same),
        helper.make_node("Exp", ["z"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", ["n"])], [tensor("y", ["n"])], {"limit": np.int64(20)})
    small, large = np.ones(7, np.float32), np.ones(30, np.float32)
    with Engine(proto, device="cpu") as engine:
        np.testing.assert_allclose(engine.run({"x": small})["y"], np.e, rtol=1e-6)
        np.testing.assert_allclose(engine.run({"x": large})["y"], 1 / np.e, rtol=1e-6)
        engine.save(tmp_path / "x.engine")
    with load_engine(tmp_path / "x.engine") as engine:
        np.testing.assert_allclose(engine.run({"x": small})["y"], np.e, rtol=1e-6)
        with pytest.raises(UnsupportedError, match="expected sizes like those that were saved"):
            engine.run({"x": large})
