"""Links of the project's pages lead somewhere: to files that are there, and to headings in them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import docs_site  # noqa: E402

sys.path.pop(0)
CODE = (".py", ".h", ".cuh", ".cpp", ".cu", ".sh")
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/results/*/README.md")
    for path in ROOT.glob(pattern)
)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, as GitHub makes them; a second one of a name gets ``-1``."""
    found: Counter[str] = Counter()
    names = set()
    text = re.sub(
        r"^```.*?^```", "", docs_site.fill(page.read_text("utf-8")), flags=re.MULTILINE | re.DOTALL
    )
    for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        name = re.sub(r"[^\w -]", "", shown).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def broken(page: Path) -> list[str]:
    """Returns the links of a page that lead nowhere; what is on the web is not asked for."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    lost = []
    for link in links:
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        to = (page.parent / name).resolve() if name else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    assert broken(ROOT / page) == []


def test_pages_that_code_names_are_there():
    files = [*ROOT.glob("*.py"), ROOT / ".ci" / "run"]
    for folder in (
        "cnn_engine",
        "csrc",
        "benchmarks",
        "tests",
        "scripts",
        "cifar10",
        "fashion_mnist",
    ):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    named = {
        (name, path.relative_to(ROOT))
        for path in files
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert [(name, path) for name, path in named if not (ROOT / name).is_file()] == []


def test_files_that_guides_name_are_there():
    """Notes and records name files of their time."""
    folders = "cnn_engine|csrc|benchmarks|tests|scripts|examples|cifar10|fashion_mnist|fuzz"
    guides = [page for page in PAGES if "notes" not in page.parts and "results" not in page.parts]
    named = {
        (name.rstrip("/"), page)
        for page in guides
        if page.name not in ("CHANGELOG.md", "onnx_node_tests.md")
        for name in re.findall(rf"`((?:{folders})/[\w./*-]*)", (ROOT / page).read_text("utf-8"))
    }
    assert len(named) > 40
    assert [(name, page) for name, page in named if not any(ROOT.glob(name))] == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n## A b c\n```sh\n# no heading\n```\n[1](#a-b-c) [2](#a-b-c-1) [3](page.md#a-b-c) "
        "[4](#no-heading) [5](other.md) [6](page.md#c) [7](https://example.org/#x) [8](#a-b-c-2)\n"
    )
    assert broken(page) == ["#no-heading", "other.md", "page.md#c", "#a-b-c-2"]
