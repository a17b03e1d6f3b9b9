"""The same command again: what is done is told by footers, nothing of another run is removed, inputs stay."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import infer_inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cnn_engine import infer
from cnn_engine.infer import formats, shards, sources, stamps
from cnn_engine.infer.output import KEY, Record
from cnn_engine.infer.output_dir import Folder
from cnn_engine.infer.shards import Shard

COUNT = 30


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """Saves the time that processes take to start."""
    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)


@pytest.fixture
def words(tmp_path):
    """The words of a command that was done: three files of arrays, three shards."""
    infer_inputs.make("npy", tmp_path / "in", infer_inputs.pixels(COUNT), parts=3)
    words = [str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--quiet", "--shard-size=31kB",
             *infer_inputs.COMMON]  # fmt: skip
    assert infer.main(words) == 0
    assert len(infer_inputs.contents(tmp_path / "out")) == 3
    return words


def refused(words: list[str], capsys: pytest.CaptureFixture) -> str:
    """Runs a command that is to be refused, which changes no row; returns its line."""
    out = Path(words[words.index("--output") + 1])
    before = infer_inputs.contents(out)
    capsys.readouterr()
    assert infer.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert infer_inputs.contents(out) == before
    return line


# ---- files of another run ----


def test_no_change_of_the_runs_document_costs_a_shard(words, tmp_path, capsys):
    path = tmp_path / "out/_run/run.json"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(whole), 40, replace=False):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.integers(0, 7)
        if json_or_none(changed) == json.loads(whole):
            continue  # white space
        path.write_bytes(changed)
        assert str(path) in refused(words, capsys)
    path.write_text("[" * 100_000)
    assert f"{path}: expected the JSON document of a run" in refused(words, capsys)
    path.write_bytes(whole)
    assert infer.main(words) == 0


def json_or_none(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize("name", ["pieces", "shards"])
def test_a_plan_of_which_a_byte_changed_is_refused(name, words, tmp_path, capsys):
    path = tmp_path / "out/_run" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    line = refused(words, capsys)
    assert f"{path}: expected a part of the run's plan, found it changed" in line


def test_files_of_another_run_are_refused_and_kept(words, tmp_path, capsys):
    other = [*words, "--top", "2"]
    other[other.index("--output") + 1] = str(tmp_path / "other")
    assert infer.main(other) == 0
    name = "shard-000001.parquet"
    (tmp_path / "out/shard-000002.parquet").write_bytes(b"cut")  # would be removed, but not now
    shutil.copy(tmp_path / "other" / name, tmp_path / "out" / name)
    assert f"found {name} of another; choose another folder" in refused(words, capsys)
    pq.write_table(pa.table({"mine": [1]}), tmp_path / "out" / name)  # of no run at all
    assert f"found {name} of another; choose another folder" in refused(words, capsys)
    os.replace(
        tmp_path / "out/shard-000000.parquet", tmp_path / "out" / name
    )  # under another's name
    assert f"found {name} of another; choose another folder" in refused(words, capsys)
    (tmp_path / "out" / name).unlink()
    assert infer.main(words) == 0
    assert len(infer_inputs.rows(tmp_path / "out")) == COUNT


# ---- the ledger ----


def test_footers_tell_what_is_done_whatever_the_ledger_says(words, tmp_path):
    (path,) = (tmp_path / "out/_run/ledger").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    wrong = [{**line, "rows": 10**9, "errors": -1} for line in lines]
    damaged = ["[" * 100_000, "null", "[]", "{", '{"run": []}', '"x"', "\x00\xff", "NaN"]
    odd = [{"run": lines[0]["run"], **more} for more in (
        {"shard": []}, {"shard": {}, "set_aside": True}, {"input": 3, "stamp": "x"}, {"input": "x"},
    )]  # fmt: skip
    texts = [*map(json.dumps, wrong), *damaged, *map(json.dumps, odd)]
    path.write_bytes("\n".join(texts).encode("latin-1"))
    assert infer.main(words) == 0
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert (manifest["images"], manifest["errors"], manifest["complete"]) == (COUNT, 0, True)
    assert [file["rows"] for file in manifest["files"]] == [10, 10, 10]


@pytest.mark.parametrize(
    "facts",
    [b"[1]", b"{", b'"x"', b"[" * 100_000, {"rows": "x"}, {"rows": 29}, {"errors": "x"}, {"errors": 11},
     {"errors": -1}, {"bad": 5}, {"lost": [1]}, {"labels_lost": None}],
)  # fmt: skip
def test_a_footer_that_is_damaged_is_done_again_or_refused(facts, words, tmp_path, capsys):
    path = tmp_path / "out/shard-000001.parquet"
    whole = path.read_bytes()
    table = pq.read_table(path)
    noted = facts
    if isinstance(facts, dict):
        noted = json.dumps({**json.loads(pq.read_metadata(path).metadata[KEY]), **facts}).encode()
    pq.write_table(table.replace_schema_metadata({KEY: noted}), path)
    if isinstance(facts, dict):  # it is this run's
        assert infer.main(words) == 0
        assert path.read_bytes() == whole
    else:
        assert "of another" in refused(words, capsys)


def test_a_line_behind_one_that_was_cut_off_is_read(tmp_path):
    """As a machine that stopped may leave the ledger."""
    one, other = (Shard(at, "npy", 1, 1, at, 1) for at in range(2))
    with Folder(str(tmp_path)) as folder:
        folder.record("run", one, Record(1, 0, 1), "here")
    (path,) = (tmp_path / "_run/ledger").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with Folder(str(tmp_path)) as folder:
        folder.record("run", other, None, "here")
        rows = list(folder._ledger_rows("run"))
    assert [(row["shard"], row.get("set_aside")) for row in rows] == [(1, True)]


# ---- inputs ----


def changed(kind: str, path: Path) -> None:
    """Changes an array's file; its size and its time may stay."""
    before = path.stat()
    if kind == "size":
        np.save(path, infer_inputs.pixels(11, 5))
    else:
        array = np.load(path)
        if kind == "content":
            array[5, 0, :, :] ^= 255
        np.save(path, array)
    if kind != "time of change":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


