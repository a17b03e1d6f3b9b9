"""What the linker sees of the kernels that are compiled once for each instruction set."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build" / f"cmake-{sys.implementation.cache_tag}" / "CMakeFiles"

#: The targets whose code needs more than a CPU may have.
WIDE = (
    "cpu_avx2", "cpu_avx512", "cpu_avx512bf16", "cpu_avx_vnni", "cpu_avx512_vnni", "cpu_amx",
)  # fmt: skip


def weak(objects: list[Path]) -> set[str]:
    """Returns the functions and data that the linker may take from these files or from others."""
    found = subprocess.run(
        ["nm", "--defined-only", "-C", *map(str, objects)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = (line.split(maxsplit=2) for line in found.splitlines())
    symbols = {row[2] for row in rows if len(row) == 3 and row[1] in "WVvu"}
    return {name for name in symbols if not name.startswith("DW.ref.")}  # an address, no code


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here")
@pytest.mark.parametrize("target", WIDE)
def test_code_of_a_wide_instruction_set_is_taken_by_its_own_files_alone(target):
    """A function that several files define is kept once: the one kept may not need AVX on every CPU."""
    objects = sorted((BUILD / f"{target}.dir").rglob("*.o"))
    if not objects:
        pytest.skip("no objects of a build here")
    assert not weak(objects)
