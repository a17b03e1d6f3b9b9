"""The HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
from samples import CASES, every_result, make, make_bare, make_cuda

from cnn_engine.errors import InputError
from cnn_engine.report import charts, html
from cnn_engine.result import Latency


class Page(HTMLParser):
    """Checks that elements nest, and collects what a page refers to and what it shows."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.shown: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


@every_result
def test_html_is_self_contained_and_whole(result):
    document = html.render([result])
    page = Page(document)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href"):
            assert value.startswith("#"), (tag, value)
            assert value[1:] in identifiers
        if name in ("x", "width") and value.endswith("%"):
            assert 0 <= float(value[:-1]) <= 100.01, (tag, name, value)
    style = document.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    document.encode()
    for section in ("What ran", "Phases", "Layers", "Latency", "Timeline", "Check"):
        assert section in page.text


def test_html_escapes_what_comes_from_outside():
    document = html.render([CASES["hostile"]])
    assert "<script" not in document
    assert "\x1b" not in document
    page = Page(document)
    assert "<script>alert(1)</script>&\"'\\x1b[31m\\n\\udc80" in page.text
    assert "{{ 7*7 }}" in page.text  # text, not a template


def test_html_shows_results_side_by_side():
    document = html.render([make(), make_cuda(), make_bare()])
    page = Page(document)
    for shown in (
        "A cifar10, pad with reduction, resident on cpu",
        "B cifar10, if, transfer on cuda:0",
        "360.0 ms",
        "conv1 input h2d",
        "78.49 %",
        "first 2 passes, 5 of 5,000 events",
        "the GPU is shared",
        "All on one scale",
    ):
        assert shown in page.text, shown
    assert page.text.index("pad1") < page.text.index("relu1")
    with pytest.raises(InputError, match=r"results: expected at least one to show, found none"):
        html.render([])


def test_html_keeps_order_when_results_have_different_layers():
    merged = html._merged([["conv1", "relu1", "fc"], ["pad1", "conv1", "pool1", "fc"]])
    assert merged == ["pad1", "conv1", "pool1", "relu1", "fc"]
    assert [html._letters(i) for i in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]


def test_html_histogram_counts_every_sample_once():
    samples = [*np.random.default_rng(1).gamma(2, 1, 1000), 1e6]
    found = charts.histogram(make(latency=Latency(samples)))
    counted = sum(int(bin["title"].rpartition(": ")[2].split()[0]) for bin in found["bins"])
    beyond = int(found["beyond"].split()[0])
    assert counted + beyond == len(samples)
    assert 1 <= beyond <= 10
