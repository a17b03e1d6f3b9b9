"""Hooks for mkdocs: pages made from code, and files outside ``docs/`` that pages link to.

A page of ``docs/reference/`` holds a line ``<!-- generated: NAME -->``. A text of :data:`SECTIONS` takes its
place, made from the parsers, tables and schemas that the program itself uses. Links that leave ``docs/``, to
results, examples or the changelog, lead to copies under ``repository/``: the site is complete by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from house import picture, predict_calls

sys.path.pop(0)

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository/"

#: A link or picture, and where it leads; its text may run over a line's end, not over a paragraph's.
_LINK = re.compile(r"(!?\[(?:[^\]\n]|\n(?!\n))*\])\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```(?:console|python)) +\w+$", re.MULTILINE)


#: Options of every command, which the page names once.
_EVERYWHERE = ("help", "version", "list")


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the name and the parser of every command, and of the commands inside of it."""
    from importlib import import_module
    from importlib.util import find_spec

    from cnn_engine.__main__ import COMMANDS

    for name in COMMANDS:
        package = find_spec(f"cnn_engine.{name}").submodule_search_locations is not None
        module = f"cnn_engine.{name}.command" if package else f"cnn_engine.{name}"
        parser = import_module(module).parser()
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {sub}", child) for sub, child in action.choices.items())


def command_line() -> str:
    """Returns every command's usage and options, as its own parser has them."""
    from cnn_engine.__main__ import COMMANDS

    blocks = []
    for name, parser in parsers():
        summary = COMMANDS.get(name) or parser.description or ""
        title = "#" * (2 + name.count(" "))
        sentence = f"{summary[:1].upper()}{summary[1:].rstrip('.')}."
        blocks.append(f"{title} {name}\n\n{sentence}\n\n{_options(parser)}")
    return "\n\n".join(blocks)


