"""What kernels require of a GPU or CPU is a column of their rows, and decisions read a target alone."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tokenize
from pathlib import Path

import decisions
import pytest
import targets
from graphs import Builder, resnet

import cnn_engine
from cnn_engine import _cpu, kernels
from cnn_engine.devices import cuda_module
from cnn_engine.devices.described import DescribedDevice
from cnn_engine.engine.inspection import inspect
from cnn_engine.graph.graph import Graph
from cnn_engine.kernels import select
from cnn_engine.lower import pipeline
from cnn_engine.operators.linear import Linear
from cnn_engine.target import GPU_FEATURES, Target

ROOT = Path(cnn_engine.__file__).parent
GOLDEN = json.loads(Path(__file__).with_name("golden_decisions.json").read_text(encoding="utf-8"))


def has_kernels() -> bool:
    try:
        cuda_module.load()
    except cnn_engine.UnsupportedError:
        return False
    return True


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="needs the CUDA kernels, and no GPU")

#: What a decision by hand about a GPU looks like.
BY_HAND = re.compile(
    r"compute_?[cC]apability|\bcapability|has_tensor_cores|runs_on|capability_of|(?<![\d.])132\b|\"90a\"|multiprocessors_here"
    r"|cudaDeviceGetAttribute|cudaGetDeviceProperties|cudaDevAttr|cudaOccupancy"
)

#: Where a device is asked, and what it is called.
ALLOWED = {
    "cnn_engine/target.py",  # the table
    "cnn_engine/devices/cuda_module.py",  # makes the target of a device
    "cnn_engine/doctor.py",  # reports it
    "cnn_engine/io/sandbox_launcher.py",  # the system's capabilities
    "csrc/bindings/cuda.cpp",  # what the driver says of a device
    "csrc/cuda/common/target.cu",  # makes the target of a device
    "csrc/cuda/target.cu",
    "csrc/cuda/common/launch.cuh",  # how many clusters of a kernel run at once, of a launch
    "csrc/cuda/launch.cuh",
    "csrc/cuda/fused/plan.cpp",
}


def code_of(path: Path) -> str:
    """Returns the text of a file without comments and what strings say."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r"//[^\n]*", "", text)
        return re.sub(r'"(?!90a")(?:[^"\\\n]|\\.)*"', '""', text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT
        and not (token.type == tokenize.STRING and " " in token.string)
    )


def sources() -> list[Path]:
    top = ROOT.parent
    found = [*ROOT.rglob("*.py")]
    found += [p for p in (top / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return sorted(found)


def test_nothing_decides_about_a_gpu_by_hand():
    top, found = ROOT.parent, {}
    if not (top / "csrc").exists():
        pytest.skip("needs the sources")
    for path in sources():
        name = str(path.relative_to(top))
        if name not in ALLOWED and (match := BY_HAND.search(code_of(path))):
            found[name] = match[0]
    assert found == {}


def test_requirements_name_features_that_there_are():
    known = GPU_FEATURES.keys() | {"avx512_bf16_fast"}
    for row in kernels.TABLE:
        assert row.requires.features <= known, row.name
        assert not row.requires.features or row.device in ("cpu", "cuda")
        if row.device == "cuda" and row.requires.features:
            assert any(row.requires.met_by(Target.named(name)) for name in ("h200", "a100")), (
                row.name
            )


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("t4", "wgmma expand_depthwise implicit_gemm"),
        ("a100", "wgmma expand_depthwise"),
        ("l4", "wgmma expand_depthwise"),
        ("rtx5090", "wgmma expand_depthwise"),
        ("b200", "wgmma expand_depthwise"),
        ("h200", ""),
        ("h100", ""),
    ],
)
def test_rows_refuse_gpus_that_lack_what_they_need(name, refused):
    target = Target.named(name)
    rows = {
        "wgmma": "wgmma_sum",
        "expand_depthwise": "expand_depthwise",
        "implicit_gemm": "implicit_gemm",
    }
    found = [
        short
        for short, row in rows.items()
        if any(
            one.requires.why_not(target)
            for one in kernels.TABLE
            if one.name == row and one.device == "cuda"
        )
    ]
    assert found == refused.split()


def convolved(dtype: str = "tf32") -> Graph:
    """A graph of one convolution of images that lie [N, H, W, C], as passes make it."""
    b = Builder((1, 64, 14, 14))
    b.relu(b.conv(b.relu(b.conv("images", 64)), 64))
    setting = pipeline.Setting(DescribedDevice(Target.named("a100")), dtype)
    return pipeline.lower(b.graph(), setting).graph


def test_a_refusal_is_the_reason_that_choosing_gives():
    graph = convolved()
    node = next(node for node in graph.nodes if node.op.kind == "conv2d_nhwc")
    assert kernels.choose(node, graph, Target.named("a100"))[0].name == "implicit_gemm"
    kernel, why = kernels.choose(node, graph, Target.named("t4"))
    assert kernel is None
    assert (
        "implicit_gemm: expected async_copy, mma_bfloat16, mma_tf32, found sm_75 (t4) without"
        in why
    )


# ---- what a GPU would run, on any machine ----


def kernels_on(graph: Graph, name: str, kind: str = "cuda") -> list[str]:
    found = inspect(graph, target=Target.named(name)).on[kind]
    assert found.name == name
    return [node.kernel for node in found.running]


@pytest.fixture
def no_kernels(monkeypatch):
    """An installation without the CUDA kernels."""

    def load():
        raise cnn_engine.UnsupportedError("device cuda: expected the CUDA kernels, found none")

    monkeypatch.setattr(cuda_module, "load", load)


