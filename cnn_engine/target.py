"""Targets: the capabilities of a GPU or CPU as data, from a device or by name.

Kernels state what they need as :class:`Requires`; a :class:`Target` satisfies it or says what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from . import _cpu
from .errors import not_one_of
from .locks import cached_property

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Target:
    """A GPU or CPU that kernels are chosen for.

    Attributes:
        name: of the device's model, or what it was asked for by.
        kind: ``cuda`` or ``cpu``.
        architecture: ``sm_90``, ``x86_64`` or ``aarch64``.
        features: what its instructions can do; see ``GPU_FEATURES`` and, for CPUs, the end of this module.
        multiprocessors: of a GPU.
        shared_per_block: bytes of shared memory that a block may ask for.
        shared_per_multiprocessor: bytes of shared memory.
        largest_cluster: blocks of the largest thread block cluster; 1: there are none.
        l2_bytes: of the L2 cache: a GPU's, or of one core.
        memory_bandwidth: bytes per second.
        clock: the highest, in Hz.
        cores: of a CPU.
        groups: multiprocessors of each of a GPU's groups (GPCs), in which a cluster's blocks run; empty:
            not known.
        built: folder of ``csrc/cuda`` -> the architecture of its compiled code that runs on this GPU, such
            as ``sm_80``; None: compiled for the GPU itself, as targets by name are taken to be.
    """

    name: str
    kind: str
    architecture: str
    features: frozenset[str]
    multiprocessors: int = 0
    shared_per_block: int = 0
    shared_per_multiprocessor: int = 0
    largest_cluster: int = 1
    l2_bytes: int = 0
    memory_bandwidth: float = 0.0
    clock: float = 0.0
    cores: int = 0
    groups: tuple[int, ...] = ()
    built: Mapping[str, str] | None = field(default=None, hash=False)

    @staticmethod
    def named(name: str, option: str = "target") -> Target:
        """Returns the target called ``h200``, ``rtx4090``, ``sm_80``, ``zen4`` and so on; see ``NAMES``.

        Args:
            option: what an error calls the name.

        Raises:
            InputError: no such target.
        """
        found = NAMES.get(re.sub(r"[\s-]", "", name.lower())) if isinstance(name, str) else None
        if found is None:
            raise not_one_of(option, NAMES, name)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "native"}

    def features_of(self, folder: str) -> frozenset[str]:
        """Returns the features that kernels of a folder of ``csrc/cuda`` may use.

        Code for an older architecture runs on a newer GPU, without what is new.
        """
        if self.built is None:
            return self.features
        if folder not in self.built:
            return frozenset()
        return self.features & gpu_features(self.built[folder])

    @cached_property
    def native(self) -> Any:
        """The same as the compiled functions take it: ``Target`` of ``csrc/runtime/target.h``."""
        return _cpu.Target(
            self.number, self.multiprocessors, self.shared_per_block,
            self.shared_per_multiprocessor, self.largest_cluster,
            "dependent_launch" in self.features_of("common"), self.l2_bytes,
            self.memory_bandwidth, self.clock, *self.groups, *[0] * (MOST_GROUPS - len(self.groups)),
        )  # fmt: skip

    def __str__(self) -> str:
        """Returns what an error calls it: ``sm_80 (a100)``, or ``sm_80`` where that is its name."""
        return self.name if self.name == self.architecture else f"{self.architecture} ({self.name})"

    @property
    def number(self) -> int:
        """Compute capability of a GPU times ten, such as 90; 0 of other devices."""
        return compute_capability(self.architecture)

    @property
    def native_architecture(self) -> str:
        """Architecture of a GPU's own machine code: ``sm_90a``, with instructions of this GPU only."""
        return self.architecture + ("a" if self.number >= 90 else "")

    @property
    def float32_lanes(self) -> int:
        """Multiply-adds of float32 that a GPU's multiprocessor does per clock."""
        return _ARCHITECTURES[self.number].lanes if self.number in _ARCHITECTURES else 128


