"""``python -m cnn_engine.infer``: each kind of input, the engine's rows once each, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import infer_inputs
import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from cnn_engine import Engine, infer
from cnn_engine import __main__ as doors
from cnn_engine.devices import threads
from cnn_engine.infer import array_readers, buffers, formats, local_pool, options, shards, sources

ENGINE = Engine("cifar10", device="cpu", threads=1)


def run(*words: object) -> int:
    return infer.main([str(word) for word in (*words, *infer_inputs.COMMON)])


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
    return infer_inputs.pixels(300)


@pytest.mark.parametrize("kind", infer_inputs.KINDS)
def test_rows_are_the_engines(kind, images, tmp_path, capsys):
    wanted = infer_inputs.make(kind, tmp_path / "in", images, parts=2)
    assert run(tmp_path / "in", "--output", tmp_path / "out", "--shard-size", "100kB") == 0
    assert "Images                       : 300, 0 of them bad" in capsys.readouterr().out
    table = infer_inputs.rows(tmp_path / "out")
    found = infer_inputs.probabilities(table)
    assert found.tobytes() == ENGINE.predict(np.ascontiguousarray(wanted)).tobytes()
    ids = table["id"].to_pylist()
    assert len(set(ids)) == 300
    assert all(name.startswith(str(tmp_path / "in")) for name in ids)
    labelled = kind in infer_inputs.LABELLED
    assert table["label"].to_pylist() == [at % 10 if labelled else None for at in range(300)]
    assert table["error"].null_count == 300
    assert pyarrow.dataset.dataset(tmp_path / "out").count_rows() == 300
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert (manifest["complete"], manifest["images"], manifest["errors"]) == (True, 300, 0)
    assert manifest["settings"]["model_sha256"]
    assert not list((tmp_path / "out/_run/temporary/0-of-1").iterdir())


def test_idx_of_the_courses_size(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (70, 48, 48), np.uint8)
    (tmp_path / "t-images-idx3-ubyte").write_bytes(
        bytes((0, 0, 8, 3))
        + b"".join(n.to_bytes(4, "big") for n in images.shape)
        + images.tobytes()
    )
    (tmp_path / "t-labels-idx1-ubyte").write_bytes(
        bytes((0, 0, 8, 1)) + (70).to_bytes(4, "big") + bytes(range(70))
    )
    out = tmp_path / "out"
    words = [tmp_path / "t-images-idx3-ubyte", "--network", "ece408", "--weights", "random"]
    assert run(*words, "--output", out, "--shard-size", "50kB") == 0
    with Engine("ece408", weights="random", device="cpu", threads=1) as engine:
        wanted = engine.predict(images[:, None])
    table = infer_inputs.rows(out)
    assert len(list(out.glob("shard-*"))) > 2
    assert infer_inputs.probabilities(table).tobytes() == wanted.tobytes()
    assert table["label"].to_pylist() == list(range(70))


def test_links_to_what_they_lie_in_give_no_image_twice(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images, parts=1)
    (tmp_path / "in" / "a").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "self").symlink_to("self")
    assert run(tmp_path / "in", "--output", tmp_path / "out") == 0
    ids = infer_inputs.rows(tmp_path / "out")["id"].to_pylist()
    assert len(ids) == 300
    assert not any("/a/" in name for name in ids)


def test_the_plan_is_the_same_every_time_and_workers_change_nothing(images, tmp_path, processes):
    infer_inputs.make("tar", tmp_path / "in", images, parts=1)
    for name, workers in (("a", "1"), ("b", "2")):
        words = [str(tmp_path / "in"), "--output", str(tmp_path / name), "--shard-size=50kB",
                 "--device=cpu", "--workers", workers, "--no-ceilings", "--quiet"]  # fmt: skip
        assert infer.main(words) == 0
    assert infer_inputs.contents(tmp_path / "a") == infer_inputs.contents(tmp_path / "b")
    assert len(infer_inputs.contents(tmp_path / "a")) > 5  # one tar was cut between its samples


def test_images_that_have_nan_or_infinity_in_them_are_bad(images, tmp_path, capsys):
    wanted = infer_inputs.make("npy-float32", tmp_path / "whole", images)
    assert run(tmp_path / "whole", "--output", tmp_path / "sound", "--batch=64") == 0
    broken = np.array(wanted)
    values = {5: np.nan, 63: np.inf, 64: -np.inf, 299: np.nan}
    for at, value in values.items():
        broken[at, at % 3, at % 32, 31 - at % 32] = value
    np.save(tmp_path / "broken.npy", broken)
    assert run(tmp_path / "broken.npy", "--output", tmp_path / "out", "--batch=64") == 0
    assert "300, 4 of them bad" in capsys.readouterr().out
    found = infer_inputs.rows(tmp_path / "out").to_pylist()
    sound = infer_inputs.rows(tmp_path / "sound").to_pylist()
    for at, (row, other) in enumerate(zip(found, sound, strict=True)):
        assert ("found NaN" in row["error"]) if at in values else (row["error"] is None)
        assert row["probabilities"] == (None if at in values else other["probabilities"])
    assert json.loads((tmp_path / "out/_manifest.json").read_text())["errors"] == 4


def test_ids_and_labels_that_are_odd(images, tmp_path):
    """Ids that are no UTF-8, in a column of texts or bytes; labels that no column has room for."""
    names = [b"\xff\xfe", b"a", b"", "ü".encode()]
    binary = pyarrow.array(names, pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(4, *binary.buffers()[1:])
    data = pyarrow.array([infer_inputs.encoded(image) for image in images[:4]])
    for kind, ids in (("bytes", binary), ("text", text)):
        pq.write_table(pyarrow.table({"image": data, "id": ids}), tmp_path / f"{kind}.parquet")
        assert run(tmp_path / f"{kind}.parquet", "--output", tmp_path / kind, "--quiet") == 0
        assert infer_inputs.rows(tmp_path / kind)["id"].to_pylist() == ["\\xff\\xfe", "a", "", "ü"]
    members = []
    for at, label in enumerate((b"9" * 40, b"-3", b"x", b"%d" % (2**63 - 1))):
        members += [(f"{at}.jpg", infer_inputs.encoded(images[at])), (f"{at}.cls", label)]
    infer_inputs.write_tar(tmp_path / "odd.tar", members)
    assert run(tmp_path / "odd.tar", "--output", tmp_path / "odd", "--quiet") == 0
    assert infer_inputs.rows(tmp_path / "odd")["label"].to_pylist() == [None, -3, None, 2**63 - 1]


def test_ids_are_numbered_by_hand():
    for first, count in ((0, 1), (0, 12), (95, 10), (998, 1005), (123456789, 3), (7, 0)):
        found = array_readers.numbered("a/b\udcff.npy", first, count).to_pylist()
        assert found == [f"a/b\\xff.npy#{number}" for number in range(first, first + count)]


def test_large_chunks_are_read_by_several_threads(images, tmp_path, monkeypatch):
    infer_inputs.make("npy", tmp_path / "in", images, parts=2)
    monkeypatch.setattr(buffers, "READ_BYTES", 1000)
    assert run(tmp_path / "in", "--output", tmp_path / "out", "--quiet") == 0
    found = infer_inputs.probabilities(infer_inputs.rows(tmp_path / "out"))
    assert found.tobytes() == ENGINE.predict(images).tobytes()


def test_workers_by_rule(images, tmp_path, monkeypatch):
    infer_inputs.make("tar", tmp_path / "files", images)
    infer_inputs.make("npy", tmp_path / "arrays", images)
    monkeypatch.setattr(local_pool, "visible_gpus", lambda: ["0", "1"])

    def workers(name, device="cuda", cpus=32, *more):
        monkeypatch.setattr(threads, "default", lambda: cpus)
        words = [str(tmp_path / name), "--device", device, *more]
        asked = options.parser().parse_args(words)
        kind = sources.first_kind(asked.inputs, {})
        return options.worker_count(asked, device != "cpu", kind)

    assert workers("arrays") == 2
    assert workers("files") == 2 * options.MOST_A_GPU
    assert workers("files", cpus=16) == 4  # each of them has four CPUs
    assert workers("files", cpus=2) == 2
    assert workers("files", "cuda:1") == workers("nothing", "cuda:1") == 1
    assert workers("nothing") == 2
    assert workers("files", "cpu") == 32
    assert workers("files", "cuda", 32, "--workers", "3") == 3


@pytest.mark.gpu
def test_rows_on_a_gpu(images, tmp_path, processes):
    infer_inputs.make("tar", tmp_path / "in", images, parts=2)
    words = [str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--device", "cuda", "--json",
             str(tmp_path / "report.json"), "--quiet"]  # fmt: skip
    assert infer.main(words) == 0
    wanted = infer_inputs.make("tar", tmp_path / "again", images)
    with Engine("cifar10", device="cuda") as engine:
        expected = engine.predict(np.ascontiguousarray(wanted))
    found = infer_inputs.probabilities(infer_inputs.rows(tmp_path / "out"))
    assert found.tobytes() == expected.tobytes()
    assert "copy" in json.loads((tmp_path / "report.json").read_text())["ceilings"]


@pytest.mark.parametrize(("named", "wanted"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_a_workers_memory_is_of_the_system_unless_named(named, wanted):
    code = """
