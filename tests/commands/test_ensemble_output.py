"""What ensemble leaves in its folder: one command's files alone, and pages that run nothing they name."""

from __future__ import annotations

import html.parser
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cnn_engine import cli
from cnn_engine.ensemble import command
from cnn_engine.io.files import lock_folder

QUIET = ["--quiet", "--no-ceilings", "--device", "cpu", "--threads", "1", "--data", "synthetic",
         "--images", "20", "--batch", "10"]  # fmt: skip

#: A name that would run, close an attribute, or turn text around, were it not escaped.
ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u202e\x1b[31m{{ 7 * 7 }}"


def run(folder, *words: str) -> int:
    return command.main([*QUIET, "--output", str(folder), *words])


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_command_into_a_folder_is_refused(tmp_path, capsys):
    folder = tmp_path / "out"
    assert run(folder) == cli.DONE
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    lock = lock_folder(folder, "--output")
    try:
        assert run(folder, "--members", "2") == cli.INPUT_AT_FAULT
        (line,) = capsys.readouterr().err.splitlines()
        wanted = (
            f"error: --output: expected a folder that no other command writes, for {folder}, found"
        )
        assert line.startswith(wanted)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    finally:
        os.close(lock)
    assert run(folder, "--members", "2") == cli.DONE


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import sys, pathlib; from cnn_engine.io.files import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1]), '--output'); print('has it', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "has it\n"
    assert run(tmp_path) == cli.INPUT_AT_FAULT
    process.kill()
    process.communicate()
    assert run(tmp_path) == cli.DONE


def test_two_commands_at_once_do_not_both_write(tmp_path, capsys):
    folder = tmp_path / "out"
    words = [sys.executable, "-m", "cnn_engine.ensemble", *QUIET, "--output", str(folder)]
    first = subprocess.Popen([*words, "--epochs", "1000000"], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not (folder / "member-0.part").exists() and time.monotonic() < end:
        assert first.poll() is None
        time.sleep(0.02)
    assert run(folder) == cli.INPUT_AT_FAULT
    assert "that no other command writes" in capsys.readouterr().err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=100)
    assert first.returncode == cli.INTERRUPTED
    assert run(folder) == cli.DONE


def test_no_file_of_a_run_of_more_members_is_left(tmp_path):
    assert run(tmp_path, "--members", "3") == cli.DONE
    (tmp_path / "member-7.part").write_bytes(b"")  # of one that was killed
    (tmp_path / "members-of-mine.npy").write_bytes(b"")
    assert run(tmp_path, "--members", "2", "--combine", "3,1") == cli.DONE
    assert names(tmp_path) == [
        "ensemble.npy", "member-0.npy", "member-1.npy", "members-of-mine.npy", "report.json",
    ]  # fmt: skip
    found = [np.load(tmp_path / f"member-{k}.npy") for k in range(2)]
    mean = np.tensordot([0.75, 0.25], found, 1).astype(np.float32)
    assert (np.load(tmp_path / "ensemble.npy") == mean).all()


def test_weights_of_more_members_are_neither_lost_nor_taken_for_these(tmp_path, capsys):
    for name in ("member-2.safetensors", "member-0.safetensors"):
        (tmp_path / name).write_bytes(b"weights")
    assert run(tmp_path, "--work", "train", "--members", "2") == cli.INPUT_AT_FAULT
    assert (
        f"found {tmp_path}/member-2.safetensors; choose another folder" in capsys.readouterr().err
    )
    assert names(tmp_path) == ["member-0.safetensors", "member-2.safetensors"]


# ---- pages ----


class Tags(html.parser.HTMLParser):
    """Collects tags, and attributes that run something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(page: str) -> None:
    found = Tags()
    found.feed(page)
    assert not {"script", "img"} & found.tags
    assert not {name for name in found.attributes if name.startswith("on") or name == "src"}
    assert "<script>alert(1)</script>" in found.text  # shown as it is
    assert "{{ 7 * 7 }}" in found.text
    assert not {"\u202e", "\x1b"} & set(page)


def test_names_in_the_page_of_an_ensemble_run_nothing(tmp_path):
    paths = {name: tmp_path / f"r.{name}" for name in ("html", "json")}
    words = [f"--member=name={ATTACK.replace(',', '')}", "--member=name=b"]
    words += [f"--{name}={path}" for name, path in paths.items()]
    assert command.main([*QUIET, *words]) == cli.DONE
    check_page(paths["html"].read_text())
    assert json.loads(paths["json"].read_text())["members"][0]["name"] == f"{ATTACK}-0"


def test_names_in_the_page_of_infer_run_nothing(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    import infer_inputs

    from cnn_engine import infer

    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)
    name = ATTACK.replace("/", "\u2215")
    (tmp_path / f"{name}.jpg").write_bytes(b"no image")
    (tmp_path / "a.jpg").write_bytes(infer_inputs.encoded(infer_inputs.pixels(1)[0]))
    words = [str(tmp_path), "--output", str(tmp_path.parent / "rows"), "--html", str(tmp_path / "r.html"),
             "--quiet", *infer_inputs.COMMON]  # fmt: skip
    assert infer.main(words) == 0
    page = (tmp_path / "r.html").read_text()
    found = Tags()
    found.feed(page)
    assert not {"script", "img"} & found.tags
    assert "<script>alert(1)<\u2215script>" in found.text
