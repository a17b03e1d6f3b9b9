"""The pages in a real browser: headless Chromium.

``CNN_ENGINE_REQUIRE_BROWSER=1`` turns the skip without a browser into a failure;
``CNN_ENGINE_TEST_ARTIFACTS=FOLDER`` keeps the screenshots; the pages in
``CNN_ENGINE_TEST_REPORTS=FOLDER`` (``*.html``, such as those of a GPU) are opened too.
"""

from __future__ import annotations

import contextlib
import io
import json
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import browser as browsers
import numpy as np
import onnx
import pytest
from browser import Browser, contrast, given, missing, too_faint
from onnx.helper import make_node as node
from onnx_models import model, tensor
from PIL import Image
from samples import CASES, make, make_bare, make_cuda, make_deep, make_profiled, measured

from cnn_engine import __main__ as doors
from cnn_engine.compare import comparison
from cnn_engine.kernel import templates
from cnn_engine.measure.result import Result
from cnn_engine.report import html
from cnn_engine.report import json as report_json

WIDTHS = (1280, 390, 320)  # a desktop, a phone, and the narrowest that WCAG's "Reflow" asks for
SCHEMES = ("light", "dark")


def compared() -> str:
    """Returns a page on runs of this machine, read back from JSON, with verdicts, beside a GPU's result."""
    documents = [report_json.dumps(measured(variant)) for variant in ("pad", "fused")]
    results = [Result.from_dict(json.loads(document)) for document in documents]
    results.append(make_profiled())
    names = ("pad.json", "fused.json", "gpu.json")
    verdicts = [
        comparison.compare(results[0], results[i], (names[0], names[i]), 0.01) for i in (1, 2)
    ]
    return html.render(results, verdicts)


def by_command(*words: str) -> str:
    """Returns the page that a command writes, in a folder with images.npy and graph.onnx."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        np.save("images.npy", np.zeros((50, 3, 32, 32), np.uint8))
        nodes = [node("Relu", ["x"], ["a"]), node("Add", ["a", "x"], ["y"])]
        shape = [1, 3, 5, 6]
        onnx.save(model(nodes, [tensor("x", shape)], [tensor("y", shape)]), "graph.onnx")
        assert doors.main([*words, "--html", "page.html"]) == 0
        return Path("page.html").read_text("utf-8")


def board() -> str:
    """Returns the page of a board: a kernel that is right, the engine's own, and one that is wrong."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        right = templates.text("conv2d", "cpu", "right.cpp")
        Path("right.cpp").write_text(right, "utf-8")
        Path("wrong_in_every_place.cpp").write_text(right.replace("sum +=", "sum -="), "utf-8")
        words = [
            "rank",
            "right.cpp",
            "wrong_in_every_place.cpp",
            "--network",
            "ece408",
            "--batch",
            "1",
        ]
        words += ["--calls", "6", "--rounds", "1", "--beside", "blocked", "--html", "page.html"]
        assert doors.main(["kernel", *words]) == 0
        return Path("page.html").read_text("utf-8")


