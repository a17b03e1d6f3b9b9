"""Commands and programs of the pages are found as they are written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
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


def test_a_need_that_is_none_is_refused():
    with pytest.raises(ValueError, match="console: expected nothing or one of"):
        documented.commands("```console tpu\n$ x\n```\n")


def test_pages_of_every_kind_are_read():
    names = {path.relative_to(ROOT).as_posix() for path in documented.documents()}
    assert {"README.md", "docs/tutorials/first_run.md", "docs/how-to/add_kernel.md"} <= names
    assert not any("/notes/" in name for name in names)
    text = "".join(path.read_text("utf-8") for path in documented.documents())
    assert len([need for _, need in documented.commands(text) if not need]) > 30
