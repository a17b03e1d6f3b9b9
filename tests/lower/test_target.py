"""Targets: what a GPU or CPU can do as data, by name and of a device, and what kernels refuse by it."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from cnn_engine import _cpu, devices
from cnn_engine.devices import cuda_module
from cnn_engine.errors import InputError
from cnn_engine.target import GPU_FEATURES, INSTRUCTION_SETS, NAMES, Requires, Target, gpu_features

#: What the driver says of an H200, and of an A100 of 80 GB.
DEVICES = {
    "h200": {
        "name": "NVIDIA H200", "capability": (9, 0), "multiprocessors": 132,
        "shared_per_block": 232_448, "shared_per_multiprocessor": 233_472, "largest_cluster": 16,
        "groups": (18, 18, 18, 18, 16, 16, 14, 14), "l2_bytes": 62_914_560,
        "memory_bandwidth": 4.8e12, "clock": 1.98e9,
    },
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0), "multiprocessors": 108,
        "shared_per_block": 166_912, "shared_per_multiprocessor": 167_936, "largest_cluster": 1,
        "groups": (), "l2_bytes": 41_943_040, "memory_bandwidth": 2.039e12, "clock": 1.41e9,
    },
}  # fmt: skip

#: What decides reads of a target: all but how it is called, what its code is, and what is measured.
DECIDED_BY = [
    field.name
    for field in dataclasses.fields(Target)
    if field.name not in ("name", "built", "memory_bandwidth", "clock")
]


def needs(*features: str, **more) -> Requires:
    return Requires(frozenset(features), **more)


class Module:
    """The compiled module on a machine with some of ``DEVICES``."""

    def __init__(self, folders, *found):
        self.folders = folders
        self.found = [dict(DEVICES[name]) for name in found]
        self.asked = []

    def device_properties(self, index):
        return {
            "name": self.found[index]["name"],
            "compute_capability": self.found[index]["capability"],
        }

    def device_target(self, index):
        self.asked.append(index)
        return {k: v for k, v in self.found[index].items() if k not in ("name", "capability")}


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that puts a compiled module and its GPUs in the place of ours."""

    def put(folders, *found):
        module = Module(folders, *found)
        monkeypatch.setattr(cuda_module, "load", lambda: module)
        return module

    cuda_module.target.cache_clear()
    yield put
    cuda_module.target.cache_clear()


ALL = {"common": "80-real 90a-real 120-virtual", "sm90": "90a-real"}


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_a_target_by_name_is_that_of_the_device(machine, name):
    machine(ALL, name)
    live, named = cuda_module.target(0), Target.named(name)
    assert {n: getattr(live, n) for n in DECIDED_BY} == {n: getattr(named, n) for n in DECIDED_BY}


@pytest.mark.gpu
def test_a_target_by_name_is_that_of_the_device_that_is_here():
    live = devices.select("cuda").target
    known = [name for name in NAMES if name in live.name.lower().replace(" ", "")]
    if not known:
        pytest.skip(f"{live.name} has no name here")
    named = Target.named(known[0])
    if named.multiprocessors != live.multiprocessors:
        pytest.skip(f"{live.name} is another model of that name")
    same = [name for name in DECIDED_BY if name != "groups"]  # which differ from chip to chip
    assert {n: getattr(live, n) for n in same} == {n: getattr(named, n) for n in same}
    assert sum(live.groups) in (0, live.multiprocessors)
    assert live.memory_bandwidth == pytest.approx(named.memory_bandwidth, rel=0.1)


def test_each_device_is_asked_once_and_for_itself(machine):
    module = machine(ALL, "h200", "a100")
    found = [cuda_module.target(index) for index in (1, 0, 1, 0)]
    assert [target.architecture for target in found] == ["sm_80", "sm_90", "sm_80", "sm_90"]
    assert [target.multiprocessors for target in found] == [108, 132, 108, 132]
    assert module.asked == [1, 0]


def test_code_for_an_older_gpu_has_not_what_is_new(machine):
    machine({"common": "80-virtual", "sm90": "90a-real"}, "h200")
    target = cuda_module.target(0)
    assert target.built == {"common": "sm_80", "sm90": "sm_90a"}
    assert not target.features_of("common") & {"clusters", "dependent_launch", "wgmma"}
    assert target.features_of("sm90") >= {"clusters", "dependent_launch", "wgmma"}
    assert needs("wgmma", folder="sm90").why_not(target) is None
    assert needs("clusters").why_not(target) == (
        "expected code of csrc/cuda/common with clusters, found sm_80; "
        "install again with CNN_ENGINE_CUDA_ARCHITECTURES=90a"
    )


def test_a_folder_without_code_for_the_gpu_has_nothing(machine):
    machine({"common": "80-real", "sm90": "90a-real"}, "a100")
    target = cuda_module.target(0)
    assert target.built == {"common": "sm_80"}
    assert target.features_of("sm90") == frozenset()
    assert "mma_tf32" in target.features_of("common")


