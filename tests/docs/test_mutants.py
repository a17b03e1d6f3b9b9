"""The list of faults in ``tests/helpers/mutants.py`` is of lines and tests that there are."""

from __future__ import annotations

import ast

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_fault_can_be_made_and_has_its_test(mutant, tmp_path):
    path = tmp_path / mutant.path
    path.parent.mkdir(parents=True)
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")
    mutant.apply(tmp_path)
    assert path.read_text(encoding="utf-8") != before
    file, _, test = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert test.partition("[")[0] in names


def test_names_are_their_own():
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
