"""Runs every command that the README and the docs show, as written: ``python scripts/documented.py [gpu]``.

To be run at the top of a checkout in which the README's set-up was done, so that ``.venv`` is there. A
command is a line that begins with ``$`` in a block that begins with three backticks and ``console``. A word
after that says what the block needs: ``gpu`` (run when asked for), ``setup`` (installs or trains, which CI
does in its own way), ``network`` (its code is tested against a local server). A program is a block that
begins with ``python run``. Each command and program must exit with 0. Commands in running text are not run,
but the module and the options that they name must be there.

Two documents run side by side, each in a folder of links to the checkout: files that its commands write are
seen by its own commands alone.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDS = ("gpu", "setup", "network")
TIMEOUT_S = 600
SIDE_BY_SIDE = 2


def commands(text: str) -> list[tuple[str, str]]:
    """Returns the commands and programs of a Markdown text, each with what it needs ("" for nothing)."""
    found = []
    blocks = r"^```(?:console *(\S*)|python run)\n(.*?)^```$"
    for block in re.finditer(blocks, text, re.MULTILINE | re.DOTALL):
        if block[1] is None:
            found.append((f".venv/bin/python -c {shlex.quote(block[2])}", ""))
            continue
        if block[1] not in ("", *NEEDS):
            raise ValueError(f"console: expected nothing or one of {NEEDS}, found {block[1]!r}")
        lines = re.sub(r"\\\n\s*", "", block[2]).splitlines()
        found += [(line.removeprefix("$ "), block[1]) for line in lines if line.startswith("$ ")]
    return found


def documents() -> list[Path]:
    """Returns the files whose commands are run."""
    folders = (ROOT / "docs", ROOT / "cifar10", ROOT / "fashion_mnist")
    inside = [path for folder in folders for path in sorted(folder.rglob("*.md"))]
    guides = [path for path in inside if path.parent.name != "notes"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *guides]


def named(text: str) -> list[tuple[str, list[str]]]:
    """Returns the modules that running text says to run, each with the options beside it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for span in re.findall(r"`[^`\n]*(?:\n[^`\n]+)?`", text):
        words = re.sub(r"\bcnn-engine (?=[a-z])", "python -m cnn_engine.", " ".join(span.split()))
        for module, rest in re.findall(r"python -m ([\w.]+)([^|`]*)", words):
            found.append((module, re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)))
    return found


def missing(module: str, options: list[str], helps: dict[str, str]) -> str | None:
    """Returns what of a module and its options is not there, or None."""
    if module not in helps:
        command = [sys.executable, "-m", module, "--help"]
        helps[module] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    if not helps[module]:
        return f"no command {module}"
    known = helps[module].replace("[no-]", "")
    lacking = [option for option in options if not re.search(rf"{option}\b", known)]
    return f"{module} has no {', '.join(lacking)}" if lacking else None


def run(command: str, folder: Path) -> tuple[int, float, str]:
    """Returns the exit status of a command in a folder, its seconds, and the end of its output."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        code, output = done.returncode, done.stdout[-1500:] + done.stderr[-1500:]
    except subprocess.TimeoutExpired:
        code, output = 124, f"took more than {TIMEOUT_S} s"
    return code, time.perf_counter() - start, output


def run_document(path: Path, wanted: str) -> list[bool]:
    """Runs a document's commands in order, a line of output each, and returns which succeeded."""
    succeeded = []
    with tempfile.TemporaryDirectory(prefix="documented-") as folder:
        for entry in ROOT.iterdir():
            (Path(folder) / entry.name).symlink_to(entry)
        for command, need in commands(path.read_text("utf-8")):
            if need != wanted:
                continue
            code, seconds, output = run(command, Path(folder))
            succeeded.append(code == 0)
            line = f"{code:3d} {seconds:6.1f} s  {path.name}: {command}"
            print(line if code == 0 else f"{line}\n{output}", flush=True)
    return succeeded


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "needs", nargs="?", default="", choices=("", *NEEDS), help="blocks that need this"
    )
    wanted = parser.parse_args(arguments).needs
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        lists = pool.map(lambda path: run_document(path, wanted), documents())
        succeeded = [done for document in lists for done in document]
    helps: dict[str, str] = {}
    for path in () if wanted else documents():
        for module, options in named(path.read_text("utf-8")):
            reason = missing(module, options, helps)
            succeeded.append(reason is None)
            if reason:
                print(f"{path.name}: {reason}")
    failed = succeeded.count(False)
    print(f"{len(succeeded) - failed} passed, {failed} failed")
    return 1 if failed or not succeeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
