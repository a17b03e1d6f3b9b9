"""One word for one thing: names that were this project's own, and have the field's now, do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Container
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Identifiers of Python and C++, and what stands in their place.
NAMES = {
    "operands_of": "compute_dtype_of", "round_operands": "set_compute_dtype", "brought": "upload",
    "let_go": "release", "homes": "memory_spaces", "stand_ins": "fallbacks",
    "with_stored": "with_element_type", "check_stored": "check_storage", "Stored": "ElementType",
    "Conv2dOperands": "ElementType",
    "begin_products": "wgmma_fence", "commit_products": "wgmma_commit", "matrix_at": "matrix_descriptor",
    "init_phases": "init_mbarrier", "wait_for_phase": "wait_mbarrier", "expect_bytes": "expect_tx",
    "give_registers": "setmaxnreg_dec", "take_registers": "setmaxnreg_inc", "copy_taps": "tma_load_im2col",
    "publish_to_engines": "fence_async_proxy", "with_ends": "with_known_activations",
    "RowsEnd": "RowsEpilogue", "Conv2dStored": "Images", "Conv2dStorage": "Images",
    "stored_as": "storage_dtypes", "joins_stem": "why_not_fuse",
    "makes_block": "why_not_fuse", "makes_means": "why_not_fuse", "normalizes": "why_not_fuse",
    "joins_layers": "why_not_fuse", "runs_on": "requires", "telling": "progress",
}  # fmt: skip
#: The same, of Python alone: C++ has other meanings for some of them.
PYTHON = {
    "is_stored": "uses_storage_dtype", "takes_up": "packs_input", "takes_columns": "allows_pitch",
    "takes_pitch": "allows_pitch", "takes_stream": "accepts_stream", "goes_on": "has_rest",
    "reads_ahead": "reads_early", "chained": "fused_layers", "is_mean_of_places": "is_spatial_mean",
    "exchanged": "swapped", "told": "describe, progress", "convolve_products": "convolve_matmuls",
    "fuse_neighbours": "fuse_conv_pairs", "fuse_gate_means": "fuse_squeeze_excite",
    "scale_by_gates": "fuse_excite_scales", "fuse_functions_of_rows": "fuse_linear_activations",
    "recognise_functions": "recognise_activations", "plain_convolutions": "lower_convolutions",
    "pool_first": "pool_before_convolutions",
}  # fmt: skip
#: The same, of kernels, on the CPU and on CUDA.
KERNELS = {
    "place": "position", "places": "positions", "kPlaces": "kPositions", "tap": "kernel_offset",
    "kTaps": "kKernelOffsets", "Taps": "KernelOffsets", "told": "full_barrier", "Stays": "Persistent",
    "stays": "is_persistent", "staying": "persistent", "Chain": "NetworkShape", "Ahead": "Prefetch",
    "kAhead": "kPrefetch", "kAlike": "kSame", "Products": "Gemm, Instruction",
    "products": "macs", "ProductOf": "GemmOf", "TileProduct": "TileGemm", "ends": "known",
    "send_cluster": "store_cluster_async", "end_tile": "epilogue_tile", "Laps": "StepClock", "laps": "clock",
    "finish_sums": "tile_epilogue", "for_sums": "for_partial_sums",
}  # fmt: skip
#: Phrases of comments of kernels.
KERNEL_PHRASES = {
    r"\bplaces\b": "positions",
    r"\btaps?\b": "kernel offsets",
    r"\btold of\b": "descriptor",
    r"\bblocks (that )?stay\b": "persistent",
}
#: Files of kernels that resample: a tap is the field's word for a weight of their filters.
RESAMPLING = {"interpolate_axis", "grid_sample", "resample"}
TAPS = {"tap", "taps", "kTaps", "Taps"}
#: Phrases of docstrings, comments and messages of the whole tree; test_prose.py quotes them.
PHRASES = {
    r"\blaboratory\b": "measurement tools",
    r"(?<!take )(?<!takes )\bin turns\b": "interleaved",
    r"\bblocks that stay\b": "persistent blocks",
    r"\b(?:images|bytes|rows?|threads|calls|registers|samples|us|ns|one|FLOPs|MFLOP|lines?) an? "
    r"(?:second|image|pass|thread|block|call|point|channel|layer|copy|member|GPU|CPU|output|batch)\b": "per",
}
#: Attributes of records and calls.
ATTRIBUTES = {
    "operands": "compute_dtype", "stored": "storage_dtype", "alike": "same_storage",
}  # fmt: skip
#: Files and folders of the package, of csrc, of the benchmarks and, after ``test_``, of the tests.
FILES = {
    "own": "user_kernels", "telling": "progress", "ahead": "early_reads", "apart": "per_image",
    "sweeps": "l2_prefetch", "replay": "cuda_graph", "program": "lowering", "source": "loading",
    "whole": "fused_network", "joined_cuda": "fusing", "products": "gemm", "movement": "data_movement",
    "storage": "reduced_precision", "tails": "mean_linear", "gates": "squeeze_excite", "pairs": "conv_pairs",
    "affine": "batch_norm", "wanted": "expected", "trying": "preflight", "once": "run_cases",
    "trial": "sandbox", "job": "sandbox_worker", "board": "leaderboard",
    "ceilings": "stage_limits", "folder": "output_dir",
    "slots": "buffers", "local": "local_pool", "records": "cupti", "pace": "adaptive_threads",
    "ends": "epilogue", "pool": "plan_cache", "record": "result_file", "cells": "configurations",
    "chains": "fused_networks", "chain": "fused_network", "computed_operands": "computed_inputs",
    "turns": "machine_lock", "damaged_records": "damaged_results", "benchmark_record": "result_file",
}  # fmt: skip
#: Files that have these names for another reason: source code of a user, a program that NVRTC compiles.
ALLOWED = {
    "cnn_engine/kernels/user/source.py", "cnn_engine/ensemble/source.py", "csrc/cuda/fused/program.cuh",
    "csrc/cuda/sm80/storage.cuh", "csrc/cuda/fused/network_shape.cpp", "csrc/cuda/fused/chain.h",
}  # fmt: skip
WORD = re.compile(r"\b[A-Za-z_]\w*\b")
CODE = (".h", ".cpp", ".cu", ".cuh", ".def")
SOURCES = sorted(
    path
    for folder, kinds in (("cnn_engine", (".py",)), ("csrc", CODE))
    for path in (ROOT / folder).rglob("*")
    if path.suffix in kinds
)
#: The same of the whole tree, without this list.
ALL_SOURCES = sorted(
    path
    for folder in (
        "benchmarks",
        "cifar10",
        "csrc",
        "cnn_engine",
        "examples",
        "fashion_mnist",
        "fuzz",
        "scripts",
        "tests",
    )
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", *CODE) and path != Path(__file__).resolve()
)


def names(path: Path, known: Container[str]) -> list[str]:
    """Returns the ``known`` names that are identifiers of a file, sorted."""
    text = path.read_text(encoding="utf-8")
    if not any(word in known for word in WORD.findall(text)):
        return []  # few files have one, and reading tokens is slow
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = {token.string for token in tokens if token.type == tokenize.NAME}
    else:
        code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)
        found = set(WORD.findall(code))
    return sorted(name for name in found if name in known)


def test_identifiers_have_the_fields_names():
    found = [
        f"{path.relative_to(ROOT)}: {name} -> {NAMES[name]}"
        for path in ALL_SOURCES
        for name in names(path, NAMES)
    ]
    assert not found


def test_python_has_the_fields_names():
    found = [
        f"{path.relative_to(ROOT)}: {name} -> {PYTHON[name]}"
        for path in ALL_SOURCES
        if path.suffix == ".py"
        for name in names(path, PYTHON)
    ]
    assert not found


def test_kernels_have_the_fields_names():
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("csrc/cuda/", "csrc/cpu/")):
            continue
        allowed = TAPS if path.stem in RESAMPLING else set()
        found += [
            f"{name}: {word} -> {KERNELS[word]}" for word in names(path, KERNELS.keys() - allowed)
        ]
        comments = " ".join(re.findall(r"//([^\n]*)", path.read_text(encoding="utf-8")))
        found += [
            f"{name}: {match[0]!r}: write {instead}"
            for phrase, instead in KERNEL_PHRASES.items()
            for match in re.finditer(phrase, comments, re.IGNORECASE)
            if match[0].lower() not in allowed
        ]
    assert not found


def test_text_of_the_tree_has_the_fields_words():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}: write {instead}"
        for path in ALL_SOURCES
        if path.suffix == ".py" and path.name != "test_prose.py"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase, path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert not found


def test_attributes_have_the_fields_names():
    found = [
        f"{path.relative_to(ROOT)}: .{name} -> {ATTRIBUTES[name]}"
        for path in SOURCES
        if path.suffix == ".py"
        for name in re.findall(
            r"\bop\.(\w+)|\bvalue\.(\w+)|\bkernel\.(\w+)", path.read_text(encoding="utf-8")
        )
        for name in filter(None, name)
        if name in ATTRIBUTES
    ]
    assert not found


def test_files_have_the_fields_names():
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    found = {
        name: FILES[stem]
        for path in (*SOURCES, *scripts)
        if (stem := path.stem.removeprefix("test_")) in FILES
        and (name := str(path.relative_to(ROOT))) not in ALLOWED
    }
    assert not found
