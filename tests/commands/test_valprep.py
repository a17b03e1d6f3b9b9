"""ImageNet's validation folder sorted into classes: nothing lost, moved twice or replaced, if killed too."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from cnn_engine import InputError
from cnn_engine.io.image_files import find

sys.path.insert(0, str(ROOT / "scripts"))
import valprep

sys.path.pop(0)

SYNSETS = ("n02119789", "n02100735", "n01440764", "n15075141")  # in no order, as ImageNet has them
COUNT = 40


@pytest.fixture
def flat(tmp_path) -> Path:
    """Forty files of contents of their own, the ground truth, and what its numbers stand for."""
    folder = tmp_path / "val"
    folder.mkdir()
    for number in range(1, COUNT + 1):
        (folder / f"ILSVRC2012_val_{number:08d}.JPEG").write_text(f"image {number}")
    truth = [1 + number * 7 % 3 for number in range(COUNT)]
    (tmp_path / "truth.txt").write_text("".join(f"{number}\n" for number in truth))
    (tmp_path / "synsets.txt").write_text("".join(f"{synset}\n" for synset in SYNSETS))
    return folder


def arguments(flat: Path, *more: str) -> list[str]:
    top = flat.parent
    return [str(flat), "--labels", f"{top}/truth.txt", "--synsets", f"{top}/synsets.txt", *more]


def wanted(flat: Path) -> dict[str, str]:
    """Returns path -> content of the sorted folder."""
    truth = (flat.parent / "truth.txt").read_text().split()
    return {
        f"{SYNSETS[int(number) - 1]}/ILSVRC2012_val_{i:08d}.JPEG": f"image {i}"
        for i, number in enumerate(truth, 1)
    }


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def refused(capsys, *words: str) -> str:
    assert valprep.main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_images_go_into_the_folders_of_their_classes(flat, capsys):
    before = contents(flat)
    assert valprep.main(arguments(flat, "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "to be moved: 40 images into 3 folders" in out
    assert "  ILSVRC2012_val_00000001.JPEG -> n02119789/" in out
    assert contents(flat) == before
    assert not any(path.is_dir() for path in flat.iterdir())

    assert valprep.main(arguments(flat)) == 0
    assert "moved: 40 images into 3 folders" in capsys.readouterr().out
    assert contents(flat) == wanted(flat)
    assert valprep.main(arguments(flat)) == 0
    assert "moved: 0 images into 0 folders\nin their folders before: 40" in capsys.readouterr().out
    assert contents(flat) == wanted(flat)
    found = find(str(flat), 3)
    assert len(found) == COUNT
    assert len(found.classes) == 3


#: Runs the command and kills it with SIGKILL before or after the rename, or the folder, of a number.
KILLED = """
import os, signal, sys
import valprep

what, when, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
real, calls = getattr(os, what), 0