def _options(parser: argparse.ArgumentParser) -> str:
    words = " ".join(parser.format_usage().removeprefix("usage: ").split())
    usage = textwrap.fill(
        words, 84, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    rows = [f"```text\n{usage}\n```\n", "| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.dest in _EVERYWHERE:
            continue
        names = (
            ", ".join(f"`{word}`" for word in action.option_strings)
            or f"`{action.metavar or action.dest}`"
        )
        if (
            action.option_strings
            and action.nargs != 0
            and not isinstance(action, argparse.BooleanOptionalAction)
        ):
            value = action.metavar or (
                "{" + ",".join(map(str, action.choices)) + "}"
                if action.choices
                else action.dest.upper()
            )
            names += f" `{' '.join(value) if isinstance(value, tuple) else value}`"
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows.append(f"| {_cell(names)} | {_cell(text)} |")
    return "\n".join(rows)


def operators() -> str:
    """Returns ONNX's operators by how they are read, and the engine's own with the kernels of each device."""
    from onnx import defs

    from cnn_engine.graph.onnx.call import RANDOM, RECORDS
    from cnn_engine.graph.onnx.converters import CONVERTERS
    from cnn_engine.kernels import TABLE
    from cnn_engine.operators import KINDS

    found: dict[str, list[str]] = {"read": [], "taken apart": [], "not read": []}
    for schema in sorted(defs.get_all_schemas(), key=lambda one: one.name.lower()):
        if schema.domain or schema.deprecated:
            continue
        how = (
            "taken apart"
            if (schema.has_function or schema.has_context_dependent_function)
            and schema.name not in RANDOM
            else "not read"
        )
        if schema.name in RECORDS or ("", schema.name) in CONVERTERS:
            how = "read"
        found[how].append(f"`{schema.name}`")
    lines = [
        f"## ONNX operators\n\n**Read** ({len(found['read'])}): {', '.join(found['read'])}.\n",
        f"**Taken apart** into others, as ONNX defines them ({len(found['taken apart'])}): "
        f"{', '.join(found['taken apart'])}.\n",
        f"**Not read** ({len(found['not read'])}): {', '.join(found['not read'])}.\n",
    ]
    for domain in sorted({domain for domain, _ in CONVERTERS if domain}):
        names = sorted((name for where, name in CONVERTERS if where == domain), key=str.lower)
        lines.append(
            f"**Read of {domain}** ({len(names)}): {', '.join(f'`{name}`' for name in names)}.\n"
        )
    lines += [
        f"## Operators of the engine ({len(KINDS)})", "",
        "An empty cell: NumPy runs it on the CPU, and the report says so.", "",
        "| operator | what it computes | CPU kernels | CUDA kernels | OpenACC kernels |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in sorted({*KINDS, *(row.op for row in TABLE)}):
        document = KINDS[kind].__doc__ if kind in KINDS else "Layers of a network as one kernel."
        summary = (document or "").strip().split("\n\n")[0].replace("\n", " ")
        cells = []
        for device in ("cpu", "cuda", "openacc"):
            rows = [row.name for row in TABLE if (row.op, row.device) == (kind, device)]
            cells.append(", ".join(f"`{name}`" for name in dict.fromkeys(rows)))
        lines.append(f"| `{kind}` | {_cell(' '.join(summary.split()))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def environment_variables() -> str:
    """Returns the tables of environment variables."""
    from cnn_engine import environment_variables as tables

    blocks = []
    for title, table in (
        ("Of the program", tables.PROGRAM),
        ("Of the build, in front of `pip install`", tables.BUILD),
        ("Of the tests", tables.TESTS),
        ("Of others", tables.OTHERS),
    ):
        lines = [
            f"## {title}",
            "",
            "| variable | values | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{name}` | {' | '.join(map(_cell, row))} |" for name, row in table.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def exit_codes() -> str:
    """Returns what each command's exit codes mean to it, as the end of its help says."""
    rows = ["| command | codes |", "|---|---|"]
    for name, parser in parsers():
        text = (parser.epilog or "").removeprefix("exit codes:")
        if text != (parser.epilog or ""):
            rows.append(f"| `{name}` | {_cell(text)} |")
    return "\n".join(rows)


def csv_columns() -> str:
    """Returns a table of the columns of every command that writes a CSV of its results."""
    from cnn_engine.compare import command as compare
    from cnn_engine.report import csv as report
    from cnn_engine.transfer import files as transfer

    blocks = []
    for title, columns in (
        ("run --csv", report.COLUMNS),
        ("compare --csv", compare.COLUMNS),
        ("transfer: data_transfer_time.csv", transfer.COLUMNS),
    ):
        rows = [f"## {title}", "", "| column | meaning |", "|---|---|"]
        rows += [f"| `{name}` | {_cell(text)} |" for name, text in columns.items()]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def characterize_points() -> str:
    """Returns a table of the columns of ``summary.csv``, which are the keys of a point."""
    points = _definitions()["characterize"]["properties"]["points"]["items"]
    rows = [f"| `{key}` | {_cell(text)} |" for key, _, text in _keys(points)]
    return "\n".join(["| column | meaning |", "|---|---|", *rows])


def _definitions() -> dict[str, Any]:
    path = ROOT / "cnn_engine" / "report" / "results.schema.json"
    return json.loads(path.read_text("utf-8"))["$defs"]


def result_json() -> str:
    """Returns a table of the keys of every kind of JSON document, as the shipped schema has them."""
    blocks = []
    for name, definition in _definitions().items():
        rows = ["| key | type | meaning |", "|---|---|---|"]
        rows += [
            f"| `{key}` | {_cell(kind)} | {_cell(text)} |" for key, kind, text in _keys(definition)
        ]
        blocks.append(f"## {name}\n\n{definition['description']}\n\n" + "\n".join(rows))
    return "\n\n".join(blocks)


def _keys(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields path, type and meaning of every key of an object, of objects in lists, and of any name (*)."""
    for key, below in node.get("properties", {}).items():
        optional = "" if key in node.get("required", ()) else ", may be missing"
        yield f"{prefix}{key}", _type(below) + optional, below.get("description", "")
        yield from _keys(below, f"{prefix}{key}.")
        yield from _keys(below.get("items", {}), f"{prefix}{key}[].")
        if isinstance(by_name := below.get("additionalProperties"), dict):
            yield from _keys(by_name, f"{prefix}{key}.*.")


def _type(node: dict[str, Any]) -> str:
    """Returns a schema's type in words, such as ``list of number or null``."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in node:
        return " or ".join(map(_type, node["anyOf"]))
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    words = ["list" if kind == "array" else kind for kind in kinds]
    if "items" in node:
        words[0] += f" of {_type(node['items'])}"
    return " or ".join(words)


#: Name in a page -> what is written in its place.
SECTIONS: dict[str, Callable[[], str]] = {
    "architecture": picture,
    "characterize_points": characterize_points,
    "command_line": command_line,
    "csv_columns": csv_columns,
    "environment_variables": environment_variables,
    "exit_codes": exit_codes,
    "operators": operators,
    "predict_calls": predict_calls,
    "result_json": result_json,
}


def _cell(text: str) -> str:
    """Returns a text for a cell of a table: on one line, without what Markdown or HTML reads as its own."""
    words = " ".join(text.split()).replace("|", "\\|")
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*")
        for part in parts
    )


def fill(markdown: str) -> str:
    """Returns a page with its generated sections in the place of their marks.

    Raises:
        KeyError: there is no section of that name.
    """
    return re.sub(
        r"^<!-- generated: (\w+) -->$",
        lambda found: SECTIONS[found[1]](),
        markdown,
        flags=re.MULTILINE,
    )


def abbreviations() -> str:
    """Returns the glossary's acronyms with their meanings, which pages show where a reader points at one."""
    glossary = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    found = {}
    for terms, meaning in re.findall(r"^\*\*(.+)\*\*\n:   (.+)$", glossary, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", meaning)
        names = re.split(r", | \(|\)", terms)
        found |= {name: plain for name in names if re.fullmatch(r"[A-Z]{3,}", name)}
    return "\n".join(f"*[{name}]: {plain}" for name, plain in found.items())


def _links(markdown: str, page: str) -> Iterator[str]:
    """Yields the repository's paths that a page links to; ``page`` is its own path in the repository."""
    for _, link in _LINK.findall(markdown):
        name = link.partition("#")[0]
        if name and "://" not in link:
            yield os.path.normpath(os.path.join(os.path.dirname(page), name))


def _in_repository(uri: str) -> str:
    """Returns a page's path in the repository; ``uri`` is its path on the site."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside ``docs/`` that pages link to, and what these link to."""
    from mkdocs.structure.files import File

    waiting = [_in_repository(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in _links((ROOT / page).read_text("utf-8"), page):
            if path in seen or path.startswith("docs/") or not (ROOT / path).is_file():
                continue
            seen.add(path)
            source = str(ROOT / path)
            files.append(File.generated(config, OUTSIDE + path, abs_src_path=source))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in generated sections, and leads links that leave ``docs/`` to their copies."""
    uri = page.file.src_uri
    if uri.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}
    elif uri.startswith("notes/"):
        page.meta["search"] = {"boost": 0.2}
    own = _in_repository(uri)

    def lead(found: re.Match[str]) -> str:
        text, link = found.groups()
        name, mark, anchor = link.partition("#")
        if not name or "://" in link:
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(own), name))
        if (ROOT / path).is_dir():  # the site has no page for a folder
            return text.strip("[]")
        to = path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path
        return f"{text}({os.path.relpath(to, os.path.dirname(uri) or '.')}{mark}{anchor})"

    page_of_code = fill(_FENCE.sub(r"\1", _LINK.sub(lead, markdown)))
    return page_of_code if uri == "glossary.md" else f"{page_of_code}\n\n{abbreviations()}\n"