@pytest.mark.parametrize(
    ("architectures", "capability", "code"),
    [
        ("80-real 90a-real 120-virtual", (9, 0), "sm_90a"),
        ("80-real 86-real 89-real", (8, 9), "sm_89"),
        ("80-real 90a-real", (8, 6), "sm_80"),
        ("80-virtual 90a-real", (9, 0), "sm_90a"),
        ("80-virtual", (9, 0), "sm_80"),
        ("80-real 80-virtual", (12, 0), "sm_80"),
        ("100f-real", (10, 3), "sm_100f"),
        ("90-virtual 80-real", (8, 9), "sm_80"),
        ("90a-real", (10, 0), None),
        ("75-real", (7, 5), "sm_75"),
    ],
)
def test_the_code_that_a_gpu_runs(architectures, capability, code):
    assert cuda_module.code_for(architectures, capability) == code


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("t4", {"mma_float16", "mma_int8"}, {"mma_bfloat16", "mma_tf32", "async_copy"}),
        ("a100", {"mma_tf32", "mma_bfloat16", "async_copy"}, {"mma_fp8", "clusters", "wgmma"}),
        ("l4", {"mma_fp8", "mma_tf32"}, {"clusters", "dependent_launch", "tma", "wgmma"}),
        ("h100", {"wgmma", "tma", "clusters", "mma_fp8"}, {"tcgen05"}),
        ("b200", {"tcgen05", "tma", "clusters"}, {"wgmma"}),
        ("rtx5090", {"clusters", "tma", "mma_fp8"}, {"wgmma", "tcgen05"}),
    ],
)
def test_features_of_gpus(name, has, lacks):
    found = Target.named(name).features
    assert has <= found
    assert not lacks & found
    assert has | lacks <= GPU_FEATURES.keys()


def test_code_of_an_architecture_lacks_what_needs_its_own():
    """wgmma is of sm_90a alone: compiled for sm_90 there is none."""
    assert "wgmma" not in gpu_features("sm_90")
    assert "wgmma" in gpu_features("sm_90a")
    assert "clusters" in gpu_features("sm_90")


@pytest.mark.parametrize(
    ("requires", "name", "reason"),
    [
        (needs("wgmma"), "a100", "expected wgmma, found sm_80 (a100) without"),
        (needs("wgmma"), "rtx5090", "expected wgmma, found sm_120 (rtx5090) without"),
        (
            needs("mma_tf32", "async_copy"), "t4",
            "expected async_copy, mma_tf32, found sm_75 (t4) without",
        ),
        (Requires(architectures=("sm_90",)), "l4", "expected sm_90, found sm_89 (l4)"),
        (
            Requires(shared_per_block=120_000), "rtx4090",
            "expected 120,000 bytes of shared memory per block, found 101,376 (rtx4090)",
        ),
        (
            Requires(largest_cluster=16), "rtx5090", "expected 16 blocks per cluster, found 8 (rtx5090)",
        ),
        (Requires(architectures=("sm_90",), largest_cluster=16, shared_per_block=200_000), "h200", None),
        (needs("avx512_bf16"), "avx2", "expected avx512_bf16, found x86_64 (avx2) without"),
        (needs("avx512_bf16"), "zen4", None),
        (Requires(), "neon", None),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_lacking(requires, name, reason):
    assert requires.why_not(Target.named(name)) == reason


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_a_whole_target(name):
    target = Target.named(name)
    assert Target.named(name.upper()) is target
    assert target.name == name
    assert target.memory_bandwidth > 1e11
    assert 1e9 < target.clock < 5e9
    if target.kind == "cuda":
        assert target.multiprocessors > 0
        assert 48 * 1024 < target.shared_per_block <= target.shared_per_multiprocessor
        assert (target.largest_cluster > 1) == ("clusters" in target.features)
        assert target.features <= GPU_FEATURES.keys()
        assert type(target.native).__name__ == "Target"
    else:
        assert target.cores > 0
        assert 2**18 < target.l2_bytes < 2**22


@pytest.mark.parametrize("name", ["h200", "zen4"])
def test_targets_are_pickled(name):
    target = dataclasses.replace(Target.named(name))
    assert target.native is target.native
    again = pickle.loads(pickle.dumps(target))
    assert again == target
    assert hash(again) == hash(target)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"^target: expected one of h200.*did you mean rtx4090\?$"):
        Target.named("rtx4091")
    with pytest.raises(InputError, match=r"^target: expected one of .* found 5$"):
        Target.named(5)


def test_the_cpu_is_a_target_by_the_instruction_set_that_runs():
    device, before = devices.select("cpu"), _cpu.selected_instruction_set()
    try:
        for name in _cpu.instruction_sets():
            _cpu.select_instruction_set(name)
            assert INSTRUCTION_SETS[name] <= device.target.features
            assert ("avx512_bf16" in device.target.features) == (not _cpu.bfloat16_why_not())
            assert ("avx512" in device.target.features) == (name == "avx512")
    finally:
        _cpu.select_instruction_set(before)
    assert device.target.cores >= 1
    assert device.target is device.target
