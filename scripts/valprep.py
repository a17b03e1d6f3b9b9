#!/usr/bin/env python3
"""``python scripts/valprep.py``: sorts ImageNet's flat validation folder into one folder per class.

The 50,000 images of the validation set come in one folder, with their classes in a file beside them. Here
each is renamed into a folder called as its class, which is what ``--data`` reads. A rename on one file system
either happened or did not, and everything is looked at before the first: so a run that was killed at any
moment is finished by the next, and nothing is moved twice, replaced or lost.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cnn_engine import cli
from cnn_engine.errors import InputError, UnsupportedError, expected
from cnn_engine.io.files import describe_os_error, read_text
from cnn_engine.io.images import SUFFIXES

SYNSET = re.compile(r"n[0-9]{8}")
IMAGE = "ILSVRC2012_val_{:08d}"

#: Of the files with labels and synsets; ImageNet's own have less than 4 MiB.
LARGEST_TEXT = 2**28

#: Images and moves that the text names.
SHOWN = 5


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="valprep.py",
        description="Moves the images of ImageNet's validation set into one folder per class. The same "
        "command continues where it was interrupted.",
        epilog="exit codes: 0 done; 2 the input is at fault, and nothing was moved; 130 interrupted",
    )
    p.add_argument("folder", metavar="FOLDER", help="with ILSVRC2012_val_00000001.JPEG and so on")
    p.add_argument(
        "--labels",
        required=True,
        metavar="FILE",
        help="ILSVRC2012_validation_ground_truth.txt (with --synsets), LOC_val_solution.csv, or text with an "
        "image and its synset a line",
    )
    p.add_argument(
        "--synsets",
        metavar="FILE",
        help="what the numbers of the ground truth stand for: the development kit's meta.mat, or text with a "
        "number and a synset a line, or the synset of 1, 2, ... a line",
    )
    p.add_argument(
        "--partial", action="store_true", help="take a folder that lacks some of the images"
    )
    p.add_argument(
        "--dry-run", action="store_true", help="say what would be moved, and move nothing"
    )
    p.add_argument("--quiet", action="store_true", help="print nothing")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    synsets = read_synsets(options.synsets) if options.synsets else None
    labels = read_labels(options.labels, synsets)
    folder = Path(options.folder)
    with _locked(folder):
        plan = make_plan(folder, labels)
        if plan.missing and not options.partial:
            raise expected(
                str(folder), f"all of the {len(labels):,} images (or --partial)",
                f"none called {plan.missing[0]}, and {len(plan.missing) - 1:,} others missing",
            )  # fmt: skip
        if not options.dry_run:
            carry_out(folder, plan)
    if not options.quiet:
        cli.show(_text(plan, options.dry_run))
    return cli.DONE


@dataclass
class Plan:
    """What is to be done, and what was found.

    Attributes:
        moves: (file, class), in order.
        there: files that are in their class's folder already.
        missing: images that are nowhere.
        others: files in the folder that no label is for.
    """

    moves: list[tuple[str, str]] = field(default_factory=list)
    there: int = 0
    missing: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def make_plan(folder: Path, labels: dict[str, str]) -> Plan:
    """Looks at all there is in ``folder``, and changes nothing.

    Args:
        labels: image, without the file's suffix -> synset.

    Raises:
        InputError: an image is there twice, or in the folder of another class, or what would be moved is no
            file, or its place is taken.
    """
    plan = Plan()
    flat, plan.others = _images_in(folder, labels)
    placed: dict[str, tuple[str, str]] = {}
    device = folder.stat().st_dev
    for synset in sorted(set(labels.values())):
        place = folder / synset
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise expected(str(place), "a folder", "something else")
        if status.st_dev != device:
            raise expected(str(place), f"a folder on the file system of {folder}", "another")
        for image, name in _images_in(place, labels)[0].items():
            if image in placed:
                raise expected(image, "one file", f"{Path(*placed[image])} and {synset}/{name}")
            placed[image] = (synset, name)
    for image, synset in labels.items():
        name, found = flat.get(image), placed.get(image)
        if found is not None and found[0] != synset:
            raise expected(str(folder / Path(*found)), f"the image in {synset}", "it there")
        if name is not None and found is not None:
            raise expected(image, "one file", f"{name} and {Path(*found)}: which is to be kept?")
        if name is not None:
            plan.moves.append((name, synset))
        elif found is not None:
            plan.there += 1
        else:
            plan.missing.append(image)
    return plan


def _images_in(folder: Path, labels: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns image -> file for what ``labels`` know, and the other files."""
    found: dict[str, str] = {}
    others = []
    try:
        for name in sorted(os.listdir(folder)):
            stem, suffix = os.path.splitext(name)
            path = folder / name
            if stem not in labels or suffix.lower() not in SUFFIXES:
                others += [name] if path.is_file() else []
                continue
            if not stat.S_ISREG(path.lstat().st_mode):
                raise expected(str(path), "a file", "something else")
            if stem in found:
                raise expected(str(folder / stem), "one file", f"{found[stem]} and {name}")
            found[stem] = name
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {describe_os_error(error)}") from error
    return found, others