@dataclass(frozen=True)
class Requires:
    """Features of a target that a kernel needs.

    Attributes:
        features: that its instructions use.
        architectures: those that it is written and measured for; empty: all.
        folder: of ``csrc/cuda`` that it is compiled from.
        shared_per_block: bytes of shared memory.
        largest_cluster: blocks of a thread block cluster.
    """

    features: frozenset[str] = frozenset()
    architectures: tuple[str, ...] = ()
    folder: str = "common"
    shared_per_block: int = 0
    largest_cluster: int = 1

    def met_by(self, target: Target) -> bool:
        """Whether a kernel can run on ``target``."""
        return self.why_not(target) is None

    def why_not(self, target: Target) -> str | None:
        """Returns the features that ``target`` lacks, or None where a kernel can run on it."""
        if self.architectures and target.architecture not in self.architectures:
            wanted = " or ".join(self.architectures)
            return f"expected {wanted}, found {target}"
        if lacks := self.features - target.features:
            wanted = ", ".join(sorted(lacks))
            return f"expected {wanted}, found {target} without"
        if lacks := self.features - target.features_of(self.folder):
            found = (target.built or {}).get(self.folder, "no code")
            return (
                f"expected code of csrc/cuda/{self.folder} with {', '.join(sorted(lacks))}, found {found}; "
                f"install again with CNN_ENGINE_CUDA_ARCHITECTURES={target.native_architecture[3:]}"
            )
        for name, unit in (
            ("shared_per_block", " bytes of shared memory per block"),
            ("largest_cluster", " blocks per cluster"),
        ):
            if getattr(target, name) < getattr(self, name):
                wanted, found = getattr(self, name), getattr(target, name)
                return f"expected {wanted:,}{unit}, found {found:,} ({target.name})"
        return None


# ---- GPUs ----

#: Feature -> the compute capabilities that have it, as ten times the number: from the first on, up to but not
#: including the second. Source: PTX ISA 9.0, "Target ISA Notes" of the instructions; CUDA C++ Programming
#: Guide, "Feature Support per Compute Capability".
GPU_FEATURES: Mapping[str, tuple[int, int]] = {
    "mma_float16": (75, 1000),  # mma.sync m16n8k8 of float16
    "mma_int8": (75, 1000),  # mma.sync m8n8k16 of s8
    "mma_bfloat16": (80, 1000),  # mma.sync m16n8k16 of bfloat16
    "mma_tf32": (80, 1000),  # mma.sync m16n8k8 of tf32
    "async_copy": (80, 1000),  # cp.async
    "mma_fp8": (89, 1000),  # mma.sync of e4m3 and e5m2
    "clusters": (90, 1000),
    "dependent_launch": (90, 1000),  # griddepcontrol: programmatic dependent launch (PDL)
    "tma": (90, 1000),  # cp.async.bulk.tensor
    "wgmma": (90, 100),  # sm_90a's own, with setmaxnreg
    "tcgen05": (100, 120),
}


class _Architecture(NamedTuple):
    shared: int  # KiB of a multiprocessor
    block: int  # KiB that a block may ask for
    cluster: int  # blocks of the largest cluster
    lanes: int  # multiply-adds of float32 per clock and multiprocessor


#: By ten times the compute capability. Source: CUDA C++ Programming Guide, "Technical Specifications per
#: Compute Capability" and "Arithmetic Instructions"; clusters of more than 8 blocks: Hopper and Blackwell
#: Tuning Guides.
_ARCHITECTURES: Mapping[int, _Architecture] = {
    75: _Architecture(64, 64, 1, 64),
    80: _Architecture(164, 163, 1, 64),
    86: _Architecture(100, 99, 1, 128),
    87: _Architecture(164, 163, 1, 128),
    89: _Architecture(100, 99, 1, 128),
    90: _Architecture(228, 227, 16, 128),
    100: _Architecture(228, 227, 16, 128),
    120: _Architecture(100, 99, 8, 128),
}

#: As many groups as the compiled functions take.
MOST_GROUPS = 12


