"""A kernel of a user's own as a file: its source, and the directives in its comments.

    // operator: conv2d
    // launch: my_conv<<<dim3(ceil_div(out_w, TILE), ceil_div(out_h, TILE), n * k), dim3(TILE, TILE)>>>(
    //         x, weight, bias, y, shape);                      CUDA: one or more, run in this order
    // call: my_conv(x, weight, bias, y, shape, threads);       C++: likewise
    // workspace: 4 * n * c * h * w                             bytes of scratch memory, `workspace` above
    // requires: groups == 1 && dilation_h == 1                 nodes that it takes
    // computes: tf32                                           what products are rounded to; float32

Expressions are of the sizes of the operator's struct (:mod:`.contracts`) and of the file's own
``#define NAME number`` and ``constexpr int NAME = number;``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, expected
from ...io.files import read_bytes
from ..select import COMPUTES
from . import expressions
from .contracts import CONTRACTS, Contract

#: The ending of a file -> the kind of device that it is for.
DEVICES = {".cu": "cuda", ".cpp": "cpu", ".cc": "cpu", ".cxx": "cpu"}

DIRECTIVES = ("operator", "launch", "call", "workspace", "requires", "computes")

#: Bytes of a file: no kernel is longer.
MOST_BYTES = 2**20

_DIRECTIVE = re.compile(rf"^\s*//\s*({'|'.join(DIRECTIVES)})\s*:\s*(.*?)\s*$")
_COMMENT = re.compile(r"^\s*//(.*)$")
_MACRO = re.compile(
    r"^\s*(?:#\s*define\s+(\w+)\s+(.+?)|(?:static\s+)?constexpr\s+(?:unsigned\s+)?int\s+(\w+)\s*=\s*(.+?);)"
    r"\s*(?://.*)?$"
)
_LAUNCH = re.compile(r"^(\w+)\s*<<<(.*)>>>\s*\((.*)\)\s*;$", re.DOTALL)
_CALL = re.compile(r"^(\w+)\s*\((.*)\)\s*;$", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """One function of the file and how it is called.

    Attributes:
        function: its name.
        arguments: a tensor's name, ``workspace``, ``shape`` or ``threads``, or an expression: a C int.
        grid, block, shared: of a CUDA kernel.
        line: where the file says so.
    """

    function: str
    arguments: tuple[str | ast.expr, ...]
    grid: ast.expr | None
    block: ast.expr | None
    shared: ast.expr | None
    line: int


@dataclass(frozen=True)
class Source:
    """A kernel file, read.

    Attributes:
        path: the file.
        text: its content.
        device: ``cpu`` or ``cuda``.
        contract: of its operator.
        launches: what a call runs, in order.
        workspace: bytes of scratch memory, or None.
        requires: what must hold of a node's sizes, or None.
        computes: what operands of products are rounded to.
        macros: the file's own numbers.
    """

    path: Path
    text: str
    device: str
    contract: Contract
    launches: tuple[Launch, ...]
    workspace: ast.expr | None
    requires: ast.expr | None
    computes: str
    macros: dict[str, int]

    @property
    def name(self) -> str:
        return self.path.name


def read(path: str | Path) -> Source:
    """Reads a kernel file.

    Raises:
        InputError: it cannot be read, or its directives are at fault; names the file and the line.
    """
    path = Path(path)
    device = DEVICES.get(path.suffix.lower())
    if device is None:
        raise expected(
            str(path),
            f"a kernel file whose name ends in {', '.join(DEVICES)}",
            path.suffix or "none",
        )
    data = read_bytes(path, MOST_BYTES)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise expected(str(path), "text in UTF-8", error) from None
    return _Reader(path, text, device).source()


class _Reader:
    def __init__(self, path: Path, text: str, device: str) -> None:
        self.path, self.text, self.device = path, text, device

    def fault(self, line: int, wanted: object, found: object) -> InputError:
        return expected(f"{self.path}:{line}", wanted, found)

    def source(self) -> Source:
        found: dict[str, list[tuple[int, str]]] = {name: [] for name in DIRECTIVES}
        for line, name, text in self.directives():
            found[name].append((line, text))
        for name in ("operator", "workspace", "requires", "computes"):
            if len(found[name]) > 1:
                raise self.fault(found[name][1][0], f"one line // {name}:", "another")
        if not found["operator"]:
            raise expected(
                str(self.path), "a line // operator: conv2d, or another operator", "none"
            )
        line, op = found["operator"][0]
        if op not in CONTRACTS:
            raise self.fault(line, f"operator: one of {', '.join(CONTRACTS)}", repr(op))
        contract = CONTRACTS[op]
        macros = self.macros()
        verb, other = ("launch", "call") if self.device == "cuda" else ("call", "launch")
        if found[other]:
            kind = "CUDA" if self.device == "cuda" else "C++"
            raise self.fault(found[other][0][0], f"// {verb}: in a {kind} file", f"// {other}:")
        if not found[verb]:
            raise expected(str(self.path), f"a line // {verb}: of what is to run", "none")
        known = {*contract.fields, *macros, "threads"}
        launches = tuple(self.launch(line, text, contract, known) for line, text in found[verb])
        if not any("y" in launch.arguments for launch in launches):
            raise self.fault(launches[-1].line, "y among the arguments", found[verb][-1][1])
        workspace = requires = None
        for line, text in found["workspace"]:
            workspace = self.expression(line, text, known)
        for line, text in found["requires"]:
            requires = self.expression(line, text, known - {"threads"})
        computes = "float32"
        for line, computes in found["computes"]:
            if computes not in COMPUTES:
                raise self.fault(line, f"computes: one of {', '.join(COMPUTES)}", repr(computes))
        if workspace is None:
            for launch in launches:
                if "workspace" in launch.arguments:
                    raise self.fault(launch.line, "a line // workspace: with its bytes", "none")
        return Source(
            self.path, self.text, self.device, contract, launches, workspace, requires, computes,
            macros,
        )  # fmt: skip

    def directives(self):
        """Yields (line, directive, text): of a launch or call, all comment lines up to its ``;``."""
        lines = self.text.splitlines()
        index = 0
        while index < len(lines):
            match = _DIRECTIVE.match(lines[index])
            start = index + 1
            index += 1
            if match is None:
                continue
            name, text = match.groups()
            ends = name in ("launch", "call")
            # An operator at the end of a line promises more of an expression.
            while not (text.endswith(";") if ends else _whole(text)) and index < len(lines):
                more = _COMMENT.match(lines[index])
                if more is None or _DIRECTIVE.match(lines[index]):
                    break
                text += f" {more[1].strip()}"
                index += 1
            if ends and not text.endswith(";"):
                raise self.fault(start, f"// {name}: up to a semicolon", repr(text))
            yield start, name, text

    def macros(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in self.text.splitlines():
            if match := _MACRO.match(line):
                name, text = (match[1], match[2]) if match[1] else (match[3], match[4])
                try:
                    number = expressions.value(expressions.parse(text), found)
                except ValueError:
                    continue  # no number, so not for the directives
                if isinstance(number, int):
                    found[name] = int(number)
        return found

    def expression(self, line: int, text: str, known: set[str]) -> ast.expr:
        try:
            tree = expressions.parse(text)
        except ValueError as error:
            raise InputError(f"{self.path}:{line}: {error}") from None
        for name in sorted(expressions.names(tree) - known):
            raise self.fault(line, f"one of {', '.join(sorted(known))}", repr(name))
        return tree

    def launch(self, line: int, text: str, contract: Contract, known: set[str]) -> Launch:
        match = (_LAUNCH if self.device == "cuda" else _CALL).match(text)
        if match is None:
            form = "name<<<grid, block>>>(x, y, shape);"
            form = form if self.device == "cuda" else "name(x, y, shape, threads);"
            raise self.fault(line, form, repr(text))
        words = (*contract.tensors, "workspace", "shape")
        arguments: list[str | ast.expr] = []
        for word in split(match[match.lastindex]):
            arguments.append(word if word in words else self.expression(line, word, known))
        sizes: list[ast.expr | None] = [None, None, None]
        if self.device == "cuda":
            parts = [self.expression(line, part, known) for part in split(match[2])]
            if not 2 <= len(parts) <= 3:
                raise self.fault(
                    line, "<<<grid, block>>> or <<<grid, block, shared bytes>>>", match[2]
                )
            sizes = [*parts, None][:3]
        return Launch(match[1], tuple(arguments), *sizes, line)


def _whole(text: str) -> bool:
    return not text.endswith(("&&", "||", "+", "-", "*", "/", ",", "(", "=", "<", ">"))


def split(text: str) -> list[str]:
    """Returns the parts between commas outside of parentheses."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []
