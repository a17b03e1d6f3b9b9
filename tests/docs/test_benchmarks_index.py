"""docs/benchmarks.md is the index of benchmarks and of their results."""

from __future__ import annotations

import re

from conftest import ROOT

FOLDER = ROOT / "benchmarks"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

#: Processes that ``models`` starts, for memory of their own.
PROCESSES = {"models_worker", "resident"}


def listed(heading: str, column: int) -> list[str]:
    """Returns the files that a column of the table with that first heading names."""
    lines = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("| ").split(" | ")[column] for line in lines]
    return re.findall(r"`(\w+)(?:\.json)?`", " ".join(cells))


def test_what_can_be_run_is_a_benchmark_and_all_else_a_part():
    sources = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
    runs = {name for name, text in sources.items() if '__name__ == "__main__"' in text} - PROCESSES
    assert sorted(listed("benchmark", 0)) == sorted(runs)
    files = {path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".json")}
    assert sorted(listed("part of", 1)) == sorted(files - runs - {"__init__"})


def test_a_benchmark_has_its_own_name_in_its_help():
    for name in listed("benchmark", 0):
        named = re.findall(
            r'result_file\.parser\(\s*"(\w+)"', (FOLDER / f"{name}.py").read_text("utf-8")
        )
        assert named == [name]


def test_every_folder_of_results_is_linked():
    linked = set(re.findall(r"\.\./benchmarks/results/([a-z0-9-]+)/", PAGE))
    assert linked == {path.name for path in (FOLDER / "results").iterdir() if path.is_dir()}
