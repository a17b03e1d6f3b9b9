"""How the guides and the help read: ``python scripts/prose.py`` prints lines, words and sentence lengths.

Sentences are short, terms are the field's, and pages that say what is have no history.
``tests/docs/test_prose.py`` holds these rules.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]

MOST_MEAN, MOST = 25, 45

#: Phrases of no field, and what to write in their place.
PHRASES = {
    r"\bbeside\b": "compared with, next to, as well as",
    r"\bblocks that stay\b": "persistent blocks, persistent kernel",
    r"\bin turns\b": "interleaved, alternating",
    r"\btold\b|\btells? (?:of|so)\b": "reported, described",
    r"\btaps?\b": "positions of the window, im2col",
    r"\blaboratory\b": "measurement tools",
    r"\bgoes on\b": "continues",
    r"\bbrought\b": "uploaded, copied",
    r"\bplaces of the (?:image|output)\b": "output pixels, positions",
    r"\bwhat comes before (?:it|them)\b": "prologue",
    r"\b(?:images|bytes|times?|registers|threads|samples|rows?|calls|kernels|launches|options|lines?|memory|"
    r"us|ns|ms|one|folder|labels|blocks|elements|FLOPs|MFLOP|KiB|MiB) an? (?:second|image|pass|thread|block|"
    r"class|call|launch|core|worker|step|output|row|name|point|record|lane|channel|layer|GPU|CPU|member|"
    r"copy)\b": "per",
    r"\bof which\b": "a second sentence",
}

#: A commit's short name: history, and no use to a reader of a guide.
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,12}\b")


@dataclass(frozen=True)
class Text:
    """A text and its sentences: words with code as one word each."""

    name: str
    lines: int
    plain: str
    sentences: list[str]

    @property
    def lengths(self) -> list[int]:
        return [len(sentence.split()) for sentence in self.sentences]

    def faults(self) -> list[str]:
        """Returns what is not as the rules have it, a line each."""
        found = []
        if self.lengths and mean(self.lengths) > MOST_MEAN:
            found.append(
                f"a sentence has {mean(self.lengths):.1f} words on average: at most {MOST_MEAN}"
            )
        found += [
            f"{len(sentence.split())} words, at most {MOST}: {sentence[:90]}..."
            for sentence in self.sentences
            if len(sentence.split()) > MOST
        ]
        for phrase, instead in PHRASES.items():
            found += [
                f"{match[0]!r}: write {instead}"
                for match in re.finditer(phrase, self.plain, re.IGNORECASE)
            ]
        found += [f"{name}: no commits in a guide" for name in COMMIT.findall(self.plain)]
        return found


def sentences(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph; abbreviations and numbers end none."""
    joined = " ".join(paragraph.split())
    parts = re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`*(\[\"0-9])", joined)
    return [part for part in parts if re.search(r"\w", part)]


def of_markdown(name: str, text: str) -> Text:
    """Returns a page without code and targets of links; its sentences have no tables and headings."""
    plain = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"<!--.*?-->", "", plain, flags=re.DOTALL)
    plain = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", plain)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    plain = re.sub(r"`[^`]+`", "CODE", plain)
    shown = " \n".join(re.findall(r"^[|#].*$", plain, re.MULTILINE))
    prose = re.sub(r"^(?:\||#|:::).*$", "", plain, flags=re.MULTILINE)
    items = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|\n:   ", prose)
    found = [
        sentence
        for item in items
        for sentence in sentences(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", item))
    ]
    return Text(name, text.count("\n"), prose + shown, found)


def pages() -> list[Path]:
    """Returns the pages that the rules are for: what readers use, not notes and records."""
    inside = [path for folder in GUIDES for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    single = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/glossary.md")
    ]
    return [path for path in (*single, *inside) if path.name != "onnx_node_tests.md"]


GUIDES = ("tutorials", "how-to", "explanation", "reference")


def of_help() -> Iterator[Text]:
    """Yields the help of every command: its description, and a text for each option."""
    from docs_site import parsers

    for name, parser in parsers():
        texts = [parser.description or ""]
        texts += [
            (action.help or "") % {**vars(action), "prog": parser.prog}
            for action in parser._actions
        ]
        found = [
            sentence for text in texts for part in text.split(";") for sentence in sentences(part)
        ]
        yield Text(f"{name} --help", len(texts), "\n".join(texts), found)


def main() -> int:
    """Prints a row for each page and command; returns 1 where one breaks a rule."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    texts = [of_markdown(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in pages()]
    faults = 0
    print(f"{'page':<42} {'lines':>6} {'words':>6} {'mean':>6} {'longest':>7}")
    for text in (*texts, *of_help()):
        words = text.lengths or [0]
        print(
            f"{text.name:<42} {text.lines:>6} {sum(words):>6} {mean(words):>6.1f} {max(words):>7}"
        )
        for fault in text.faults():
            faults += 1
            print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
