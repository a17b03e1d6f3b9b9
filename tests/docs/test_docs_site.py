"""Pages made from the code have all of it, and links that leave docs/ lead to copies on the site."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cnn_engine import environment_variables
from cnn_engine.__main__ import COMMANDS
from cnn_engine.compare import command as compare
from cnn_engine.kernels import TABLE
from cnn_engine.operators import KINDS
from cnn_engine.report import csv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import docs_site  # noqa: E402

sys.path.pop(0)


def test_every_option_of_every_command_is_on_the_page():
    page = docs_site.command_line()
    sections = {part.partition("\n")[0].strip("# "): part for part in page.split("\n\n##")}
    assert {*COMMANDS, "kernel new", "kernel check", "kernel rank"} <= set(sections)
    for name, parser in docs_site.parsers():
        for action in parser._actions:
            for option in action.option_strings:
                assert option in sections[name] or option in ("-h", "--help", "--version", "--list")


def test_every_operator_and_its_kernels_are_on_the_page():
    rows = {
        line.split("`")[1]: line
        for line in docs_site.operators().splitlines()
        if line.startswith("| `")
    }
    assert set(rows) == {*KINDS, *(kernel.op for kernel in TABLE)}
    for kernel in TABLE:
        assert f"`{kernel.name}`" in rows[kernel.op]


def test_every_column_and_exit_code_is_on_its_page():
    page = docs_site.csv_columns()
    for column in (*csv.COLUMNS, *compare.COLUMNS):
        assert f"| `{column}` |" in page
    rows = {line.split("`")[1] for line in docs_site.exit_codes().splitlines() if "`" in line}
    assert {"run", "compare", "transfer", "infer", "kernel check"} <= rows


def test_every_environment_variable_is_on_the_page():
    page = docs_site.environment_variables()
    tables = (
        environment_variables.PROGRAM,
        environment_variables.BUILD,
        environment_variables.TESTS,
    )
    for table in tables:
        for name, variable in table.items():
            assert f"| `{name}` |" in page
            assert variable.meaning in page


def keys(node: object) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(keys, node))
    if not isinstance(node, dict):
        return set()
    found = set(node["properties"]) if isinstance(node.get("properties"), dict) else set()
    return found.union(*map(keys, node.values()))


def test_every_key_of_the_schema_is_on_the_page():
    page = docs_site.result_json()
    schema = json.loads((ROOT / "cnn_engine" / "report" / "results.schema.json").read_text("utf-8"))
    names = keys(schema["$defs"])
    assert len(names) > 200
    shown = {part for line in page.splitlines() if line.startswith("| `") for part in
             line.split("`")[1].replace("[]", "").split(".")}  # fmt: skip
    assert names <= shown


def test_a_mark_without_a_section_is_an_error():
    assert docs_site.fill("a\n<!-- a comment -->\n") == "a\n<!-- a comment -->\n"
    with pytest.raises(KeyError, match="no_such"):
        docs_site.fill("<!-- generated: no_such -->")


@pytest.mark.parametrize(
    ("uri", "markdown", "shown"),
    [
        ("how-to/x.md", "[a](../reference/onnx.md#b)", "[a](../reference/onnx.md#b)"),
        ("how-to/x.md", "[a](../../README.md#b)", "[a](../repository/README.md#b)"),
        ("index.md", "![a](../benchmarks/results/x.png)", "![a](repository/benchmarks/results/x.png)"),
        ("how-to/x.md", "[a\nb](../../README.md) [c]\n\n[d](../../LICENSE)",
         "[a\nb](../repository/README.md) [c]\n\n[d](../repository/LICENSE)"),
        ("how-to/x.md", "[a](../../examples/cluster)", "a"),
        ("how-to/x.md", "[a](https://example.org/x) [b](#c)", "[a](https://example.org/x) [b](#c)"),
        ("repository/benchmarks/results/h/README.md", "[a](../../../docs/benchmarks.md)",
         "[a](../../../../benchmarks.md)"),
        ("x.md", "```console gpu\n$ a\n```", "```console\n$ a\n```"),
        ("x.md", "```python run\na\n```", "```python\na\n```"),
    ],
)  # fmt: skip
def test_links_and_fences(uri, markdown, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
    found, _, abbreviations = docs_site.on_page_markdown(markdown, page, None, None).partition(
        "\n\n*["
    )
    assert found == shown
    assert "TMA]: Hopper's copy unit" in abbreviations
