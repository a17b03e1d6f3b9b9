"""``--skips-to`` and ``--only-from``: CI runs what was skipped once it has installed what was missing."""

from __future__ import annotations

import conftest
import pytest

TESTS = """
import pytest

def test_runs(): pass
@pytest.mark.parametrize("x", ["::", "[a b]"])
def test_skips(x): pytest.skip("a package is missing")
@pytest.mark.xfail(reason="a known fault")
def test_fails(): assert False
"""


class Runs:
    """The names of the tests that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.names.append(nodeid)


class Options:
    """The options of tests/conftest.py and what it does for them, for tests of another folder."""

    pytest_addoption = staticmethod(conftest.pytest_addoption)
    pytest_configure = staticmethod(conftest.pytest_configure)
    pytest_collection_modifyitems = staticmethod(conftest.pytest_collection_modifyitems)


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Returns a function from options to the names of the tests that pytest runs with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of the suite that this test is one of
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text(
        'import pytest\npytest.skip("no such package", allow_module_level=True)\n'
    )

    def run(*options: str) -> list[str]:
        runs = Runs()
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", *options]
        pytest.main(words, plugins=[Options(), runs])
        return runs.names

    return run


def test_what_is_skipped_is_run_alone(ran, tmp_path):
    skips = tmp_path / "skips"
    assert len(ran(f"--skips-to={skips}")) == 4
    skipped = {"test_some.py::test_skips[::]", "test_some.py::test_skips[[a b]]"}
    assert set(skips.read_text().splitlines()) == {*skipped, "test_none.py"}
    assert set(ran(f"--only-from={skips}")) == skipped
    (tmp_path / "test_none.py").write_text("def test_now(): pass\n")  # its package is there now
    assert set(ran(f"--only-from={skips}")) == {*skipped, "test_none.py::test_now"}
