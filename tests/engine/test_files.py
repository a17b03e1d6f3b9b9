"""Files that the engine writes and reads: their permissions, and the most that is taken of one."""

from __future__ import annotations

import os

import pytest

from cnn_engine.__main__ import main
from cnn_engine.errors import InputError
from cnn_engine.io import files


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_permissions_of_any_other(tmp_path, umask):
    """Not those of the temporary file that it was."""
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "ours", "text")
        (tmp_path / "any").write_text("text")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_what_is_longer_than_expected_is_refused_and_not_cut_off(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + "ä".encode() * 4)
    assert files.read_text(path, 11) == "ääää"
    with pytest.raises(InputError, match="expected at most 10 bytes, found more"):
        files.read_text(path, 10)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="expected text in UTF-8"):
        files.read_text(path, 10)


@pytest.mark.parametrize("path", ["n" * 300, "n" * 300 + "/result.json"])
def test_a_name_that_is_too_long_is_one_line(tmp_path, path):
    with pytest.raises(InputError, match="^--json: "):
        files.check_writable(tmp_path / path, "--json")
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_name_is_not_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("ensemble", "characterize"):
        assert main([command, "--output", "", "--device", "cpu"]) == 2
    with pytest.raises(InputError, match="^--output: expected a folder, found no name"):
        files.make_folder("", "--output")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["close", "fdopen", "fsync", "replace"])
def test_an_interruption_leaves_no_file(tmp_path, monkeypatch, call):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    write = files.check_writable if call == "close" else files.write_text
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "result", "text")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