@pytest.mark.parametrize("kind", ["size", "time of change", "content"])
@pytest.mark.parametrize("left", [True, False])
def test_an_input_that_changed_is_refused(kind, left, words, tmp_path, capsys):
    """Also where its shard is not done, unless that was set aside."""
    path = tmp_path / "in/part-001.npy"
    if left:
        (tmp_path / "out/shard-000001.parquet").unlink()
    changed(kind, path)
    line = refused(words, capsys)
    assert (
        f"{path}: expected it as when {tmp_path}/out was begun, found another {kind}; choose"
        in line
    )


def test_stamps_tell_what_changed(tmp_path):
    path = tmp_path / "a-images-idx3-ubyte"
    labels = tmp_path / "a-labels-idx1-ubyte"
    path.write_bytes(bytes(200_000))
    before = stamps.stamp("idx", str(path))
    labels.write_bytes(bytes(9))
    after = stamps.stamp("idx", str(path))
    assert stamps.difference(before, after) == "file of labels"
    labels.write_bytes(bytes(10))
    assert "of the file of labels" in stamps.difference(after, stamps.stamp("idx", str(path)))
    times = path.stat().st_mtime_ns
    copy = tmp_path / "b-images-idx3-ubyte"
    shutil.copy(path, copy)
    os.utime(copy, ns=(1, times + 10**9))
    first, second = stamps.stamp("image", str(path)), stamps.stamp("image", str(copy))
    assert stamps.difference(first, second) == "time of change"
    assert stamps.without_time(first) == stamps.without_time(second)
    for place in (0, 4095, 199_999):  # an image's two ends
        data = bytearray(200_000)
        data[place] = 1
        copy.write_bytes(data)
        os.utime(copy, ns=(1, times))
        assert stamps.difference(first, stamps.stamp("image", str(copy))) == "content"


def test_an_input_that_is_gone_is_asked_for_only_where_it_is_needed(words, tmp_path, capsys):
    (tmp_path / "in/part-001.npy").unlink()
    assert infer.main(words) == 0
    (tmp_path / "out/shard-000001.parquet").unlink()
    assert infer.main(words) == 1
    assert "part-001.npy: cannot be read: No such file" in capsys.readouterr().err


def test_of_a_set_aside_shard_the_input_may_be_mended_once(tmp_path, capsys):
    images = infer_inputs.pixels(COUNT)
    infer_inputs.make("tar", tmp_path / "in", images, parts=3)
    path = tmp_path / "in/part-001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-12_000])
    words = [str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--quiet", "--shard-size=20kB",
             *infer_inputs.COMMON]  # fmt: skip
    assert infer.main(words) == 1
    path.write_bytes(whole)
    assert infer.main(words) == 0
    assert len(infer_inputs.rows(tmp_path / "out")) == COUNT
    assert infer.main(words) == 0  # as it is now it is to stay
    path.write_bytes(whole + bytes(512))
    assert "found another size" in refused(words, capsys)


def test_a_plan_is_told_by_what_files_have_not_by_their_times(tmp_path):
    infer_inputs.make("npy", tmp_path, infer_inputs.pixels(4))
    (path,) = tmp_path.glob("*.npy")
    wanted = formats.Wanted((3, 32, 32), {})
    digests = []
    for number, time in enumerate((5, 6, 6)):
        if number == 2:
            np.save(path, infer_inputs.pixels(4, 1))
        os.utime(path, (time, time))
        folder = tmp_path / str(number)
        folder.mkdir()
        digests.append(shards.write(sources.find([str(path)], wanted), folder).digest)
    assert digests[0] == digests[1] != digests[2]