@pytest.mark.parametrize("name", ["a100", "a10", "l4", "rtx3090", "rtx4090", "sm_80", "sm_89"])
def test_gpus_before_hopper_need_no_compiled_functions(no_kernels, name):
    found = kernels_on(resnet((1, 1), (1, 3, 32, 32), weights=False), name)
    assert found.count("implicit_gemm") >= 7
    assert "wgmma" not in found


def test_a_gpu_without_these_tensor_cores_runs_images_as_they_come(no_kernels):
    found = kernels_on(resnet((1, 1), (1, 3, 32, 32), weights=False), "t4")
    assert "blocked" in found
    assert not {"implicit_gemm", "wgmma", "channels_last"} & set(found)


def test_cost_models_that_are_not_here_are_said_to_be_missing(no_kernels):
    with pytest.raises(cnn_engine.UnsupportedError, match="expected the CUDA kernels"):
        kernels_on(resnet((1,), (1, 3, 32, 32), weights=False), "h200")


@needs_kernels
def test_hopper_runs_its_own_kernels():
    graph = resnet((1, 1), (1, 3, 224, 224), weights=False)
    for name in ("h100", "h200", "sm_90"):
        assert {"wgmma", "wgmma_sum", "wgmma_planar"} <= set(kernels_on(graph, name))
    for name in ("rtx5090", "b200"):
        assert "wgmma" not in kernels_on(graph, name)


def test_cpus_by_name_run_what_they_have():
    graph = resnet((1,), (1, 3, 32, 32), weights=False)
    assert kernels_on(graph, "avx2", "cpu") == kernels_on(graph, "spr", "cpu")
    node = next(n for n in convolved("bfloat16").nodes if n.op.kind == "conv2d_nhwc")
    (row,) = [row for row in kernels.of("conv2d_nhwc", "cpu") if row.name == "bfloat16"]
    assert row.requires.why_not(Target.named("spr")) == (
        "expected avx512_bf16_fast, found x86_64 (spr) without"
    )
    assert row.requires.met_by(Target.named("zen4"))
    assert node.op.compute_dtype == "bfloat16"


def test_types_to_compute_in_follow_from_the_target():
    types = {
        name: select.layered_dtypes(DescribedDevice(Target.named(name)), True)
        for name in ("spr", "zen4", "avx2", "neon", "a100", "t4")
    }
    assert types["spr"] == types["zen4"] == ("float32", "bfloat16")
    assert types["avx2"] == types["neon"] == ("float32",)
    assert types["t4"] == ("float32", "float16")
    assert types["a100"] == ("float32", "tf32", "float16", "bfloat16")


# ---- decisions of compiled functions ----


@needs_kernels
def test_decisions_for_an_h200_are_what_they_were():
    """Written where the functions still asked a device: tiles, splits and fusions stay the same."""
    found = decisions.decided(cuda_module.load(), Target.named("h200").native)
    assert found.keys() == GOLDEN.keys()
    for name, answers in GOLDEN.items():
        assert found[name] == answers, name


@pytest.mark.gpu
def test_decisions_for_this_gpu_are_those_of_its_name():
    live = targets.here()
    name = next((n for n in ("h200", "h100", "a100") if n in live.name.lower()), None)
    if name is None or Target.named(name).multiprocessors != live.multiprocessors:
        pytest.skip(f"{live.name} has no name here")
    module, named = cuda_module.load(), Target.named(name)
    same = dataclasses.replace(live, groups=named.groups)  # which differ from chip to chip
    assert decisions.decided(module, same.native) == decisions.decided(module, named.native)


@needs_kernels
def test_decisions_follow_the_targets_numbers():
    module, h200 = cuda_module.load(), Target.named("h200")
    small = dataclasses.replace(h200, multiprocessors=4, groups=(4,))
    shape = decisions.convolution(1, 64, 7, 256, 3)
    few, many = (module.conv2d_blocked_workspace(shape, one.native) for one in (small, h200))
    assert 0 < few < many  # sums are split among as many blocks as there is room for
    block = decisions.convolution(2, 96, 28, 96, 3, 1, 96), 96, 96, False, False
    assert [module.inverted_residual_takes(*block, one.native) for one in (small, h200)] == [0, 1]
    means = _cpu.AxisShape(1, 49, 2048), 1000, decisions.HALVES[0]
    assert [module.mean_linear_takes(*means, one.native) for one in (small, h200)] == [0, 1]
    narrow = dataclasses.replace(h200, shared_per_block=64 * 1024)
    rows = _cpu.RowLayer(9216, 84, _cpu.UnaryFunction.relu, 0.0, 0.0)
    layers = _cpu.RowLayers(1, True, rows, _cpu.RowLayer(84, 10, _cpu.UnaryFunction.relu, 0.0, 0.0))
    answers = [module.linear_layers_takes(layers, one.native) for one in (narrow, h200)]
    assert answers[0] <= answers[1]


def test_narrow_tiles_must_fill_the_gpu():
    b = Builder((4096, 1024))
    b.add(Linear(), "images", b.constant((48, 1024)))
    graph = b.graph()
    (node,) = graph.nodes
    (row,) = [row for row in kernels.of("linear", "cuda") if row.name == "narrow"]
    assert not row.automatic(node, graph, Target.named("h200"))
    assert row.automatic(node, graph, Target.named("a10")) is (4096 // 64 >= 72)
    assert row.automatic(node, graph, Target.named("l4"))
