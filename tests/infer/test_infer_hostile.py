"""Inputs that are broken or made to harm: named bad images, one line where a file lies of what it has."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile

import infer_inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cnn_engine import infer
from cnn_engine.infer import readers, shards
from cnn_engine.infer.formats import Source


@pytest.fixture(autouse=True)
def inline(request, monkeypatch):
    """Saves the time that processes take to start, but where a test asks for them."""
    if "processes" not in request.fixturenames:
        monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)


@pytest.fixture
def processes():
    """Workers are processes."""


@pytest.fixture(scope="module")
def images():
    return infer_inputs.pixels(30)


def run(*words: object) -> int:
    return infer.main([str(word) for word in (*words, *infer_inputs.COMMON)])


# ---- bad images ----


@pytest.mark.parametrize(("most", "code"), [(None, 0), (13, 0), (12, 1), (0, 1)])
def test_bad_images_are_named_and_may_be_too_many(most, code, images, tmp_path, capsys):
    infer_inputs.make("image", tmp_path / "in", images)
    files = sorted(tmp_path.glob("in/*/*.jpg"))
    for path in files[::2][:13]:
        path.write_bytes(b"")
    words = [tmp_path / "in", "--output", tmp_path / "out", "--json", tmp_path / "r.json"]
    words += [] if most is None else ["--max-bad", most]
    for again in (False, True):  # the same code, also where nothing is left to do
        assert run(*words) == code
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        names = [line for line in lines if line.startswith("warning: bad image: ")]
        assert names[0].startswith(f"warning: bad image: {files[0]}: expected an image, found none")
        assert len(names) == 5  # of one shard
        assert f"warning: 13 bad images in all; column error of {tmp_path}/out has all" in lines
        too_many = f"error: --max-bad: expected at most {most} bad images, found 13"
        assert (too_many in lines) == bool(code)
        report = json.loads((tmp_path / "r.json").read_text())
        if not again:
            assert report["errors"] == 13
            assert [name.partition(": ")[0] for name in report["bad_images"]] == [
                str(path) for path in files[:10:2]
            ]
            assert str(files[2].name) in captured.out
        assert report["folder"]["errors"] == 13


def test_a_file_that_is_too_large_for_an_image_is_a_bad_image(images, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MOST_FILE_BYTES", 5000)
    data = infer_inputs.encoded(images[0])
    large = data + bytes(5000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.jpg").write_bytes(data)
    (tmp_path / "a/1.jpg").write_bytes(large)
    infer_inputs.write_tar(tmp_path / "b.tar", [("0.jpg", data), ("1.jpg", large)])
    pq.write_table(pa.table({"image": pa.array([data, large])}), tmp_path / "c.parquet")
    words = [tmp_path / name for name in ("a", "b.tar", "c.parquet")]
    assert run(*words, "--output", tmp_path / "out", "--quiet") == 0
    errors = infer_inputs.rows(tmp_path / "out")["error"].to_pylist()
    assert errors[::2] == [None] * 3
    assert set(errors[1::2]) == {f"expected a file of at most 5,000 bytes, found {len(large):,}"}


# ---- tars ----


def sparse_member(archive: io.BufferedWriter, name: str, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.write(member.tobuf(tarfile.GNU_FORMAT))
    archive.seek(-(-size // 512) * 512, 1)


@pytest.mark.parametrize("name", ["b.txt", "b.jpg", "a.cls"])
def test_members_of_any_size_take_no_memory(name, images, tmp_path, processes):
    """A gigabyte of them, by a worker that may not have so much."""
    data = infer_inputs.encoded(images[0])
    with open(tmp_path / "a.tar", "wb") as file:
        infer_inputs.write_tar(tmp_path / "first.tar", [("a.jpg", data)])
        file.write((tmp_path / "first.tar").read_bytes()[: 512 + -(-len(data) // 512) * 512])
        sparse_member(file, name, 1 << 30)
        file.truncate(file.tell() + 1024)
    (tmp_path / "first.tar").unlink()
    words = [sys.executable, "-m", "cnn_engine.infer", str(tmp_path / "a.tar"), "--output",
             str(tmp_path / "out"), "--json", str(tmp_path / "r.json"), "--quiet",
             *infer_inputs.COMMON, "--threads=1"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["peak_bytes_a_worker"] < 600 << 20
    rows = infer_inputs.rows(tmp_path / "out").to_pylist()
    assert (rows[0]["error"], rows[0]["label"]) == (None, None)
    assert len(rows) == (2 if name == "b.jpg" else 1)
    assert report["errors"] == (1 if name == "b.jpg" else 0)
    assert report["labels_lost"] == (1 if name == "a.cls" else 0)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if size < 0:
        field = b"\xff" * 4 + size.to_bytes(8, "big", signed=True)
    elif size >= 8**11:
        field = b"\x80" + size.to_bytes(11, "big")
    else:
        field = b"%011o\0" % size
    block[124:136] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("place", ["alone", "behind an image"])
@pytest.mark.parametrize(
    "hostile",
    [header("x.jpg", -512), header("x.jpg", -1024), header("x.jpg", 2**62), header("x.txt", 2**70),
     header("x", 1 << 40, tarfile.GNUTYPE_LONGNAME), header("x", 1 << 40, tarfile.XHDTYPE),
     header("x", -512, tarfile.GNUTYPE_LONGNAME), header("x", 2**63, tarfile.REGTYPE)],
)  # fmt: skip
def test_a_tar_whose_headers_lie_is_set_aside_at_once(hostile, place, images, tmp_path, capsys):
    before = b""
    if place == "behind an image":
        infer_inputs.write_tar(tmp_path / "a.tar", [("a.jpg", infer_inputs.encoded(images[0]))])
        before = (tmp_path / "a.tar").read_bytes()[:1536]
    (tmp_path / "a.tar").write_bytes(before + hostile + bytes(2048))
    assert run(tmp_path / "a.tar", "--output", tmp_path / "out", "--quiet") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "set aside: " in line
    assert "a.tar: expected a sound tar" in line
    # And where it has to be cut, which is as it is planned.
    assert run(tmp_path / "a.tar", "--output", tmp_path / "cut", "--shard-size=1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a.tar: expected a sound tar" in line


# ---- arrays ----


def npy(shape: object, descr: str = "|u1", form: str | None = None) -> bytes:
    text = form or repr({"descr": descr, "fortran_order": False, "shape": shape})
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode("latin-1")


def idx(*sizes: int, dimensions: int = 3) -> bytes:
    return bytes((0, 0, 8, dimensions)) + b"".join(n.to_bytes(4, "big") for n in sizes)


HOSTILE = {
    "negative.npy": npy((-5, 3, 32, 32)),
    "negative-twice.npy": npy((-1, -3, 32, 32)),
    "wraps.npy": npy((2**54, 3, 32, 32)),
    "wraps-to-0.npy": npy((2**62, 3, 32, 32)),
    "large.npy": npy((10**30, 3, 32, 32)),
    "big-endian.npy": npy((2, 3, 32, 32), ">f4"),
    "half.npy": npy((2, 3, 32, 32), "<f2"),
    "objects.npy": npy((2, 3, 32, 32), "|O"),
    "structure.npy": npy((2, 3, 32, 32), form="{'descr': [('a', '|u1')], 'fortran_order': False, "
                         "'shape': (2, 3, 32, 32)}"),
    "no-shape.npy": npy((), form="{'descr': '|u1'}"),
    "text.npy": npy((), form="open('x')"),
    "deep.npy": npy((), form="(" * 110),
    "float-shape.npy": npy((), form="{'descr': '|u1', 'fortran_order': False, 'shape': (2.0, 3, 32, 32)}"),
    "null.npy": b"\x93NUMPY\1\0\0\0",
    "short.npy": b"\x93NUM",
    "empty.npy": b"",
    "future.npy": b"\x93NUMPY\7\0" + bytes(200),
    "odd.bin": bytes(3074),
    "empty.bin": b"",
    "a-images-idx3-ubyte": idx(2**32 - 1, 32, 32),
    "b-images-idx3-ubyte": idx(2, 2**31, 2**31),
    "c-images-idx3-ubyte.gz": gzip.compress(idx(2**32 - 1, 32, 32)),
    "d-images-idx3-ubyte": b"\0\0",
    "e-images-idx3-ubyte.gz": b"no gzip",
    "f.parquet": b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1",
    "g.parquet": b"PAR1PAR1",
    "h.parquet": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_lies_is_refused_as_it_is_planned(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(
        HOSTILE[name] + (bytes(24576) if HOSTILE[name][:6] == b"\x93NUMPY" else b"")
    )
    more = ["--network=ece408", "--weights=random"] if "idx3" in name else []
    assert run(tmp_path / name, "--output", tmp_path / "out", *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}: ")
    assert infer_inputs.contents(tmp_path / "out") == {}


def test_labels_of_another_number_than_images_are_refused(tmp_path, capsys):
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx(3, 48, 48) + bytes(3 * 48 * 48))
    path = tmp_path / "a-labels-idx1-ubyte"
    words = [tmp_path / "a-images-idx3-ubyte", "--network=ece408", "--weights=random", "--quiet"]
    for data in (idx(2, dimensions=1) + bytes(2), idx(3, dimensions=1) + bytes(2), b"x"):
        path.write_bytes(data)
        assert run(*words, "--output", tmp_path / "out") == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: expected ")
    path.write_bytes(idx(3, dimensions=1) + bytes((7, 8, 9)))
    assert run(*words, "--output", tmp_path / "out") == 0
    assert infer_inputs.rows(tmp_path / "out")["label"].to_pylist() == [7, 8, 9]


def test_no_damage_of_a_parquet_file_is_a_traceback(images, tmp_path, capsys):
    """A byte changed in its footer: a line, rows, or a shard that is set aside."""
    path = tmp_path / "a.parquet"
    column = pa.array([infer_inputs.encoded(image, "PNG") for image in images[:6]])
    pq.write_table(pa.table({"image": column, "label": list(range(6))}), path, row_group_size=2)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    rng = np.random.default_rng(0)
    for at, place in enumerate(rng.integers(len(whole) - footer, len(whole), 60)):
        data = bytearray(whole)
        data[place] ^= 1 << rng.integers(0, 8)
        path.write_bytes(data)
        code = run(path, "--output", tmp_path / str(at), "--quiet")
        lines = capsys.readouterr().err.splitlines()
        assert code in (0, 1, 2)
        assert code == 0 or all(line.startswith(("error: ", "warning: ")) for line in lines)
        assert code != 2 or len(lines) == 1


def test_a_column_whose_name_is_no_text_is_refused(images, tmp_path, capsys):
    path = tmp_path / "a.parquet"
    table = pa.table({"image": pa.array([infer_inputs.encoded(images[0])]), "second": [1]})
    pq.write_table(table, path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"second", b"sec\xeend"))
    assert run(path, "--output", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: expected a Parquet file, found ")


# ---- the plan ----


def test_row_groups_never_overfill_a_shard(tmp_path):
    """But for one that is larger than a shard itself."""
    sizes = [40, 40, 40, 100, 1, 99, 1, 250, 10, 10]
    source = Source(
        "parquet-bytes", "a.parquet", 10, sum(sizes), tuple((1, size) for size in sizes)
    )
    pieces = list(shards._cut([source], 100, 1))
    parts = [sizes[piece.first : piece.first + piece.images] for piece in pieces]
    assert parts == [[40, 40], [40], [100], [1, 99], [1], [250], [10, 10]]
    assert [piece.bytes for piece in pieces] == list(map(sum, parts))
    (tmp_path / "plan").mkdir()
    shards.write([source], tmp_path / "plan", 100)
    assert [shard.bytes for shard in shards.read(tmp_path / "plan")] == list(map(sum, parts))


LINKED = {
    "symbolic": ("in/part-000.npy", "soft.npy", "in", "folder", "other", "around"),
    "hard": ("in/part-000.npy", "hard.npy", "in", "another"),
}


@pytest.mark.parametrize("kind", LINKED)
def test_inputs_that_are_one_file_by_links_are_refused(kind, images, tmp_path, capsys):
    infer_inputs.make("npy", tmp_path / "in", images)
    path = tmp_path / "in/part-000.npy"
    for name in ("other", "another", "around"):
        (tmp_path / name).mkdir()
    if kind == "symbolic":
        (tmp_path / "soft.npy").symlink_to(path)
        (tmp_path / "folder").symlink_to(tmp_path / "in")
        (tmp_path / "other/soft.npy").symlink_to(path)
        (tmp_path / "around/in").symlink_to(tmp_path / "in")
    else:
        (tmp_path / "hard.npy").hardlink_to(path)
        (tmp_path / "another/hard.npy").hardlink_to(path)
    for one, other in itertools.product(LINKED[kind], repeat=2):
        assert run(tmp_path / one, tmp_path / other, "--output", tmp_path / "out") == 2, (
            one,
            other,
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert "expected each " in line, (one, other)
        assert f"{tmp_path / one} too" in line, (one, other)
    for at, name in enumerate(LINKED[kind]):  # each is an input by itself
        assert run(tmp_path / name, "--output", tmp_path / f"out-{at}", "--quiet") == 0


def test_links_inside_one_input_are_rows_of_their_own(images, tmp_path):
    """As in a farm of links to one store; what has no name of an image there is none."""
    data = infer_inputs.encoded(images[0])
    for name in ("store", "farm", "farm/_passed"):
        (tmp_path / name).mkdir()
    (tmp_path / "store/blob").write_bytes(data)
    (tmp_path / "store/_hidden.jpg").write_bytes(data)
    (tmp_path / "store/own.jpg").write_bytes(data)
    (tmp_path / "farm/a.jpg").symlink_to(tmp_path / "store/blob")
    (tmp_path / "farm/b.jpg").symlink_to(tmp_path / "store/blob")
    (tmp_path / "farm/c.jpg").hardlink_to(tmp_path / "store/blob")
    (tmp_path / "farm/d.jpg").symlink_to(tmp_path / "store/_hidden.jpg")
    for words in (("store", "farm"), ("farm", "store")):
        out = tmp_path / "-".join(words)
        assert run(*(tmp_path / word for word in words), "--output", out, "--quiet") == 0
        ids = sorted(name.rpartition("/")[2] for name in infer_inputs.rows(out)["id"].to_pylist())
        assert ids == ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "own.jpg"]


@pytest.mark.parametrize("what", ["a link to nothing", "a pipe"])
@pytest.mark.parametrize("name", ["lost.jpg", "lost.tar"])
def test_what_has_an_image_s_name_in_a_folder_is_no_less_for_it(
    images, tmp_path, capsys, name, what
):
    """A store that was not fetched, behind a farm of links, is no folder without images."""
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/a.jpg").write_bytes(infer_inputs.encoded(images[0]))
    (tmp_path / "in/self").symlink_to("self")  # of no image's name
    path = tmp_path / "in/deep" / name
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "store/blob")
    assert run(tmp_path / "in", "--output", tmp_path / "out", "--quiet") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert ("special file" if what == "a pipe" else "No such file") in line
    path.unlink()
    assert run(tmp_path / "in", "--output", tmp_path / "out", "--quiet") == 0
