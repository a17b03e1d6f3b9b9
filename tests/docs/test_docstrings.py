"""First lines of docstrings stand alone in an index: an imperative or a noun phrase, with the noun named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "cnn_engine"

#: A noun that is left out, or a question in the place of a name.
UNNAMED = re.compile(
    r"\bwhat\b|\bthat which\b|^(the \w+ that is|those|that|how|who|where)\b", re.IGNORECASE
)


def first_lines(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields names and first lines of a module, its public classes and functions, and their methods."""
    if text := ast.get_docstring(tree):
        yield "module", text.partition("\n")[0]
    bodies = [("", tree)]
    for prefix, owner in bodies:
        for node in owner.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                if text := ast.get_docstring(node):
                    yield f"{prefix}{node.name}", text.partition("\n")[0]
                if isinstance(node, ast.ClassDef):
                    bodies.append((f"{node.name}.", node))


def test_first_lines_name_their_nouns():
    found = [
        f"{path.relative_to(ROOT)}: {owner}: {line}"
        for path in sorted(ROOT.rglob("*.py"))
        for owner, line in first_lines(ast.parse(path.read_text(encoding="utf-8")))
        if UNNAMED.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("Returns what a kernel needs.", False),
        ("How many samples were taken.", False),
        ("The pass that is compared.", False),
        ("Number of samples.", True),
        ("Returns the nodes that make ``x``.", True),
    ],
)
def test_lines_without_a_noun_are_found(line, fits):
    assert (UNNAMED.search(line) is None) == fits