def compute_capability(architecture: str) -> int:
    """Returns the compute capability of ``sm_90`` or ``sm_90a`` times ten; 0 of other names."""
    found = re.fullmatch(r"sm_(\d+)[af]?", architecture)
    return int(found[1]) if found else 0


def gpu_features(architecture: str) -> frozenset[str]:
    """Returns the features of code for an architecture; those of one GPU alone need its ``a``, ``sm_90a``."""
    number = compute_capability(architecture)
    found = {name for name, (first, end) in GPU_FEATURES.items() if first <= number < end}
    own = {"wgmma", "tcgen05"}
    return frozenset(found if architecture[-1:] in "af" else found - own)


def _gpu(
    name: str,
    number: int,
    multiprocessors: int,
    l2_bytes: int,
    memory_bandwidth: float,
    clock: float,
    groups: tuple[int, ...] = (),
) -> Target:
    """Returns the target of a GPU model from its data sheet; the rest follows from its architecture.

    Args:
        number: ten times the compute capability.
        memory_bandwidth: bytes per second.
        clock: the highest, in Hz.
    """
    limits = _ARCHITECTURES[number]
    return Target(
        name, "cuda", f"sm_{number}", gpu_features(f"sm_{number}a"), multiprocessors,
        limits.block * KIB, limits.shared * KIB, limits.cluster, l2_bytes, memory_bandwidth, clock,
        groups=groups,
    )  # fmt: skip


#: Of 132 multiprocessors. Which are switched off differs from chip to chip; so many clusters of 4, 8 and 16
#: blocks as these have room for are what launches on an H200 were seen to have.
_HOPPERS_GROUPS = (18, 18, 18, 18, 16, 16, 14, 14)

_GPUS = (
    # NVIDIA H200 Tensor Core GPU data sheet (SXM): 4.8 TB/s. H100 architecture white paper: 132
    # multiprocessors; the driver reports 60 MiB of L2 for it and 50 for an H100.
    _gpu("h200", 90, 132, 60 * MIB, 4.8e12, 1.98e9, _HOPPERS_GROUPS),
    # NVIDIA H100 Tensor Core GPU data sheet and architecture white paper (SXM5): 3.35 TB/s, 50 MB of L2.
    _gpu("h100", 90, 132, 50 * MIB, 3.35e12, 1.98e9, _HOPPERS_GROUPS),
    # NVIDIA A100 80GB data sheet (SXM4) and Ampere architecture white paper: 2,039 GB/s, 40 MB of L2.
    _gpu("a100", 80, 108, 40 * MIB, 2.039e12, 1.41e9),
    # NVIDIA A10 data sheet: 600 GB/s; Ampere GA102 white paper: 72 multiprocessors, 6 MB of L2.
    _gpu("a10", 86, 72, 6 * MIB, 600e9, 1.695e9),
    # NVIDIA L4 data sheet: 300 GB/s; Ada architecture white paper (AD104): 58 multiprocessors, 48 MB of L2.
    _gpu("l4", 89, 58, 48 * MIB, 300e9, 2.04e9),
    # NVIDIA Ampere GA102 white paper: RTX 3090, 936 GB/s, 6 MB of L2.
    _gpu("rtx3090", 86, 82, 6 * MIB, 936e9, 1.695e9),
    # NVIDIA Ada GPU architecture white paper: RTX 4090, 1,008 GB/s, 72 MB of L2.
    _gpu("rtx4090", 89, 128, 72 * MIB, 1.008e12, 2.52e9),
    # NVIDIA RTX Blackwell GPU architecture white paper: RTX 5090, 1,792 GB/s, 96 MB of L2.
    _gpu("rtx5090", 120, 170, 96 * MIB, 1.792e12, 2.407e9),
    # NVIDIA T4 data sheet: 320 GB/s; Turing architecture white paper (TU104): 40 multiprocessors, 4 MB of L2.
    _gpu("t4", 75, 40, 4 * MIB, 320e9, 1.59e9),
    # NVIDIA DGX B200 data sheet: 8 TB/s per GPU; 148 multiprocessors and 126 MB of L2 as the driver reports.
    _gpu("b200", 100, 148, 126 * MIB, 8e12, 1.965e9),
    # NVIDIA Jetson AGX Orin technical brief (64 GB): 204.8 GB/s, 16 multiprocessors, 4 MB of L2.
    _gpu("orin", 87, 16, 4 * MIB, 204.8e9, 1.3e9),
)  # fmt: skip

