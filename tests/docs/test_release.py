"""What a release names: its version, everywhere the same, and a changelog of the form that it says it has."""

from __future__ import annotations

import re
from pathlib import Path

import cnn_engine

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
#: Kinds of changes of https://keepachangelog.com, in its order.
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_version_is_the_same_everywhere():
    (cited,) = re.findall(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE
    )
    newest = re.search(r"^## (\S+)", CHANGELOG, re.MULTILINE)[1]
    assert cited == newest == cnn_engine.__version__


def test_the_newest_section_is_short_and_in_keep_a_changelogs_form():
    newest = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1]
    kinds = re.findall(r"^### (.+)$", newest, re.MULTILINE)
    assert kinds == [kind for kind in KINDS if kind in kinds]
    assert kinds
    assert len(newest.splitlines()) <= 60
    prose = [
        line for line in newest.splitlines()[1:] if line and not line.startswith(("### ", "- "))
    ]
    assert prose == []  # an entry is one line
