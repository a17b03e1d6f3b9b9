"""Imports go one way: what stands lower knows nothing of what stands on it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cnn_engine

ROOT = Path(cnn_engine.__file__).parent
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from house import PURPOSES, ROWS, calls, picture  # noqa: E402

sys.path.pop(0)

RANK = {part: rank for rank, row in enumerate(ROWS) for part in row}
DOORS = len(ROWS)

#: Imports inside of functions that go up: what a user calls on an engine, and which stands above it.
LAZY = {
    ("engine/engine.py", "measure"),
    ("engine/engine.py", "export"),
    ("kernels/fused_network.py", "plan"),
}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields every part of the package that a file imports, and whether at its top level."""
    package = ["cnn_engine", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(tree.body)
    hints = {
        inner
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hints:
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # ``from .. import engine`` names parts; ``from ..engine import x`` is one itself.
            names = (
                [f"{module}.{a.name}" for a in node.names] if module == "cnn_engine" else [module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("cnn_engine."):
                yield part_of(name), node in top


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    name = str(path.relative_to(ROOT))
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    rank = RANK.get(own, DOORS)
    for part, at_top in imports(path):
        if part in RANK or rank < DOORS:
            above = RANK.get(part, DOORS) > rank
            assert not above or (not at_top and (name, part) in LAZY), f"{name} imports {part}"


def test_the_picture_has_every_row():
    assert len(PURPOSES) == len(ROWS)
    drawn = picture()
    assert all(purpose in drawn for purpose in PURPOSES)
    assert all(row[0] in drawn for row in ROWS)
    assert all((ROOT / part).is_dir() for row in ROWS[1:] for part in row if part != "workload")


def test_a_second_predict_makes_few_calls():
    """It goes straight to the plan: no pass, no lookup of kernels, no allocation of a plan."""
    second = calls(2)
    assert len(second) <= 10
    assert {file.partition("/")[0] for file, _ in second} == {"engine", "plan"}


def test_no_circles():
    """Modules of one part do not wait for each other while they are imported."""
    names = {
        ".".join(["cnn_engine", *p.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): p
        for p in FILES
    }
    needs: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        needs[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([node.module] if node.module else [])])
                found = {f"{module}.{alias.name}" for alias in node.names} & names.keys()
                needs[name] |= found or ({module} & names.keys())
        # A package is always there before its modules, which may register themselves with it.
        needs[name] -= {other for other in needs[name] if name.startswith(f"{other}.")}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in needs[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_the_package_shows_what_is_the_users_alone():
    """Its names, those that are imported when first asked for too; no module that it uses itself."""
    assert set(dir(cnn_engine)) == {*cnn_engine.__all__, "__version__"}
    assert all(hasattr(cnn_engine, name) for name in dir(cnn_engine))


def test_interrupts_are_imported_before_all_else():
    """Until then Ctrl-C is Python's own traceback."""
    body = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")).body
    found = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert ast.unparse(found[0]) == "from __future__ import annotations"
    assert ast.unparse(found[1]) == "from . import interrupts"


def modules_after(code: str) -> set[str]:
    """Returns the modules that a fresh process has after ``code``, without NumPy's and what these need."""
    lines = (
        "import sys, numpy",
        "before = set(sys.modules)",
        code,
        "print(*set(sys.modules) - before)",
    )
    run = [sys.executable, "-c", "\n".join(lines)]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


def test_the_package_brings_few_modules():
    """What it costs to import it is felt at every start."""
    found = modules_after("import cnn_engine")
    own = {name for name in found if name.split(".")[0] == "cnn_engine"}
    assert {name for name in own if ".operators." not in name} == {
        "cnn_engine", "cnn_engine._cpu", "cnn_engine.errors", "cnn_engine.graph", "cnn_engine.graph.dims",
        "cnn_engine.graph.graph", "cnn_engine.graph.guards", "cnn_engine.graph.mapped",
        "cnn_engine.graph.network", "cnn_engine.graph.terms",
        "cnn_engine.interrupts", "cnn_engine.locks", "cnn_engine.operators", "cnn_engine.types",
        "cnn_engine.workload",
    }  # fmt: skip
    assert {name.split(".")[0] for name in found - own} <= sys.stdlib_module_names
    assert not found & {"argparse", "json", "shutil", "subprocess", "tempfile", "unittest"}


def test_an_engine_that_was_saved_needs_few_modules():
    """Neither ONNX's converters nor what compiles, confines or caches kernels."""
    found = modules_after(
        "import cnn_engine; cnn_engine.load_engine; import cnn_engine.engine.engine"
    )
    unneeded = (
        "graph.onnx",
        "kernels.user",
        "io.cache",
        "io.sandbox",
        "measure",
        "report",
        "vision",
    )
    assert not {
        name for name in found if name.startswith(tuple(f"cnn_engine.{n}" for n in unneeded))
    }
    assert not found & {"argparse", "numpy.typing", "shutil", "subprocess", "tempfile"}
