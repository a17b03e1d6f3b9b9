"""A headless Chromium for the tests, driven by Selenium, and what its pages look like from outside."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

#: Set it to make what a test needs and does not find a failure instead of a skip.
REQUIRE = "CNN_ENGINE_REQUIRE_BROWSER"
#: Set it to a folder that keeps the screenshots.
ARTIFACTS = "CNN_ENGINE_TEST_ARTIFACTS"
#: Set it to a folder of pages and traces, such as those of a GPU, that are opened too.
REPORTS = "CNN_ENGINE_TEST_REPORTS"

#: So that nothing outside this machine can be reached, whatever a page asks for.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def missing(what: str) -> NoReturn:
    """Skips the test for lack of ``what``, or fails where a browser is required."""
    if os.environ.get(REQUIRE):
        pytest.fail(f"needs {what}, and {REQUIRE} is set")
    pytest.skip(f"needs {what}")


def given(ending: str) -> dict[str, Any]:
    """Returns functions that read the reports that were given, by their names."""
    folder = os.environ.get(REPORTS)
    paths = sorted(Path(folder).glob(f"*{ending}")) if folder else []
    return {
        path.name.removesuffix(ending): functools.partial(path.read_text, "utf-8") for path in paths
    }


def program(*names: str, folder: str | None = None) -> str:
    """Returns the path of the first of ``names`` that there is, in ``folder`` too."""
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PATH")]))
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    missing(f"{' or '.join(names)} (apt install chromium chromium-driver)")


@contextmanager
def start() -> Iterator[Browser]:
    """Starts Chromium; skips where it, its driver or Selenium is missing."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        missing("Selenium (pip install 'cnn-engine[browser]')")
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", OFFLINE):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = program("chromedriver", folder=os.environ.get("CHROMEWEBDRIVER"))
    chrome = webdriver.Chrome(options, Service(driver))
    chrome.set_script_timeout(60)
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


class Browser:
    """One window of Chromium.

    Attributes:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str | Path, width: int = 1280, scheme: str = "light") -> None:
        """Opens a file or address, ``width`` CSS pixels wide, in the colours of ``scheme``."""
        self.logs()  # drops those of the page before
        self.look(width, scheme)
        self.driver.get(address.as_uri() if isinstance(address, Path) else address)

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """Makes the window so wide and high, and prefer light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        preferred = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", features=[preferred])

    def devtools(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def script(self, source: str, *arguments: Any) -> Any:
        """Returns what ``source``, the body of a JavaScript function, returns."""
        return self.driver.execute_script(source, *arguments)

    def press(self, *keys: str) -> None:
        """Presses ``keys`` one after the other, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def logs(self) -> tuple[list[str], list[str]]:
        """Returns what the console says, and the addresses that were asked for, since the last call."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        asked = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return console, asked

    def screenshot(self, path: Path, whole: bool = True) -> bytes:
        """Writes the window, or the whole page, to ``path`` as PNG, and returns it."""
        if whole:
            size = "return [innerWidth, document.documentElement.scrollHeight]"
            width, height = self.script(size)
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
            self.devtools("Emulation.setDeviceMetricsOverride", **metrics, mobile=width < 600)
        # Two frames later, everything that the new size uncovers is painted.
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )
        image = base64.b64decode(self.devtools("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(image)
        return image


# ---- contrast ----

#: Every text that is shown, with its colour, its size, and the colour behind it.
TEXTS = """
const found = [];
const clear = c => c === "transparent" || /, 0\\)$/.test(c);
function behind(element) {
  const box = element.getBoundingClientRect(), y = (box.top + box.bottom) / 2;
  const under = rect => {
    const r = rect.getBoundingClientRect();
    return r.left <= box.left && box.left <= r.right && r.top <= y && y <= r.bottom;
  };
  for (let e = element; e; e = e.parentElement) {
    const rect = "svg g".includes(e.tagName) ? [...e.querySelectorAll(":scope > rect")].find(under) : null;
    if (rect) return getComputedStyle(rect).fill;
    const colour = getComputedStyle(e).backgroundColor;
    if (!clear(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
  if (!text || element.closest("title, style, script") || !element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  found.push({
    text: text.slice(0, 40), tag: element.tagName, size: parseFloat(style.fontSize),
    weight: parseInt(style.fontWeight), behind: behind(element),
    colour: element instanceof SVGElement ? style.fill : style.color,
  });
}
return found;
"""


def luminance(colour: str) -> float:
    """Returns the relative luminance of ``rgb(r, g, b)`` (WCAG 2.2, "relative luminance")."""
    assert colour.startswith("rgb("), colour
    channels = [int(part) / 255 for part in colour[4:-1].split(",")]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    """Returns the contrast ratio of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio")."""
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def too_faint(browser: Browser) -> list[str]:
    """Returns the texts below WCAG's level AA: 4.5 to 1; 3 to 1 for 24 pixels, or 18.66 in bold."""
    found = []
    for text in browser.script(TEXTS):
        large = text["size"] >= 24 or (text["size"] >= 18.66 and text["weight"] >= 700)
        ratio = contrast(text["colour"], text["behind"])
        if ratio < (3 if large else 4.5):
            found.append(f"{text['tag']} {text['text']!r}: {ratio:.2f} to 1")
    return found