PAGES = {
    "run": lambda: html.render([measured("pad")]),
    "compared": compared,
    "deep": lambda: html.render([make_deep()]),
    "bare": lambda: html.render([make_bare()]),
    "failed": lambda: html.render([CASES["check failed"], CASES["interrupted"]]),
    "outlandish": lambda: html.render(
        [CASES["hostile"], CASES["long names"], make_cuda(), make(extra_lines=["x " * 200])]
    ),
    "graph": lambda: by_command("inspect", "graph.onnx"),
    "inference": lambda: by_command(
        "infer", "images.npy", "--output", "out", "--device", "cpu", "--workers", "1"
    ),
    "ensemble": lambda: by_command(
        "ensemble", "--members", "2", "--data", "synthetic", "--images", "50", "--output", "out"
    ),
    "board": board,
    **given(".html"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(params=PAGES)
def page(request, folder) -> Path:
    """Every page in turn, as a file."""
    return written(request.param, folder)


@pytest.fixture
def compared_page(folder) -> Path:
    return written("compared", folder)


def written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.html"
    if not path.exists():
        path.write_text(PAGES[name](), "utf-8")
    return path


# ---- what is looked for is seen ----


def test_a_page_that_breaks_the_rules_is_seen(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(
        "<!DOCTYPE html><title>bad</title><p style='color: #999; background: #fff; width: 2000px'>faint"
        "<svg><svg><rect fill='#000' width='99' height='20'/><text y='9' fill='#333'>dim</text></svg></svg>"
        "<script src='http://127.0.0.1:9/missing.js'></script>"
    )
    browser.open(path)
    console, asked = browser.logs()
    assert any("missing.js" in message for message in console)
    assert "http://127.0.0.1:9/missing.js" in asked
    assert [text.partition(":")[0] for text in too_faint(browser)] == ["P 'faint'", "text 'dim'"]
    assert browser.script("return document.documentElement.scrollWidth") > 1280


def test_contrast_is_that_of_wcag():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", "rgb(255, 255, 255)") == pytest.approx(4.48, abs=0.005)


# ---- the page ----


def test_page_loads_alone_and_without_a_complaint(browser, page):
    browser.open(page)
    console, asked = browser.logs()
    assert console == []
    assert asked == [page.as_uri()]
    assert browser.script("return performance.getEntriesByType('resource').length") == 0
    assert browser.script("return document.compatMode") == "CSS1Compat"
    assert browser.script("return document.querySelector('h1').textContent")


@pytest.mark.parametrize("width", WIDTHS)
def test_page_is_as_wide_as_the_window(browser, page, width):
    browser.open(page, width)
    wide, room = browser.script(
        "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    )
    assert wide == room
    assert width - 20 < room <= width  # less the scroll bar of a desktop


@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_has_contrast(browser, page, scheme):
    browser.open(page, scheme=scheme)
    browser.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert len(browser.script(browsers.TEXTS)) > 10
    assert too_faint(browser) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS[:2])
def test_screenshots(browser, page, artifacts, scheme, width):
    browser.open(page, width, scheme)
    image = browser.screenshot(artifacts / f"{page.stem}-{scheme}-{width}.png")
    pixels = Image.open(io.BytesIO(image)).convert("RGB")
    assert pixels.width == width
    colours = sorted(pixels.getcolors(1 << 24), reverse=True)
    brightness = sum(colours[0][1]) / 3  # of the commonest
    assert brightness > 240 if scheme == "light" else brightness < 48
    assert len(colours) > 20


def test_tables_have_captions_and_scopes(browser, page):
    browser.open(page)
    for table in browser.script("""return [...document.querySelectorAll("table")].map(t => ({
        caption: t.caption && t.caption.textContent.trim(),
        unscoped: [...t.querySelectorAll("th:not([scope])")].length,
        headless: [...t.tBodies[0].rows].filter(r => r.cells[0].tagName !== "TH").length,
        widths: new Set([...t.rows].map(r => [...r.cells].reduce((n, c) => n + c.colSpan, 0))).size,
    }))"""):
        assert table["caption"]
        assert table["unscoped"] == table["headless"] == 0, table
        assert table["widths"] == 1, table  # every row is as long as the others


#: Runs axe-core's rules of WCAG 2.2's levels A and AA, and those that it calls good practice.
AXE = """
const done = arguments[0];
const values = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
axe.run(document, {runOnly: {type: "tag", values}}).then(found => done({
  passed: found.passes.length,
  violations: found.violations.map(v => `${v.id}: ${v.nodes[0].html.slice(0, 120)}`),
}));
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_to_complain_of(browser, page, scheme):
    try:
        rules = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    except ImportError:
        missing("axe-core (pip install 'cnn-engine[browser]')")
    browser.open(page, scheme=scheme)
    browser.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.script(rules)
    found = browser.driver.execute_async_script(AXE)
    assert found["violations"] == []
    assert found["passed"] > 30


# ---- many layers ----

ROWS = """return [...document.querySelectorAll("#layer-table tbody tr")].filter(r => !r.hidden)
    .map(r => [...r.cells].map(c => c.textContent))"""


def test_layers_are_sorted_by_a_click(browser, folder):
    from selenium.webdriver.common.keys import Keys

    browser.open(written("deep", folder))
    given = browser.script(ROWS)
    assert len(given) == 151
    sums = given[-1]
    assert sums[0] == "Sum of layers"
    heads = browser.driver.find_elements("css selector", "#layer-table thead button")
    assert [head.text for head in heads[:3]] == ["Layer", "time", "share"]

    def seconds(row: list[str]) -> float:
        number, unit = row[1].split()
        return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]

    heads[1].click()
    rows = browser.script(ROWS)
    assert rows[0][0] == "/maxpool/MaxPool"
    assert rows[-1] == sums
    times = list(map(seconds, rows[:-1]))
    assert times == sorted(times, reverse=True)
    assert len({row[0] for row in rows}) == 151
    assert (
        browser.script("return document.querySelectorAll('#layer-table [aria-sort]').length") == 1
    )
    heads[1].send_keys(Keys.ENTER)
    times = list(map(seconds, browser.script(ROWS)[:-1]))
    assert times == sorted(times)
    heads[1].click()
    assert browser.script(ROWS) == given
    heads[4].click()  # GFLOP/s: what has none comes last
    assert browser.script(ROWS)[-2][4] == "-"
    heads[0].click()
    assert [row[0] for row in browser.script(ROWS)[:2]] == [
        "/fc/Gemm",
        "/layer1/layer1.0/conv1/Conv",
    ]


def test_layers_are_searched(browser, folder):
    browser.open(written("deep", folder))
    field = browser.driver.find_element("css selector", "input[type=search]")
    assert field.accessible_name == "Search layers"
    field.send_keys("LAYER2.0 conv")
    rows = browser.script(ROWS)
    names = [row[0] for row in rows]
    assert names == [*(f"/layer2/layer2.0/conv{i}/Conv" for i in (1, 2, 3)), "Sum of layers"]
    assert browser.script("return document.querySelector('output').textContent") == "3 of 150"
    field.clear()
    browser.script("document.querySelector('input').dispatchEvent(new Event('input'))")
    assert len(browser.script(ROWS)) == 151


# ---- the keyboard ----

FOCUS = """
const e = document.activeElement;
if (e === document.body) return null;
const style = getComputedStyle(e), box = e.getBoundingClientRect();
let around = e.parentElement;
while (getComputedStyle(around).backgroundColor === "rgba(0, 0, 0, 0)") around = around.parentElement;
return {
  what: e.tagName + " " + (e.getAttribute("aria-label") || e.getAttribute("href") || e.textContent.trim()),
  outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth), colour: style.outlineColor,
  around: getComputedStyle(around).backgroundColor,
  first: e === document.querySelector(".skip"),
  seen: box.width > 0 && box.right > 0 && box.bottom > 0 && box.top < innerHeight,
};
"""


def walk(browser: Browser) -> list[dict[str, Any]]:
    """Returns what Tab reaches, one after the other, until it leaves the page or is back at its beginning."""
    from selenium.webdriver.common.keys import Keys

    reached: list[dict[str, Any]] = []
    while len(reached) < 200:
        browser.press(Keys.TAB)
        focus = browser.script(FOCUS)
        if focus is None or (reached and focus["first"]):
            return reached
        reached.append(focus)
    pytest.fail(f"Tab does not leave the page: {[focus['what'] for focus in reached[-9:]]}")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_keyboard_reaches_everything_and_shows_where_it_is(browser, page, scheme):
    browser.open(page, scheme=scheme)
    reached = walk(browser)
    assert reached[0]["what"] == "A #results"  # the way past the contents
    assert len({focus["what"] for focus in reached}) == len(reached)
    wanted = browser.script("""
        const inner = "a[href], summary, button, input, [tabindex='0']";
        return [...document.querySelectorAll(inner)].filter(e => e.checkVisibility()).length""")
    assert len(reached) == wanted
    for focus in reached:
        assert focus["seen"], focus
        assert focus["outline"] >= 2, focus
        assert contrast(focus["colour"], focus["around"]) >= 3, focus
    browser.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    for region in browser.driver.find_elements("css selector", "[tabindex='0']"):
        assert region.aria_role == "region"
        assert region.accessible_name


def test_keyboard_skips_to_the_results(browser, compared_page):
    from selenium.webdriver.common.keys import Keys

    browser.open(compared_page)
    browser.press(Keys.TAB, Keys.ENTER)
    assert browser.script("return document.activeElement.tagName") == "MAIN"
    browser.press(Keys.TAB)
    assert browser.script("return document.querySelector('main').contains(document.activeElement)")


def test_keyboard_opens_the_steps_and_scrolls_a_table(browser, compared_page):
    from selenium.webdriver.common.keys import Keys

    browser.open(compared_page, 390)
    opened = "return document.querySelector('details').open"
    shown = "return document.querySelector('details .scroll').checkVisibility()"
    browser.script("document.querySelector('summary').focus()")
    assert browser.script(f"{opened.removeprefix('return ')}") is None
    for key, state in ((Keys.ENTER, True), (Keys.SPACE, False), (Keys.SPACE, True)):
        browser.press(key)
        assert browser.script(opened) is state
        assert browser.script(shown) is state
    browser.press(Keys.TAB)
    inside = "return document.querySelector('details .scroll') === document.activeElement"
    assert browser.script(inside)

    browser.script("""
        window.wide = [...document.querySelectorAll(".scroll")].find(e => e.scrollWidth > e.clientWidth + 40);
        wide.focus()""")
    browser.press(*[Keys.ARROW_RIGHT] * 5)
    for _ in range(50):  # it glides
        if browser.script("return wide.scrollLeft") > 20:
            break
    assert browser.script("return wide.scrollLeft") > 20
    name = browser.script("return wide.querySelector('tbody th').getBoundingClientRect().left")
    assert name >= 0, "the names of a wide table stay in sight"


def test_page_needs_no_pointer_to_read_a_number(browser, compared_page):
    """What a chart says when pointed at is in a table as well."""
    browser.open(compared_page)
    titles, cells = browser.script("""
        document.querySelectorAll("details").forEach(d => d.open = true);
        const text = selector => [...document.querySelectorAll(selector)].map(e => e.textContent.trim());
        return [text("svg.bar title"), text("td")]""")
    assert len(titles) > 20
    for title in titles:
        time = title.rpartition(": ")[2].partition(",")[0]
        assert time in cells, title