#: The model whose numbers an architecture by itself has.
_MODELS = {
    "sm_75": "t4", "sm_80": "a100", "sm_86": "a10", "sm_87": "orin", "sm_89": "l4", "sm_90": "h100",
    "sm_100": "b200", "sm_120": "rtx5090",
}  # fmt: skip


# ---- CPUs ----
#
# Features of x86: avx2 (with FMA), avx512 (F, VL, BW, DQ), avx512_bf16, avx512_bf16_fast (a pair of products
# at the rate of a multiply-add of float32, which Intel's do not reach), avx512_vnni, avx_vnni, amx_bf16,
# amx_int8; of Arm: neon, dotprod, i8mm, bf16, sve.

#: The instruction sets that the CPU kernels are compiled for, the best last, and what each needs.
INSTRUCTION_SETS: Mapping[str, frozenset[str]] = {
    "baseline": frozenset(),
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx2", "avx512"}),
}

_AVX512 = INSTRUCTION_SETS["avx512"]


def _cpu_model(
    name: str,
    architecture: str,
    features: frozenset[str],
    cores: int,
    l2_bytes: int,
    memory_bandwidth: float,
    clock: float,
) -> Target:
    return Target(
        name, "cpu", architecture, features, cores=cores, l2_bytes=l2_bytes,
        memory_bandwidth=memory_bandwidth, clock=clock,
    )  # fmt: skip


_CPUS = (
    # AMD EPYC 9654 product page and Zen 4 optimization guide: 96 cores, 1 MiB of L2 each, 460.8 GB/s.
    _cpu_model(
        "zen4", "x86_64", _AVX512 | {"avx512_bf16", "avx512_bf16_fast", "avx512_vnni"},
        96, MIB, 460.8e9, 3.7e9,
    ),
    # Intel Xeon Platinum 8480+ product page (Sapphire Rapids): 56 cores, 2 MiB of L2 each, eight channels of
    # DDR5-4800.
    _cpu_model(
        "spr", "x86_64",
        _AVX512 | {"avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"},
        56, 2 * MIB, 307.2e9, 3.8e9,
    ),
    # Intel Xeon Platinum 8380 product page (Ice Lake): 40 cores, 1.25 MiB of L2 each, eight channels of
    # DDR4-3200.
    _cpu_model("icx", "x86_64", _AVX512 | {"avx512_vnni"}, 40, 1280 * KIB, 204.8e9, 3.4e9),
    # AMD EPYC 7763 product page (Zen 3), as a CPU with AVX2 and no more: 64 cores, 512 KiB of L2 each.
    _cpu_model("avx2", "x86_64", frozenset({"avx2"}), 64, 512 * KIB, 204.8e9, 3.5e9),
    # AWS Graviton3 (Arm Neoverse V1 technical reference manual): 64 cores, 1 MiB of L2 each, eight
    # channels of DDR5-4800.
    _cpu_model(
        "neoverse_v1", "aarch64", frozenset({"neon", "dotprod", "i8mm", "bf16", "sve"}),
        64, MIB, 307.2e9, 2.6e9,
    ),
    # Ampere Altra Q80-30 product brief (Arm Neoverse N1), as an Arm CPU with NEON and dot products alone.
    _cpu_model("neon", "aarch64", frozenset({"neon", "dotprod"}), 80, MIB, 204.8e9, 3.0e9),
)  # fmt: skip


def _names() -> dict[str, Target]:
    found = {target.name: target for target in (*_GPUS, *_CPUS)}
    found |= {name: replace(found[model], name=name) for name, model in _MODELS.items()}
    return found


#: Every target that can be asked for by name.
NAMES: Mapping[str, Target] = _names()
