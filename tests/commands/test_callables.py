"""``module:callable`` on a command line: modules of the current folder, and what is at fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cnn_engine import InputError, callables


def test_a_module_of_the_current_folder_is_found(tmp_path):
    """As the installed command looks: without the current folder on its path, unlike ``python -m``."""
    (tmp_path / "my_networks.py").write_text("def small(width=1):\n    return 2 * width\n")
    program = """
import sys
from cnn_engine import callables
sys.path.remove("")
make, arguments, name = callables.resolve("model", "my_networks:small,width=3")
print(make(**arguments), name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("6 small(width=3)\n", "")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("json", "model: expected module:callable"),
        ("no_such_module:f", "model: no_such_module:f: expected a module no_such_module that can"),
        ("json:dump_it", "expected 'dump_it' in json, found none of that name; did you mean dump?"),
        ("json:loads,no", "expected key=value after the callable, found 'no'"),
        ("json:JSONDecoder,width=3", "expected arguments that JSONDecoder takes"),
        ("json:decoder", "expected something to call, found an object of type module"),
    ],
)
def test_specs_at_fault(spec, says):
    with pytest.raises(InputError) as error:
        callables.resolve("model", spec)
    assert says in str(error.value)
