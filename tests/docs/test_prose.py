"""Guides and help are in short sentences and the field's words; see scripts/prose.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import prose  # noqa: E402

HELP = {text.name: text for text in prose.of_help()}
sys.path.pop(0)
LIST_OF_OPERATORS = "kernel new --help"


@pytest.mark.parametrize("page", prose.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(page):
    assert prose.of_markdown(page.name, page.read_text("utf-8")).faults() == []


@pytest.mark.parametrize("name", HELP)
def test_help(name):
    faults = HELP[name].faults()
    if name == LIST_OF_OPERATORS:  # names all operators in one sentence
        faults = [fault for fault in faults if "conv2d, conv_transpose2d" not in fault]
    assert faults == []


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 120), ("docs/explanation/performance.md", 250)]
)
def test_pages_that_stay_short(page, most):
    assert len((ROOT / page).read_text("utf-8").splitlines()) <= most


def test_every_page_is_read():
    names = {str(path.relative_to(ROOT)) for path in prose.pages()}
    assert {"README.md", "docs/tutorials/first_run.md", "docs/explanation/timing.md"} <= names
    assert not any("notes" in name for name in names)


def faults(text: str) -> list[str]:
    return prose.of_markdown("page", text).faults()


def test_lengths():
    text = prose.of_markdown(
        "page",
        "# A title that counts for nothing\n\nOne two `a b c` four. Five [six seven](x.md), e.g. "
        "1.5 times.\n\n- An item\n- Another one\n\n| a | table |\n\n```console\n$ no prose. At all.\n```\n",
    )
    assert text.sentences == [
        "One two CODE four.",
        "Five six seven, e.g. 1.5 times.",
        "An item",
        "Another one",
    ]


def test_a_long_sentence_and_a_long_mean():
    (mean, longest) = faults("word " * 46)
    assert mean == "a sentence has 46.0 words on average: at most 25"
    assert longest.startswith("46 words, at most 45: word word")
    assert faults("word " * 25) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("It runs beside PyTorch.", "'beside': write compared with, next to, as well as"),
        ("## Beside others\n\nText.", "'Beside': write compared with, next to, as well as"),
        ("Passes run in turns.", "'in turns': write interleaved, alternating"),
        ("A row of an image is\n\n| images a second |", "'images a second': write per"),
        ("An output of 64 KiB an image.", "'KiB an image': write per"),
        ("Blocks that stay are\nfast.", "'Blocks that stay': write persistent blocks, persistent kernel"),
        ("Since f167649 it is faster.", "f167649: no commits in a guide"),
        ("A cell may have it: \n\n| what is told |", "'told': write reported, described"),
    ],
)  # fmt: skip
def test_phrases(text, fault):
    assert faults(text) == [fault]


@pytest.mark.parametrize(
    "text", ["`--beside` adds kernels.", "1234567 images of cafebabe", "```\nbeside\n```"]
)
def test_code_and_numbers_are_no_faults(text):
    assert faults(text) == []