from cnn_engine.infer import packages
packages.keep_memory()
print(packages.arrow().default_memory_pool().backend_name)"""
    environment = {k: v for k, v in os.environ.items() if k != "ARROW_DEFAULT_MEMORY_POOL"}
    if named:
        environment["ARROW_DEFAULT_MEMORY_POOL"] = named
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (wanted + "\n", "")


def test_a_list_a_glob_and_what_they_name(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    infer_inputs.make("npy", Path("in"), images[:60], parts=3)
    Path("list").write_text("in/part-000.npy\n\nin/part-00[12].npy\n")
    assert run("@list", "--output", "out", "--quiet") == 0
    assert infer_inputs.rows(Path("out"))["id"].to_pylist()[::20] == [
        f"in/part-00{part}.npy#0" for part in range(3)
    ]


def test_the_same_command_again_does_what_is_missing_and_nothing_else(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images)
    out = tmp_path / "out"
    words = [tmp_path / "in", "--output", out, "--shard-size", "100kB", "--quiet"]
    assert run(*words) == 0
    first = infer_inputs.contents(out)
    (out / "shard-000001.parquet").unlink()
    cut = out / "shard-000003.parquet"
    cut.write_bytes(first[cut.name][:-100])  # as a disk may leave a file
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    report = tmp_path / "report.json"
    assert run(*words, "--json", report) == 0
    assert infer_inputs.contents(out) == first
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert {name for name in after if after[name] != stamps.get(name)} == {
        "shard-000001.parquet",
        "shard-000003.parquet",
    }
    document = json.loads(report.read_text())
    assert document["shards"]["done"] == 2
    assert document["shards"]["done_before"] == len(first) - 2
    # Also where the ledger is lost: what counts are the files.
    for path in (out / "_run/ledger").iterdir():
        path.unlink()
    (out / "shard-000002.parquet").unlink()
    assert run(*words) == 0
    assert infer_inputs.contents(out) == first


def test_damage_inside_a_file_is_found_when_asked_for(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images)
    out = tmp_path / "out"
    words = [tmp_path / "in", "--output", out, "--shard-size", "100kB", "--quiet"]
    assert run(*words) == 0
    first = infer_inputs.contents(out)
    damaged = bytearray(first["shard-000002.parquet"])
    at = len(damaged) // 2
    damaged[at] ^= 0xFF
    (out / "shard-000002.parquet").write_bytes(damaged)
    assert run(*words, "--verify") == 0
    assert infer_inputs.contents(out) == first


def test_bad_images_are_rows_with_an_error(images, tmp_path, capsys):
    folder = tmp_path / "in"
    wanted = infer_inputs.make("image", folder, images[:40])
    inside = folder / "part-000"
    good = (inside / "000005.jpg").read_bytes()
    (inside / "000005.jpg").write_bytes(good[: len(good) // 2])
    (inside / "000007.jpg").write_bytes(b"no image")
    (inside / "000009.png").write_bytes(infer_inputs.encoded(images[9, :, :20], "PNG"))
    (inside / "000011.jpg").write_bytes(b"")
    out = tmp_path / "out"
    assert run(folder, "--output", out) == 0
    assert "41, 4 of them bad" in capsys.readouterr().out
    table = infer_inputs.rows(out)
    errors = {
        os.path.basename(row["id"]): row["error"] for row in table.to_pylist() if row["error"]
    }
    assert sorted(errors) == ["000005.jpg", "000007.jpg", "000009.png", "000011.jpg"]
    assert errors["000009.png"].startswith("expected an image of 32x32")
    assert "found 20x32" in errors["000009.png"] or "found 32x20" in errors["000009.png"]
    assert all(error.startswith("expected an image") for error in errors.values())
    assert [row["probabilities"] is None for row in table.to_pylist()].count(True) == 4
    # pyarrow before 26 neither writes nulls among lists of a fixed size nor reads them.
    assert pyarrow.types.is_list(table.schema.field("probabilities").type)
    keep = np.setdiff1d(np.arange(40), [5, 7, 11])
    assert (
        infer_inputs.probabilities(table).tobytes()
        == ENGINE.predict(np.ascontiguousarray(wanted[keep])).tobytes()
    )
    assert json.loads((out / "_manifest.json").read_text())["errors"] == 4


def test_images_of_other_sizes_and_the_largest_probabilities(images, tmp_path):
    from cnn_engine.io.images import decode
    from cnn_engine.io.preprocess import Preprocess

    (tmp_path / "in").mkdir()
    large = infer_inputs.pixels(1)[0].repeat(3, 1).repeat(2, 2)
    for name in "ab":
        (tmp_path / f"in/{name}.jpg").write_bytes(infer_inputs.encoded(large))
    words = [tmp_path / "in", "--output", tmp_path / "out", "--top", "3", "--preprocess"]
    assert run(*words, "resize=32x32") == 0
    one = decode(str(tmp_path / "in/a.jpg"), Preprocess(resize=(32, 32)), (3, 32, 32))
    wanted = ENGINE.predict(one[None])[0]
    for row in infer_inputs.rows(tmp_path / "out").to_pylist():
        order = np.argsort(-wanted, kind="stable")[:3]
        assert row["top_classes"] == order.tolist()
        assert np.float32(row["top_probabilities"]).tobytes() == wanted[order].tobytes()


@pytest.mark.parametrize("fault", ["cut off", "a hole"])
def test_an_unreadable_shard_is_set_aside_and_done_when_it_can_be(images, tmp_path, capsys, fault):
    folder, out = tmp_path / "in", tmp_path / "out"
    infer_inputs.make("tar", folder, images[:90], parts=3)
    whole = (folder / "part-001.tar").read_bytes()
    half = len(whole) // 2
    hole = whole[:half] + bytes(5000) + whole[half + 5000 :]  # tarfile takes it for the end
    (folder / "part-001.tar").write_bytes(hole if fault == "a hole" else whole[:half])
    words = [folder, "--output", out, "--quiet", "--shard-size", "50kB"]
    assert run(*words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "part-001.tar): set aside: " in lines[0]
    assert "expected a sound tar" in lines[0]
    assert sorted(infer_inputs.contents(out)) == ["shard-000000.parquet", "shard-000002.parquet"]
    assert not json.loads((out / "_manifest.json").read_text())["complete"]
    (folder / "part-001.tar").write_bytes(whole)
    assert run(*words) == 0
    ids = infer_inputs.rows(out)["id"].to_pylist()
    assert [name.rpartition("#")[2] for name in ids] == [f"{at:06d}.jpg" for at in range(90)]


def test_a_file_that_is_gone_is_no_bad_image(images, tmp_path, capsys, monkeypatch):
    """What it holds is not known: its shard waits for it."""
    infer_inputs.make("image", tmp_path / "in", images[:10])
    path, away = tmp_path / "in/part-000/000003.jpg", tmp_path / "away"
    words = [tmp_path / "in", "--output", tmp_path / "out", "--quiet"]
    plan = shards.write

    def planned(*arguments):
        found = plan(*arguments)
        path.rename(away)
        return found

    monkeypatch.setattr(shards, "write", planned)
    assert run(*words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("000003.jpg: cannot be read: No such file or directory")
    assert infer_inputs.contents(tmp_path / "out") == {}
    away.rename(path)
    assert run(*words) == 0
    assert len(infer_inputs.rows(tmp_path / "out")) == 10


def test_a_truncated_array_names_what_is_missing(images, tmp_path, capsys):
    infer_inputs.make("npy", tmp_path / "in", images[:50])
    path = tmp_path / "in/part-000.npy"
    path.write_bytes(path.read_bytes()[:-10])
    assert run(tmp_path / "in", "--output", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected 153,728 bytes, as its header says, found 153,718" in line


def test_shards_have_whole_passes(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images, parts=1)
    words = [
        "--quiet",
        "--shard-size",
        "100kB",
        "--batch",
        "7",
    ]  # 32 images, but for the file's header
    assert run(tmp_path / "in", "--output", tmp_path / "out", *words) == 0
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert [pq.read_metadata(file).num_rows for file in files] == [28] * 10 + [20]
    found = infer_inputs.probabilities(infer_inputs.rows(tmp_path / "out"))
    assert found.tobytes() == ENGINE.predict(images, batch=7).tobytes()


def test_shards_by_rule_are_a_256th_from_4_mib_to_1_gib(tmp_path):
    for number, (images, wanted) in enumerate(((1_000_000, 260), (60_000, 44), (10**9, 2861))):
        files = 10 if images == 1_000_000 else 1
        found = [formats.Source("npy", f"{n}.npy", images, images * 3072) for n in range(files)]
        (tmp_path / str(number)).mkdir()
        totals = shards.write(found, tmp_path / str(number), batch=1)
        assert abs(totals.shards - wanted) <= 1
        assert totals.images == images * files


def test_a_pass_is_a_shard_at_least(tmp_path):
    found = [formats.Source("npy", f"{n}.npy", 10**6, 3072 * 10**6 + 128) for n in range(2)]
    for batch, wanted in ((1000, 286), (43690, 46)):
        (tmp_path / str(batch)).mkdir()
        assert shards.write(found, tmp_path / str(batch), batch=batch).shards == wanted
    (tmp_path / "files").mkdir()  # of which nobody knows what is in them
    found = [formats.Source("image", f"{n}.jpg", 1, 1 << 20) for n in range(8)]
    assert shards.write(found, tmp_path / "files", batch=43690).shards == 2


def test_another_model_or_other_settings_are_refused(images, tmp_path, capsys):
    infer_inputs.make("npy", tmp_path / "in", images[:50])
    words = [tmp_path / "in", "--output", tmp_path / "out", "--quiet"]
    assert run(*words) == 0
    before = infer_inputs.contents(tmp_path / "out")
    for more, what in (
        (["--weights", "random"], "model_sha256"),
        (["--variant", "pad"], "variant"),
        (["--top", "2"], "top"),
        (["--batch", "7"], "batch"),
        (["--shard-size", "9MB"], "--shard-size"),
    ):
        assert run(*words, *more) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{what}: expected " in line
        assert "as the folder was begun with" in line
    infer_inputs.make("npy", tmp_path / "other", images[:50])
    assert run(tmp_path / "other", "--output", tmp_path / "out") == 2
    assert "INPUT: expected" in capsys.readouterr().err
    assert infer_inputs.contents(tmp_path / "out") == before


def test_an_array_of_jobs_shares_a_folder(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images)
    words = [tmp_path / "in", "--shard-size", "100kB", "--quiet"]
    assert run(*words, "--output", tmp_path / "whole") == 0
    out = tmp_path / "out"
    for index in (2, 0, 1):
        assert run(*words, "--output", out, "--shard-index", index, "--shard-count", 3) == 0
        complete = json.loads((out / "_manifest.json").read_text())["complete"]
        assert complete == (index == 1)
    assert infer_inputs.contents(out) == infer_inputs.contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "INPUT: expected a folder or file of images, found none"),
        (["nowhere", "--output", "out"], "nowhere: expected a file, a folder or a glob of some, "
         "found nothing"),
        (["empty", "--output", "out"], "INPUT: expected at least one image, found none"),
        (["empty.tar", "--output", "out"], "INPUT: expected at least one image, found none"),
        (["in"], "--output: expected a folder for the rows, found none"),
        (["in", "--output", ""], "--output: expected a folder for the rows, found none"),
        (["in", "in/part-000.npy", "--output", "out"], "in/part-000.npy: expected each image once, found "),
        (["in", "--output", "in/out"], "--output: expected a folder outside of the input in, found in/out"),
        (["wrong.npy", "--output", "out"], "wrong.npy: expected images of [3, 32, 32], as the network reads, "
         "found [1, 5, 5]"),
        (["text.txt", "--output", "out"], "text.txt: expected a file of images ("),
        (["pipe.npy", "--output", "out"], "pipe.npy: expected a file of images, found a special file"),
        (["in", "--output", "out", "--top", "11"], "--top: expected at most 10, the network's classes"),
        (["in", "--output", "out", "--variant", "tiled"], "variant"),
        (["in", "--output", "o", "--shard-index", "3", "--shard-count", "3"], "--shard-index: expected"),
        (["in", "--output", "out", "--address", "auto"], "--address: expected the option --engine ray"),
        (["in", "--output", "out", "--columns", "picture=a"], "--columns: expected image=NAME"),
        (["in", "--output", "text.txt"], "--output: expected a folder, found a file at text.txt"),
        (["in", "--output", "out", "--shard-size", "many"], "--shard-size: expected a size such as 64MB"),
        (["@nolist", "--output", "out"], "nolist: expected a list of inputs, found: No such file"),
    ],
)  # fmt: skip
def test_what_is_at_fault_is_one_line(words, message, images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    infer_inputs.make("npy", Path("in"), images[:20])
    Path("empty").mkdir()
    Path("text.txt").write_text("hello")
    np.save("wrong.npy", np.zeros((2, 1, 5, 5), np.uint8))
    os.mkfifo("pipe.npy")
    tarfile.open("empty.tar", "w").close()
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}") or (message == "variant" and message in line)


def test_metrics_reports_and_the_planner(images, tmp_path, capsys, processes):
    infer_inputs.make("tar", tmp_path / "in", images, parts=3)
    paths = {name: tmp_path / f"r.{name}" for name in ("json", "html")}
    words = [tmp_path / "in", "--output", tmp_path / "out", "--json", paths["json"], "--html",
             paths["html"], "--metrics", tmp_path / "m.prom", "--device=cpu", "--workers=1"]  # fmt: skip
    assert doors.main(["infer", *map(str, words)]) == 0
    out = capsys.readouterr().out
    for word in ("read", "decode", "compute", "write", "Efficiency", "Bound by", "all on the CPUs"):
        assert word in out
    assert " 0.00" not in out
    document = json.loads(paths["json"].read_text())
    stages = {"read", "decode", "compute", "write"}
    assert set(document["ceilings"]) == {*stages, "all at once", "cores"}
    bound = document["ceilings"][document["bound_by"]]["images_per_s"]
    assert document["efficiency"] == pytest.approx(document["images_per_s"] / bound)
    for row in document["ceilings"].values():
        assert row["reached"] == pytest.approx(document["images_per_s"] / row["images_per_s"])
    assert "<script" not in paths["html"].read_text()
    metrics = (tmp_path / "m.prom").read_text()
    assert "cnn_engine_infer_images 300.0" in metrics
    assert 'cnn_engine_infer_stage_seconds{stage="decode"}' in metrics

    plan = ["--plan", "1e9", "--rate-from", str(paths["json"])]
    assert infer.main([*plan, "--nodes", "10", "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "1,000,000,000" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    (row,) = found["rows"]
    assert row["seconds"] == pytest.approx(1e9 / (10 * document["images_per_s"]))
    assert found["output_bytes"] == pytest.approx(
        1e9 * document["output_bytes"] / document["images"]
    )
    assert infer.main([*plan, "--hours", "1", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    rate = document["images_per_s"]
    assert (row["nodes"] - 1) * rate * 3600 < 1e9 <= row["nodes"] * rate * 3600
    assert infer.main([*plan, "--nodes", "1000000", "--storage", "0.001", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["bound_by"] == "storage"
    assert row["read_bytes_per_s"] + row["written_bytes_per_s"] == pytest.approx(1e6)


def test_columns_are_taken_by_name(images, tmp_path):
    import pyarrow as pa

    (tmp_path / "in").mkdir()
    nested = pa.array(
        [image.tolist() for image in images[:30]], pa.list_(pa.list_(pa.list_(pa.uint8())))
    )
    table = pa.table({"picture": nested, "which": [f"n{at}" for at in range(30)], "y": range(30)})
    pq.write_table(table, tmp_path / "in/a.parquet")
    columns = "image=picture,label=y,id=which"
    assert run(tmp_path / "in", "--output", tmp_path / "out", "--columns", columns, "--quiet") == 0
    found = infer_inputs.rows(tmp_path / "out")
    assert found["id"].to_pylist() == [f"n{at}" for at in range(30)]
    assert found["label"].to_pylist() == list(range(30))
    assert infer_inputs.probabilities(found).tobytes() == ENGINE.predict(images[:30]).tobytes()


def test_lines_where_there_is_no_terminal_and_quiet(images, tmp_path):
    infer_inputs.make("npy", tmp_path / "in", images[:20])
    words = [sys.executable, "-m", "cnn_engine.infer", str(tmp_path / "in"), *infer_inputs.COMMON]
    done = subprocess.run(
        [*words, "--output", str(tmp_path / "out"), "--quiet"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
