"""The compiler's mapping of each OpenACC directive, recorded when the module was built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

#: GCC's words for how data reaches a region -> the clause that asks for it.
CLAUSES = {
    "force_present": "present",
    "to": "copyin",
    "from": "copyout",
    "tofrom": "copy",
    "force_to": "copyin",
    "force_from": "copyout",
    "force_tofrom": "copy",
    "alloc": "create",
    "force_alloc": "create",
    "release": "delete",
    "delete": "delete",
}

_PLACED = re.compile(r"(?P<file>[^:\s]+):(?P<line>\d+):\d+: (?P<text>.*)")
_LOOP = re.compile(r"optimized: assigned OpenACC (.*) loop parallelism")
_MAP = re.compile(r"map\((\w+):\*?([\w.]+)")
_NVC = re.compile(r"\s+(\d+), (.*)")


@dataclass
class Directive:
    """One directive of a source file.

    Attributes:
        file, function: where it stands.
        line: of its first line, from 1.
        source: the directive, its lines joined.
        loops: the loop or the statement that it is for.
        said: what the compiler made of it: levels of parallelism, data clauses, reductions.
        offload: the same of the compiler for the GPU, where it differs or is another.
        raw: the compiler's own lines.
    """

    file: str
    function: str
    line: int
    source: str
    loops: str
    said: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)


@dataclass
class Mapping:
    """All directives of a module.

    Attributes:
        compiler, target, shape: of the module: who compiled it, what it offloads to ("": nothing), and
            gangs:workers:vector of the convolutions ("": left to the compiler).
        sources: file -> its lines.
        directives: in the order of files and lines.
    """

    compiler: str
    target: str
    shape: str
    sources: dict[str, list[str]]
    directives: list[Directive]

    def at(self, file: str, line: int) -> Directive | None:
        """Returns the directive whose first line is ``line`` of ``file``."""
        return next((d for d in self.directives if (d.file, d.line) == (file, line)), None)


def of(module: ModuleType) -> Mapping:
    """Returns the mapping that a compiled module contains."""
    sources, directives = {}, []
    for listing in module.listings():
        found = list(_directives(listing["file"], listing["source"].splitlines()))
        if not found:
            continue
        sources[listing["file"]] = listing["source"].splitlines()
        by_line = {directive.line: directive for directive in found}
        for line, text in _placed(listing["mapping"], by_line):
            by_line[line].raw.append(text)
            by_line[line].said += [
                word for word in _readable(text) if word not in by_line[line].said
            ]
        for line, text in _placed(listing["offload_mapping"], by_line):
            by_line[line].raw.append(f"{module.offload}: {text}")
            by_line[line].offload += _readable(text)
        directives += found
    return Mapping(module.compiler, module.offload, module.shape, sources, directives)


def _directives(file: str, lines: list[str]) -> Iterator[Directive]:
    function = ""
    index = 0
    while index < len(lines):
        line = lines[index]
        if named := re.match(r"(?:[\w:]+\s+)+\*?(\w+)\(", line):
            function = named[1]
        if line.startswith("#pragma acc"):
            first = index
            while lines[index].endswith("\\"):
                index += 1
            words = " ".join(part.rstrip("\\").strip() for part in lines[first : index + 1])
            after = lines[index + 1].strip() if index + 1 < len(lines) else ""
            stands_for = "" if re.match(r"#pragma acc (enter|exit)", words) else after
            yield Directive(file, function, first + 1, words, stands_for)
        index += 1


def _placed(text: str, known: dict[int, Directive]) -> Iterator[tuple[int, str]]:
    """Yields (line of a directive, what is said of it), from GCC's lines or nvc's."""
    line = 0
    for one in text.splitlines():
        if found := _PLACED.match(one):
            line, said = int(found["line"]), found["text"]
        elif found := _NVC.match(one):
            line, said = int(found[1]), found[2]
        elif one.startswith(" "):
            said = one.strip()  # nvc goes on about the same line
        else:
            continue
        # nvc names the loop below the directive, where GCC names the directive.
        at = max((other for other in known if other <= line), default=None)
        if at is not None:
            yield at, said


def _readable(text: str) -> Iterator[str]:
    """Yields the facts of one line of the compiler, in OpenACC's words; another compiler's as they are."""
    if loop := _LOOP.fullmatch(text):
        yield f"loop: {loop[1]}"
    elif text.startswith("directive: omp target oacc"):
        by_clause: dict[str, list[str]] = {}
        for kind, name in _MAP.findall(text):
            if kind in CLAUSES:
                by_clause.setdefault(CLAUSES[kind], []).append(name)
        for clause, names in by_clause.items():
            yield f"{clause}: {', '.join(names)}"
        if scalars := len(re.findall(r" firstprivate\(", text)):
            yield f"firstprivate: {scalars} scalar{'s' * (scalars > 1)}"
    elif text.startswith("directive: acc loop"):
        yield from re.findall(r"(?:reduction|collapse|tile)\([^)]*\)", text)
    else:
        yield text
