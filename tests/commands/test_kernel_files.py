"""Kernel files: what they say of themselves, how they are compiled; every template works unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cnn_engine
from cnn_engine import InputError, Kernel
from cnn_engine.kernel import cases, check, command, templates
from cnn_engine.kernel.cases import Case
from cnn_engine.kernel.expected import judge_output, judged
from cnn_engine.kernels.user import CONTRACTS, cpp, expressions, nvrtc, source, structs
from cnn_engine.target import Target

ROOT = Path(__file__).resolve().parents[2]
STEPS = sorted((ROOT / "examples" / "kernels").glob("conv2d_*"))

#: Operators whose templates are tried in a process of their own; functions of elements, in this one.
IN_FULL = [op for op in CONTRACTS if CONTRACTS[op].struct != "Elements"]

HOPPER = Target.named("h200")


def written(tmp_path, op, device, change=lambda text: text, name=None):
    path = tmp_path / (name or f"my_{op}.{templates.ENDINGS[device]}")
    path.write_text(change(templates.text(op, device, path.name)))
    return path


def has_nvrtc() -> bool:
    try:
        nvrtc.compiled_for(HOPPER)
    except cnn_engine.UnsupportedError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs CuPy and NVRTC")


@pytest.mark.parametrize("op", IN_FULL)
def test_template_is_right_unchanged(op, tmp_path):
    path = written(tmp_path, op, "cpu")
    small = [case for case in cases.grid(op) if case.label != "large"]
    found = check.check(str(path), threads=2, cases=small, time=False)
    assert found.fault is None
    assert [outcome.refused for outcome in found.outcomes] == [None] * len(small)


@pytest.mark.parametrize("op", [op for op in CONTRACTS if op not in IN_FULL])
def test_template_of_a_function_is_right_unchanged(op, tmp_path):
    """One loop over a count: a case of one element and one of odd sizes are all that its shape can tell."""
    kernel = Kernel.from_file(written(tmp_path, op, "cpu"))
    few = [case for case in cases.grid(op) if case.label in ("one element", "odd sizes")]
    assert len(few) == 2
    for case in few:
        given_inputs = judged(case, np.random.default_rng(0), "float32")
        engine = cnn_engine.Engine(case.graph, device="cpu", kernels=[kernel], threads=2)
        found = engine.run(given_inputs.inputs)["y"]
        judge_output(found.astype(np.float32), given_inputs, case)


@needs_nvrtc
@pytest.mark.parametrize("op", CONTRACTS)
def test_cuda_template_compiles(op, tmp_path):
    read = source.read(written(tmp_path, op, "cuda"))
    assert len(nvrtc.compile(read, HOPPER)) > 1000


@needs_nvrtc
@pytest.mark.parametrize("path", [p for p in STEPS if p.suffix == ".cu"], ids=lambda p: p.name)
def test_cuda_step_compiles(path):
    assert len(nvrtc.compile(source.read(path), HOPPER)) > 1000


@pytest.mark.parametrize("path", [p for p in STEPS if p.suffix == ".cpp"], ids=lambda p: p.name)
def test_cpp_step_is_right(path):
    small = [case for case in cases.grid("conv2d") if case.label != "large"]
    found = check.check(str(path), threads=2, cases=small, time=False)
    assert found.fault is None
    assert sum(outcome.refused is None for outcome in found.outcomes) >= 9


def test_steps_are_short_and_in_the_tutorial():
    tutorial = (ROOT / "docs" / "tutorials" / "own_kernel.md").read_text()
    assert {path.suffix for path in STEPS} == {".cpp", ".cu"}
    for path in STEPS:
        assert len(path.read_text().splitlines()) <= 150, path.name
        assert f"examples/kernels/{path.name})" in tutorial


@pytest.mark.gpu
@pytest.mark.parametrize("op", CONTRACTS)
def test_cuda_template_is_right_unchanged(op, tmp_path):
    found = check.check(str(written(tmp_path, op, "cuda")), time=False)
    assert found.fault is None
    assert not any(outcome.refused for outcome in found.outcomes)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [p for p in STEPS if p.suffix == ".cu"], ids=lambda p: p.name)
def test_cuda_step_is_right(path):
    found = check.check(str(path), time=False)
    assert found.fault is None
    assert sum(outcome.refused is None for outcome in found.outcomes) >= 1


def test_structs_are_the_headers():
    assert [name for name, _ in structs()["Linear"].type._fields_] == ["n", "f", "m"]
    for op, contract in CONTRACTS.items():
        case = cases.grid(op)[0]
        values = contract.values(case.op, case.graph.inputs_of(case.node), case.graph.values["y"])
        assert tuple(values) == contract.fields


@given(st.integers(-1000, 1000), st.integers(1, 1000))
def test_expressions_are_c(a, b):
    def value(text):
        return expressions.value(expressions.parse(text), {"a": a, "b": b})

    assert value("a / b") == int(a / b)
    assert value("a - a / b * b") == value("a % b")
    assert value("ceil_div(a, b)") == -(-a // b)
    assert bool(value("a < b && !(a == b) || a > b")) == (a != b)
    assert value("dim3(max(a, b), sizeof(float))") == (max(a, b), 4)


@pytest.mark.parametrize(
    "text",
    ["", "a.b", "a[0]", "f(a)", "lambda: 1", "'a'", "a ** 9", "1 << 9", "9" * 30, "(" * 3000, "a if b else c",
     "__import__('os')", "max(a, key=b)", "1.5", "a = b", "a; b", "[1]"],
)  # fmt: skip
def test_expressions_are_nothing_else(text):
    with pytest.raises(ValueError, match="expected"):
        expressions.parse(text)


def test_expressions_stay_small():
    tree = expressions.parse(" * ".join(["a"] * 40))
    with pytest.raises(ValueError, match=r"2\^62"):
        expressions.value(tree, {"a": 2**31})
    with pytest.raises(ValueError, match="divisor"):
        expressions.value(expressions.parse("1 / a"), {"a": 0})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("// operator: conv2d", "// operator: conv9d", "expected operator: one of conv2d, "),
        ("// operator: conv2d\n", "", "expected a line // operator: conv2d"),
        ("// launch: ", "// ", "expected a line // launch:"),
        ("// launch: ", "// call: ", "expected // launch: in a CUDA file, found // call:"),
        ("shape);\n", "shape)\n", "up to a semicolon"),
        ("n * k,", "n * planes,", "found 'planes'"),
        ("weight, bias, y, shape);", "weight, bias, shape);", "expected y among the arguments"),
        ("weight, bias, y, shape);", "weight, bias, y, workspace, shape);", "// workspace:"),
        ("// operator: conv2d", "// operator: conv2d\n// computes: int4", "computes: one of float32"),
        ("// operator: conv2d", "// operator: conv2d\n// operator: linear", "expected one line"),
        ("<<<dim3", "<<dim3", "expected name<<<grid, block>>>"),
        ("dim3(16, 16)>>>", "dim3(16, 16), 0, 0>>>", "<<<grid, block, shared bytes>>>"),
    ],
)  # fmt: skip
def test_directives_at_fault(old, new, says, tmp_path):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    with pytest.raises(InputError) as caught:
        Kernel.from_file(written(tmp_path, "conv2d", "cuda", change))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "expected a kernel file whose name ends in .cu"),
        ("a.cu", b"\xff\xfe", "UTF-8"),
        ("a.cu", b"/" * (2**20 + 1), "at most 1,048,576 bytes"),
        ("a.cpp", b"", "expected a line // operator"),
    ],
)
def test_files_at_fault(name, content, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        Kernel.from_file(path)
    with pytest.raises(InputError, match="No such file"):
        Kernel.from_file(tmp_path / "absent.cu")


def test_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path / "cache"))
    read = source.read(written(tmp_path, "relu", "cpu"))
    first = cpp.compile(read)
    (file,) = (tmp_path / "cache").iterdir()
    before = file.stat()
    assert cpp.compile(read) == first
    other = tmp_path / "another student"
    other.mkdir()
    assert (
        cpp.compile(source.read(written(other, "relu", "cpu", "// a remark\n{}".format))) == first
    )
    assert file.stat().st_ino == before.st_ino
    assert len(list((tmp_path / "cache").iterdir())) == 1
    changed = source.read(
        written(tmp_path, "relu", "cpu", lambda text: text.replace("0.0f : v", "0.5f : v"))
    )
    assert cpp.compile(changed) != first
    included = tmp_path / "more.h"
    included.write_text("extern const int more = 1;\n")
    path = written(
        tmp_path,
        "relu",
        "cpu",
        lambda text: text.replace("#include <cmath>", '#include "more.h"\n#include <cmath>'),
    )
    first = cpp.compile(source.read(path))
    included.write_text("extern const int more = 2;\n")
    assert cpp.compile(source.read(path)) != first


def test_no_cache_is_no_fault(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(blocked))
    assert cpp.Library(source.read(written(tmp_path, "relu", "cpu")))


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    cpp.compiler.cache_clear()
    try:
        with pytest.raises(cnn_engine.UnsupportedError, match=r"expected a C\+\+ compiler"):
            cpp.compile(source.read(written(tmp_path, "relu", "cpu")))
        assert command.main(["check", str(written(tmp_path, "relu", "cpu"))]) == 2  # not its fault
    finally:
        cpp.compiler.cache_clear()


def test_errors_have_the_users_line(tmp_path):
    path = written(tmp_path, "relu", "cpu", lambda text: text.replace("float v =", "flaot v ="))
    line = (
        path.read_text()
        .splitlines()
        .index(next(t for t in path.read_text().splitlines() if "flaot" in t))
    )
    with pytest.raises(InputError) as caught:
        cpp.compile(source.read(path))
    assert str(caught.value).startswith(f"{path}:{line + 1}:")


@needs_nvrtc
def test_cuda_errors_have_the_users_line(tmp_path):
    path = written(tmp_path, "relu", "cuda", lambda text: text.replace("float v =", "flaot v ="))
    line = (
        path.read_text()
        .splitlines()
        .index(next(t for t in path.read_text().splitlines() if "flaot" in t))
    )
    with pytest.raises(InputError) as caught:
        nvrtc.compile(source.read(path), HOPPER)
    assert str(caught.value).startswith(f"{path}:{line + 1}: ")


def test_missing_functions(tmp_path):
    path = written(tmp_path, "relu", "cpu", lambda text: text.replace('extern "C" ', ""))
    with pytest.raises(InputError, match='expected a function extern "C" my_relu'):
        cpp.Library(source.read(path))
    path = written(
        tmp_path,
        "relu",
        "cpu",
        lambda text: text.replace("y[i] =", "void other(); other(); y[i] ="),
    )
    with pytest.raises(InputError, match="found no other"):
        cpp.compile(source.read(path))


def test_command_new(tmp_path, capsys):
    assert command.main(["new", "linear"]) == 0
    assert "// operator: linear" in capsys.readouterr().out
    path = tmp_path / "a.cpp"
    assert command.main(["new", "softmax", "--device", "cpu", "--output", str(path)]) == 0
    assert source.read(path).contract.op == "softmax"
    path.write_text("edited")
    capsys.readouterr()
    assert command.main(["new", "softmax", "--device", "cpu", "--output", str(path)]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"error: --output: expected a name that is free, or --force to replace the file, found {path}\n"
    )
    assert path.read_text() == "edited"
    dangling = tmp_path / "b.cpp"
    dangling.symlink_to(tmp_path / "nowhere")
    assert command.main(["new", "softmax", "--device", "cpu", "--output", str(dangling)]) == 2
    assert command.main(["new", "relu", "--device", "cpu", "--output", str(path), "--force"]) == 0
    assert source.read(path).contract.op == "relu"
    assert command.main(["new", "conv9d"]) == 2
    assert command.main(["new", "linear", "--output", str(tmp_path)]) == 2


def test_command_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        cases, "_GRIDS", {**cases._GRIDS, "pad2d": lambda op: list(cases._pad2d(op))[:2]}
    )
    path = written(tmp_path, "pad2d", "cpu")
    report = tmp_path / "a.json"
    assert command.main(["check", str(path), "--json", str(report)]) == 0
    text = capsys.readouterr().out
    assert "2 cases passed" in text
    assert '"passed": true' in report.read_text()
    path = written(tmp_path, "pad2d", "cpu", lambda text: text.replace(": 0.0f", ": 1.0f"))
    assert command.main(["check", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "y[0, 0, 0, 0]: expected 0, found 1" in error
    assert command.main(["check", str(path), "--device", "cuda"]) == 2


def test_case_of_a_label_is_small():
    assert isinstance(cases.grid("relu")[0], Case)
    assert os.path.exists(ROOT / "cnn_engine" / "include" / "cnn_engine" / "kernel.h")