def killed(*arguments, **named):
    global calls
    calls += 1
    if calls == number and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*arguments, **named)
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(os, what, killed)
sys.exit(valprep.main(sys.argv[4:]))
"""


def test_killed_at_any_moment_it_goes_on(flat, tmp_path):
    """Killed again and again, each time further on, and at last left alone."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    given = contents(flat)
    generator = np.random.default_rng(0)
    moments = [("mkdir", "before", 1), ("mkdir", "after", 2)]
    moments += [
        ("rename", ("before", "after")[i % 2], int(generator.integers(1, 8))) for i in range(4)
    ]
    moments += [("fsync", "before", 1)]
    left = COUNT
    for what, when, number in moments:
        done = subprocess.run(
            [sys.executable, str(script), what, when, str(number), *arguments(flat)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
            capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = contents(flat)
        assert sorted(found.values()) == sorted(given.values())  # none lost, none twice
        flat_now = [path for path in found if "/" not in path]
        assert all(wanted(flat).get(path) == text for path, text in found.items() if "/" in path)
        assert len(flat_now) <= left
        left = len(flat_now)
    assert valprep.main(arguments(flat, "--quiet")) == 0
    assert contents(flat) == wanted(flat)


@pytest.mark.parametrize(
    "damage", ["twice", "elsewhere", "other suffix", "link", "folder is a file"]
)
def test_what_could_lose_an_image_is_refused_before_anything_is_moved(flat, damage, capsys):
    first = flat / "ILSVRC2012_val_00000001.JPEG"
    last = flat / "ILSVRC2012_val_00000040.JPEG"
    for synset in SYNSETS[:2]:
        (flat / synset).mkdir()
    if damage == "twice":
        (flat / SYNSETS[0] / first.name).write_text("another")
        words = "which is to be kept?"
    elif damage == "elsewhere":
        last.rename(flat / SYNSETS[1] / first.name)
        first.unlink()
        words = f"expected the image in {SYNSETS[0]}"
    elif damage == "other suffix":
        first.with_suffix(".jpg").write_text("another")
        words = (
            "expected one file, found ILSVRC2012_val_00000001.JPEG and ILSVRC2012_val_00000001.jpg"
        )
    elif damage == "link":
        first.unlink()
        first.symlink_to(last)
        words = "expected a file, found something else"
    else:
        (flat / SYNSETS[1]).rmdir()
        (flat / SYNSETS[1]).write_text("a file")
        words = "expected a folder, found something else"
    before = contents(flat)
    assert words in refused(capsys, *arguments(flat))
    assert contents(flat) == before


def test_a_name_that_is_taken_meanwhile_is_not_replaced(flat):
    labels = valprep.read_labels(str(flat.parent / "truth.txt"), dict(enumerate(SYNSETS, 1)))
    plan = valprep.make_plan(flat, labels)
    (flat / SYNSETS[0]).mkdir()
    (flat / SYNSETS[0] / "ILSVRC2012_val_00000001.JPEG").write_text("a guest")
    with pytest.raises(InputError, match="one that was put there since"):
        valprep.carry_out(flat, plan)
    assert (flat / "ILSVRC2012_val_00000001.JPEG").read_text() == "image 1"
    assert (flat / SYNSETS[0] / "ILSVRC2012_val_00000001.JPEG").read_text() == "a guest"


def test_missing_images_and_other_files(flat, capsys):
    (flat / "ILSVRC2012_val_00000003.JPEG").unlink()
    (flat / "readme.txt").write_text("not an image")
    (flat / "ILSVRC2012_val_00000099.JPEG").write_text("without a label")
    error = refused(capsys, *arguments(flat))
    assert (
        "expected all of the 40 images (or --partial), found none called ILSVRC2012_val_00000003"
        in error
    )
    assert valprep.main(arguments(flat, "--partial")) == 0
    out = capsys.readouterr().out
    assert "moved: 39 images" in out
    assert "missing: 1, such as ILSVRC2012_val_00000003" in out
    assert "left alone: 2 files without a label, such as ILSVRC2012_val_00000099.JPEG" in out


def test_two_at_a_time_are_refused(flat, capsys):
    descriptor = os.open(flat, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "another command is sorting it" in refused(capsys, *arguments(flat))
    finally:
        os.close(descriptor)


def test_kaggles_table_and_plain_lines(flat, tmp_path, capsys):
    rows = [
        f"ILSVRC2012_val_{i:08d},{SYNSETS[i % 4]} 1 2 3 4 {SYNSETS[i % 4]} 5 6 7 8"
        for i in range(1, 41)
    ]
    table = tmp_path / "LOC_val_solution.csv"
    table.write_text("\n".join(["ImageId,PredictionString", *rows]))
    assert valprep.main([str(flat), "--labels", str(table), "--dry-run", "--quiet"]) == 0
    found = valprep.read_labels(str(table))
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(f"val/{image}.JPEG {synset}\n" for image, synset in found.items()))
    assert valprep.read_labels(str(plain)) == found
    assert len(found) == 40
    assert "a ground truth of numbers" in refused(
        capsys, str(flat), "--labels", str(table), "--synsets", f"{tmp_path}/synsets.txt"
    )


def test_meta_mat_of_the_development_kit(tmp_path):
    io = pytest.importorskip("scipy.io")
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)]
    rows = np.array([(i, synset, "w") for i, synset in enumerate(SYNSETS, 1)], kinds)
    io.savemat(tmp_path / "meta.mat", {"synsets": rows})
    assert valprep.read_synsets(str(tmp_path / "meta.mat")) == dict(enumerate(SYNSETS, 1))
    (tmp_path / "broken.mat").write_bytes(b"MATLAB 5.0" + bytes(300))
    with pytest.raises(InputError, match=r"expected meta\.mat of the development kit"):
        valprep.read_synsets(str(tmp_path / "broken.mat"))


@pytest.mark.parametrize(
    ("labels", "synsets", "words"),
    [
        ("", None, "expected a label for each image, found none"),
        ("1\n2\n", None, "--synsets: expected what the numbers in --labels stand for"),
        ("1\n9\n", "n02119789\nn02100735\n", "expected numbers that --synsets has, found 9"),
        ("a n02119789\na n02119789\n", None, "line 2: expected an image that was not named before"),
        ("a ../../etc\n", None, "line 1: expected an image and its synset"),
        ("1\n", "n1\n", "line 1: expected a synset such as n01440764, found 'n1'"),
        ("1\n", "n02119789\nn02119789\n", "line 2: expected a synset that was not there before"),
        ("1\n", "".join(f"n{i:08d}\n" for i in range(1000)), "in the order of ILSVRC2012_ID"),
    ],
)
def test_labels_that_are_refused(flat, tmp_path, labels, synsets, words, capsys):
    (tmp_path / "l.txt").write_text(labels)
    more = []
    if synsets is not None:
        (tmp_path / "s.txt").write_text(synsets)
        more = ["--synsets", f"{tmp_path}/s.txt"]
    before = contents(flat)
    assert words in refused(capsys, str(flat), "--labels", f"{tmp_path}/l.txt", *more)
    assert contents(flat) == before


def test_numbers_may_stand_beside_the_synsets(tmp_path):
    (tmp_path / "s.txt").write_text("2 n01440764 tench\n1 n02119789 kit fox\n")
    assert valprep.read_synsets(str(tmp_path / "s.txt")) == {2: "n01440764", 1: "n02119789"}


def test_no_folder(tmp_path, capsys):
    (tmp_path / "l.txt").write_text("a n02119789\n")
    error = refused(capsys, str(tmp_path / "missing"), "--labels", f"{tmp_path}/l.txt")
    assert "expected a folder, found No such file" in error


@pytest.mark.parametrize("command", ["cnn_engine.valprep", "cnn_engine valprep"])
def test_the_former_command_runs_the_script_and_names_it(flat, command):
    command = [sys.executable, "-m", *command.split(), *arguments(flat)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: ")
    assert str(ROOT / "scripts/valprep.py") in done.stderr
    assert done.stderr.count("\n") == 1
    assert contents(flat) == wanted(flat)


def test_errors_of_the_former_command_are_the_scripts(flat):
    command = [sys.executable, "-m", "cnn_engine.valprep", str(flat), "--labels", "/nonexistent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    warning, error, *rest = done.stderr.splitlines()
    assert warning.startswith("warning: ")
    assert error.startswith("error: /nonexistent")
    assert not rest
