"""First lines of docstrings stand alone in an index: an imperative or a noun phrase, with the noun named."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "cnn_engine"

#: A noun that is left out, or a question in the place of a name.
UNNAMED = re.compile(
    r"\bwhat\b|\bthat which\b|^(the \w+ that is|those|that|how|who|where)\b", re.IGNORECASE
)
#: First lines that are still to be written anew, at most, by folder or module: only ever fewer.
LEFT = {
    "cli.py": 1, "compare": 1, "devices": 1, "doctor.py": 1, "download.py": 2, "engine": 1,
    "ensemble": 7, "graph": 29, "infer": 15, "io": 4, "kernel": 2, "kernels": 5, "loadgen": 4,
    "lower": 10, "measure": 6, "operators": 8, "plan": 9, "progress.py": 1, "quantize": 14,
    "report": 1, "run.py": 1, "serve": 11, "target.py": 1, "transfer": 6, "vision": 16,
}  # fmt: skip


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
    found = Counter()
    lines = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        for owner, line in first_lines(ast.parse(path.read_text(encoding="utf-8"))):
            if UNNAMED.search(line):
                found[name.parts[0]] += 1
                lines.append(f"{name}: {owner}: {line}")
    more = {part for part, count in found.items() if count > LEFT.get(part, 0)}
    assert not more, "\n".join(
        line for line in lines if line.partition("/")[0].partition(":")[0] in more
    )


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