def carry_out(folder: Path, plan: Plan) -> None:
    """Moves the files of ``plan``, one rename each, and makes the moves last.

    Raises:
        InputError: the system refuses; what was moved stays, and the same command goes on from there.
    """
    synsets = sorted({synset for _, synset in plan.moves})
    try:
        for synset in synsets:
            (folder / synset).mkdir(exist_ok=True)
        for name, synset in plan.moves:
            target = folder / synset / name
            if os.path.lexists(target):  # a rename would replace it
                raise expected(str(target), "no file of that name", "one that was put there since")
            os.rename(folder / name, target)
        for place in (*(folder / synset for synset in synsets), folder):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise InputError(f"{folder}: cannot be sorted: {describe_os_error(error)}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps a second command from sorting ``folder`` at the same time."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise expected(str(folder), "a folder", reason) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: another command is sorting it") from error
        yield
    finally:
        os.close(descriptor)


# ---- labels ----


def read_labels(path: str, synsets: dict[int, str] | None = None) -> dict[str, str]:
    """Returns image, without a suffix -> synset.

    Args:
        path: ``ILSVRC2012_validation_ground_truth.txt``, a number a line; ``LOC_val_solution.csv``, an image
            and its boxes a row; or lines of an image and a synset.
        synsets: what the numbers stand for.

    Raises:
        InputError: the file is none of these, or names an image twice.
    """
    text = read_text(path, LARGEST_TEXT)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise expected(path, "a label for each image", "none")
    if all(re.fullmatch("[0-9]{1,6}", line) for line in lines):
        if synsets is None:
            raise expected("--synsets", "what the numbers in --labels stand for (meta.mat)", "none")
        for line in lines:
            if int(line) not in synsets:
                raise expected(path, "numbers that --synsets has", line)
        return {IMAGE.format(i): synsets[int(line)] for i, line in enumerate(lines, 1)}
    if synsets is not None:
        raise expected("--synsets", "a ground truth of numbers in --labels beside it", path)
    rows = csv.reader(io.StringIO(text)) if "," in lines[0] else map(str.split, lines)
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if number == 1 and row[:1] == ["ImageId"]:
            continue
        words = " ".join(row).split()
        if len(words) < 2 or not SYNSET.fullmatch(words[1]):
            wanted = "an image and its synset, such as n01440764"
            raise expected(f"{path}: line {number}", wanted, repr(" ".join(words))[:80])
        image = os.path.splitext(os.path.basename(words[0]))[0]
        if image in found:
            raise expected(f"{path}: line {number}", "an image that was not named before", image)
        found[image] = words[1]
    return found


def read_synsets(path: str) -> dict[int, str]:
    """Returns ILSVRC2012_ID -> synset.

    Raises:
        InputError: the file has none, or has them in another order than that of the numbers.
        UnsupportedError: a ``.mat`` file, and SciPy is not installed.
    """
    if path.endswith(".mat"):
        return _read_matlab(path)
    lines = [line.split() for line in read_text(path, LARGEST_TEXT).splitlines() if line.strip()]
    found: dict[int, str] = {}
    for number, words in enumerate(lines, 1):
        numbered = len(words) > 1 and words[0].isdecimal() and len(words[0]) < 9
        key, synset = (int(words[0]), words[1]) if numbered else (number, words[0])
        if not SYNSET.fullmatch(synset):
            raise expected(
                f"{path}: line {number}", "a synset such as n01440764", repr(synset)[:60]
            )
        if key in found or synset in found.values():
            raise expected(f"{path}: line {number}", "a synset that was not there before", synset)
        found[key] = synset
    if not found:
        raise expected(path, "synsets", "none")
    # Sorted lists, as Caffe's, number the classes otherwise: every image would be put in a wrong folder.
    plain = not any(words[0].isdecimal() for words in lines)
    if plain and len(found) == 1000 and list(found.values()) == sorted(found.values()):
        raise expected(
            path, "synsets in the order of ILSVRC2012_ID, as meta.mat has them", "sorted ones"
        )
    return found


def _read_matlab(path: str) -> dict[int, str]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UnsupportedError(
            f"{path}: expected the package SciPy to read it, found none ({error}); "
            "pip install 'cnn-engine[lab]'"
        ) from error
    try:
        rows = loadmat(path, squeeze_me=True)["synsets"]
        found = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    except Exception as error:  # on broken files, SciPy's reader fails in any way
        raise expected(path, "meta.mat of the development kit", error) from error
    for synset in found.values():
        if not SYNSET.fullmatch(synset):
            raise expected(path, "synsets such as n01440764", repr(synset)[:60])
    return found


def _text(plan: Plan, dry: bool) -> str:
    classes = Counter(synset for _, synset in plan.moves)
    verb = "to be moved" if dry else "moved"
    lines = [
        f"{verb}: {len(plan.moves):,} images into {len(classes):,} folders",
        f"in their folders before: {plan.there:,}",
    ]
    if dry:
        lines[1:1] = [f"  {name} -> {synset}/" for name, synset in plan.moves[:SHOWN]]
        lines[1 + SHOWN : 1 + SHOWN] = ["  ..."] if len(plan.moves) > SHOWN else []
    if plan.missing:
        lines.append(f"missing: {len(plan.missing):,}, such as {plan.missing[0]}")
    if plan.others:
        lines.append(
            f"left alone: {len(plan.others):,} files without a label, such as {plan.others[0]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
