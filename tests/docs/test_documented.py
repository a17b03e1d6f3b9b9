"""Commands and programs of the pages are found as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cnn_engine.lower.pipeline import PIPELINE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import docs_site  # noqa: E402
import documented  # noqa: E402

sys.path.pop(0)

PAGE = """
```console
$ one --a \\
    --b
printed
$ two
```

```console gpu
$ three
```

```python run
print("it's run")
```

```python
not_run()
```
"""


def test_commands_and_programs():
    assert documented.commands(PAGE) == [
        ("one --a --b", ""),
        ("two", ""),
        ("three", "gpu"),
        (""".venv/bin/python -c 'print("it'"'"'s run")\n'""", ""),
    ]


def test_modules_and_options_that_text_names():
    text = "Run `cnn-engine run --json` or `python -m benchmarks.tables\n--help`, in ``cnn-engine COMMAND``."
    assert documented.named(text) == [
        ("cnn_engine.run", ["--json"]),
        ("benchmarks.tables", ["--help"]),
    ]


def test_options_of_commands_are_there():
    """As scripts/documented.py asks of all modules, without a process for each."""
    options = {
        f"cnn_engine.{name}": {word for action in parser._actions for word in action.option_strings}
        for name, parser in docs_site.parsers()
    }
    for name in ("new", "check", "rank"):
        options["cnn_engine.kernel"] |= options[f"cnn_engine.kernel {name}"]
    found = 0
    for path in documented.documents():
        for module, words in documented.named(path.read_text("utf-8")):
            if module.startswith("cnn_engine."):
                found += 1
                assert set(words) <= options[module], (path.name, module, words)
    assert found > 15


def test_a_need_that_is_none_is_refused():
    with pytest.raises(ValueError, match="console: expected nothing or one of"):
        documented.commands("```console tpu\n$ x\n```\n")


def test_pages_of_every_kind_are_read():
    names = {path.relative_to(ROOT).as_posix() for path in documented.documents()}
    assert {"README.md", "docs/tutorials/first_run.md", "docs/how-to/add_kernel.md"} <= names
    assert not any("/notes/" in name for name in names)
    text = "".join(path.read_text("utf-8") for path in documented.documents())
    assert len([need for _, need in documented.commands(text) if not need]) > 30


def test_passes_are_shown_with_their_reasons():
    """The tutorial quotes inspect: each pass is in the list, with the reason that it has there."""
    page = (ROOT / "docs/tutorials/onnx_model.md").read_text("utf-8")
    shown = re.findall(r"^  (\w+) +\d+ +\d+ +(.+)$", page, re.MULTILINE)
    passes = [one for entry in PIPELINE for one in getattr(entry, "passes", (entry,))]
    assert len(shown) == 4
    assert set(shown) <= {(one.name, one.why) for one in passes}
