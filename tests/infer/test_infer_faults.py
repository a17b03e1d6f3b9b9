"""What infer leaves behind when it is disturbed: files whole or not there, each once, the same as ever."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import infer_inputs
import numpy as np
import pyarrow.parquet as pq
import pytest
from process_trees import gone

from cnn_engine import infer
from cnn_engine.errors import InputError
from cnn_engine.infer import columns, local_pool, output, pipeline
from cnn_engine.infer.output import OutputError, Record
from cnn_engine.infer.output_dir import Folder
from cnn_engine.infer.shards import Shard
from cnn_engine.infer.supervise import Supervisor

#: Shards of ten images.
WORDS = ["--device", "cpu", "--variant", "if", "--batch", "10", "--shard-size", "31kB", "--no-ceilings",
         "--quiet"]  # fmt: skip
COUNT = 240


def left_over(folder: Path) -> list[Path]:
    return list((folder / "_run/temporary").glob("*/*"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "in"
    infer_inputs.make("npy", folder, infer_inputs.pixels(COUNT))
    return folder


@pytest.fixture(scope="module")
def wanted(inputs, tmp_path_factory):
    """The files of an undisturbed run."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert infer.main([str(inputs), "--output", str(out), "--workers", "2", *WORDS]) == 0
    found = infer_inputs.contents(out)
    assert len(found) == COUNT // 10
    return found


#: The command, disturbed once the first shard is done. A test that waited for its file could be too late.
DISTURBED = """
import os, signal, sys
from cnn_engine import infer
from cnn_engine.infer.supervise import Supervisor

done = Supervisor._on_done

def disturbed(self, worker, event):
    done(self, worker, event)
    if len(self.done) == 1:
        {disturb}

Supervisor._on_done = disturbed
sys.exit(infer.main())
"""


def run(inputs: Path, out: Path, *more: str, disturb: str = "pass", **options) -> SimpleNamespace:
    """Runs the command with one worker in a process of its own; returns its code, output and errors."""
    words = [str(inputs), "--output", str(out), *WORDS, "--workers", "1", *more]
    done = subprocess.run(
        [sys.executable, "-c", DISTURBED.format(disturb=disturb), *words],
        capture_output=True, text=True, timeout=250, **options,
    )  # fmt: skip
    return SimpleNamespace(code=done.returncode, output=done.stdout, errors=done.stderr)


def mended(inputs: Path, out: Path, wanted: dict[str, bytes]) -> None:
    """Runs the same command once more, without processes, and compares every byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)
        assert infer.main([str(inputs), "--output", str(out), *WORDS]) == 0
    assert infer_inputs.contents(out) == wanted
    assert left_over(out) == []
    assert json.loads((out / "_manifest.json").read_text())["images"] == COUNT


def test_a_killed_worker_is_replaced(inputs, wanted, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    found = run(inputs, out, "--json", str(report), disturb="self.pool.kill(worker)")
    assert (found.code, found.errors) == (0, "")
    assert infer_inputs.contents(out) == wanted
    assert left_over(out) == []
    assert json.loads(report.read_text())["restarts"] == 1


def test_a_killed_parent_takes_its_workers_along(inputs, wanted, tmp_path):
    out = tmp_path / "out"
    kill = (
        "print(self.pool._processes[worker].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = run(inputs, out, disturb=kill)
    assert found.code == -signal.SIGKILL
    assert gone(map(int, found.output.split()))
    done = infer_inputs.contents(out)
    assert 0 < len(done) < len(wanted)
    assert all(wanted[name] == data for name, data in done.items())
    mended(inputs, out, wanted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_keep_what_is_done(number, code, inputs, wanted, tmp_path):
    out = tmp_path / "out"
    found = run(inputs, out, disturb=f"signal.raise_signal({int(number)})")
    assert found.code == code
    assert found.errors.startswith("interrupted: ")
    assert found.errors.endswith("shards are left; the same command does them\n")
    assert left_over(out) == []
    manifest = json.loads((out / "_manifest.json").read_text())
    assert 0 < manifest["shards_done"] == len(infer_inputs.contents(out)) < len(wanted)
    mended(inputs, out, wanted)


def test_a_full_disk_ends_the_command_in_one_line(inputs, wanted, tmp_path):
    """A limit on the size of files stands for it: writing fails in the middle of one."""
    out = tmp_path / "out"
    least = min(map(len, wanted.values()))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least - 100, resource.RLIM_INFINITY))

    (out / "_run").mkdir(parents=True)
    found = run(inputs, out, preexec_fn=limit)
    assert found.code == 2
    assert len(found.errors.splitlines()) == 1
    assert found.errors.startswith("error: cannot write ")
    assert "File too large" in found.errors
    assert infer_inputs.contents(out) == {}
    assert left_over(out) == []
    mended(inputs, out, wanted)


def test_a_folder_that_is_gone_ends_the_command_in_one_line(inputs, tmp_path):
    out = tmp_path / "out"
    found = run(inputs, out, disturb=f"os.rename({str(out)!r}, {str(tmp_path / 'away')!r})")
    assert found.code == 2
    (line,) = found.errors.splitlines()
    assert line.startswith("error: ")
    assert "No such file or directory" in line


def test_an_input_that_is_replaced_meanwhile_is_an_error(tmp_path):
    """Rows may be of either file: those of the first shard are of the one that is gone."""
    images = infer_inputs.pixels(COUNT)
    infer_inputs.make("npy", tmp_path / "in", images)
    (path,) = (tmp_path / "in").iterdir()
    infer_inputs.make("npy", tmp_path / "other", 255 - images)
    (other,) = (tmp_path / "other").iterdir()
    found = run(
        tmp_path / "in", tmp_path / "out", disturb=f"os.replace({str(other)!r}, {str(path)!r})"
    )
    assert found.code == 2
    assert found.errors == (
        f"error: {path}: expected it as when {tmp_path / 'out'} was begun, found another time of change; "
        "choose another --output\n"
    )


def test_a_second_command_on_the_same_folder_is_refused(inputs, wanted, tmp_path, capsys):
    out = tmp_path / "out"
    words = [str(inputs), "--output", str(out), *WORDS]
    part = ["--shard-index", "1", "--shard-count", "2"]
    with Folder(str(out)):
        for more in ([], part):  # nor may a part of an array of jobs
            assert infer.main([*words, *more]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "--output: expected a folder that no other command writes" in line
            assert f"found process {os.getpid()} on " in line
    with Folder(str(out), 0, 2):  # other parts may, but not the whole, nor the same part again
        for more in ([], ["--shard-index", "0", "--shard-count", "2"]):
            assert infer.main([*words, *more]) == 2
            assert "--output: expected a folder" in capsys.readouterr().err
        Folder(str(out), 1, 2).close()
    assert infer_inputs.contents(out) == {}
    mended(inputs, out, wanted)


def test_a_shard_that_kills_three_workers_is_set_aside(tmp_path):
    """And what was in the same worker is not."""
    images = infer_inputs.pixels(40)
    infer_inputs.make("image", tmp_path / "in", images, parts=4)
    poison = tmp_path / "in/part-002/000025.jpg"
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import builtins, os\n"
        "real = builtins.open\n"
        "def opened(path, *rest, **more):\n"
        f"    if path == {str(poison)!r}:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return real(path, *rest, **more)\n"
        "builtins.open = opened\n"
    )
    size = sum(path.stat().st_size for path in (tmp_path / "in/part-000").iterdir())
    report = tmp_path / "report.json"
    process = subprocess.run(
        [sys.executable, "-m", "cnn_engine.infer", str(tmp_path / "in"), "--output",
         str(tmp_path / "out"), "--device=cpu", "--workers=1", "--no-ceilings", "--quiet",
         "--shard-size", str(size), "--json", str(report)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert "set aside: killed 3 workers (signal SIGKILL)" in line
    assert "part-002/" in line
    document = json.loads(report.read_text())
    shards = document["shards"]
    assert len(shards["set_aside"]) == 1
    assert shards["done"] == shards["total"] - 1
    assert document["restarts"] == 3


# ---- one shard's file ----


def written(folder: Path, name: str, count: int = 5) -> output.ShardFile:
    file = output.ShardFile(folder, folder / name, "shard-000000", "run", columns.of_rows(3))
    rows = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    file.add([f"i{at}" for at in range(count)], {"": rows}, [None] * count, {1: "bad"})
    return file


def test_a_late_attempt_changes_nothing(tmp_path):
    first, late = written(tmp_path, "a"), written(tmp_path, "b")
    assert (
        first.commit()
        == late.commit()
        == Record(5, 1, (tmp_path / "shard-000000.parquet").stat().st_size)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-000000.parquet"]
    stamp = os.stat(tmp_path / "shard-000000.parquet")
    written(tmp_path, "c").commit()
    assert os.stat(tmp_path / "shard-000000.parquet") == stamp or (
        os.stat(tmp_path / "shard-000000.parquet").st_ino == stamp.st_ino
    )


def test_where_links_are_not_to_be_had_files_are_renamed(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    record = written(tmp_path, "a").commit()
    assert output.inspect(tmp_path / "shard-000000.parquet", "shard-000000", "run") == record
    assert len(list(tmp_path.iterdir())) == 1


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_news(tmp_path, monkeypatch):
    calls = []
    sync, link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        if kind == "file":
            size = os.fstat(descriptor).st_size
            assert size == os.stat(tmp_path / "a").st_size > 0
        calls.append(f"fsync {kind}")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda *paths: (calls.append("link"), link(*paths)))
    file = written(tmp_path, "a")
    assert calls == []
    file.commit()
    assert calls == ["fsync file", "link", "fsync folder"]


def test_writers_go_on_while_files_wait_for_the_disk(inputs, wanted, tmp_path, monkeypatch):
    """More files wait at once than there are writers."""
    sync, counting, many = os.fsync, threading.Condition(), []

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(
            str(tmp_path / "out/_run/temporary")
        ):
            with counting:
                many.append(descriptor)
                counting.notify_all()
                assert counting.wait_for(lambda: len(many) > 2 * pipeline.WRITERS["cpu"], 60)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    mended(inputs, tmp_path / "out", wanted)


def test_a_disk_that_is_full_when_files_are_put_on_it_ends_the_command(
    inputs, wanted, tmp_path, monkeypatch, capsys
):
    sync, left = os.fsync, [2]

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(
            str(tmp_path / "out/_run/temporary")
        ):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(local_pool, "LocalPool", infer_inputs.InlinePool)
        assert infer.main([str(inputs), "--output", str(out), *WORDS]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "cannot write" in message
    assert "No space left on device" in message
    assert len(infer_inputs.contents(out)) <= 2
    mended(inputs, out, wanted)


def test_every_cut_of_a_file_is_seen(tmp_path):
    record = written(tmp_path, "a").commit()
    path = tmp_path / "shard-000000.parquet"
    data = path.read_bytes()
    assert output.inspect(path, "shard-000000", "run") == record
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        assert output.inspect(path, "shard-000000", "run") is None
    path.write_bytes(data)
    assert output.inspect(path, "shard-000001", "run") is None
    assert output.inspect(path, "shard-000000", "another") is None


@pytest.mark.parametrize("top", [None, 2])
def test_rows_are_in_groups_and_their_memory_is_free_at_once(top, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "LEAST_ROWS", 7)
    monkeypatch.setattr(output, "MOST_ROWS", 7)
    rows = np.random.default_rng(0).random((30, 3), np.float32)
    file = output.ShardFile(tmp_path, tmp_path / "t", "s", "run", columns.of_rows(3), top)
    memory, at = np.empty((30, 3), np.float32), 0
    for cut in (1, 12, 4, 13):
        memory[:cut] = rows[at : at + cut]
        names = [f"i{number}" for number in range(at, at + cut)]
        file.add(names, {"": memory[:cut]}, [None] * cut, {0: "bad"} if cut == 13 else {})
        memory[:] = -1  # the next chunk's
        at += cut
    assert file.commit() == output.Record(30, 1, (tmp_path / "s.parquet").stat().st_size)
    with pq.ParquetFile(tmp_path / "s.parquet") as found:
        groups = [found.metadata.row_group(n).num_rows for n in range(found.num_row_groups)]
        table = found.read()
    assert groups == [7, 6, 6, 6, 5]  # of 1 + 12, and of 4 + 13
    assert table["id"].to_pylist() == [f"i{number}" for number in range(30)]
    name, wanted = (
        ("probabilities", rows) if top is None else ("top_probabilities", -np.sort(-rows)[:, :2])
    )
    values = table[name].to_pylist()
    assert (values[17], table["error"][17].as_py()) == (None, "bad")
    del values[17]
    assert np.array_equal(np.array(values, np.float32), np.delete(wanted, 17, 0))


# ---- the supervisor, with workers that do what a test says ----


class FakePool:
    """Workers whose answer to a shard is what ``script`` says of (worker's life, shard)."""

    start_limit_s = 300.0

    def __init__(self, script) -> None:
        self.events: queue.Queue = queue.Queue()
        self.script, self.log = script, []
        self.has: dict[int, list[int]] = {}

    def start(self, worker: int) -> None:
        self.has[worker] = []
        hello = dict.fromkeys(
            ("model_sha256", "batch", "classes", "variant", "dtype", "device_kind"), 1
        )
        self.events.put((worker, {"event": "hello", "host": "here", **hello}))

    def send(self, worker: int, message: dict) -> None:
        if message["command"] != "run":
            return
        shard = message["shard"]["index"]
        self.has[worker].append(shard)
        self.log.append((worker, tuple(self.has[worker])))
        answer = self.script(shard)
        if answer is None:
            return
        if answer["event"] != "died":
            self.has[worker].remove(shard)
            answer = {"shard": shard, **answer}
        self.events.put((worker, answer))

    def kill(self, worker: int) -> None:
        self.events.put((worker, {"event": "died", "reason": "killed"}))

    def cores(self) -> int:
        return 1

    def close(self) -> None:
        pass


DONE = {"event": "done", "rows": 1, "errors": 0, "bytes": 1}
DIED = {"event": "died", "reason": "signal SIGKILL"}


def supervised(
    script, count: int, workers: int = 1, pool=FakePool, **settings
) -> tuple[Supervisor, FakePool]:
    pool = pool(script)
    supervisor = Supervisor(pool, workers)
    for name, value in settings.items():
        setattr(supervisor, name, value)
    supervisor.first_hello()
    folder = SimpleNamespace(record=lambda *_: None)
    supervisor.run(
        folder, [Shard(i, "npy", 1, 1, i, 1) for i in range(count)], "run", {}, lambda _: None
    )
    return supervisor, pool


def test_a_suspect_is_tried_alone_and_set_aside_after_three_deaths():
    supervisor, pool = supervised(lambda shard: DIED if shard == 3 else DONE, 8)
    assert sorted(supervisor.done) == [0, 1, 2, 4, 5, 6, 7]
    assert [aside.shard.index for aside in supervisor.set_aside] == [3]
    assert supervisor.counts.restarts == 3
    assert [held for _, held in pool.log if 3 in held and len(held) == 1]


def test_what_fails_to_be_read_is_tried_again_and_what_is_broken_is_not():
    tries: dict[int, int] = {}

    def script(shard: int) -> dict:
        tries[shard] = tries.get(shard, 0) + 1
        if shard == 1 and tries[shard] < 3:
            return {
                "event": "failed",
                "kind": "retry",
                "message": "cannot be read: Input/output error",
            }
        if shard == 2:
            return {"event": "failed", "kind": "input", "message": "expected a sound tar"}
        return DONE

    supervisor, _ = supervised(script, 4)
    assert sorted(supervisor.done) == [0, 1, 3]
    assert tries == {0: 1, 1: 3, 2: 1, 3: 1}
    assert supervisor.set_aside[0].reason == "expected a sound tar"


def test_an_output_that_cannot_be_written_ends_the_run():
    failed = {
        "event": "failed",
        "kind": "output",
        "message": "cannot write x: No space left on device",
    }
    with pytest.raises(OutputError, match="No space left"):
        supervised(lambda shard: failed, 4)


def test_a_worker_that_hangs_is_killed():
    hung = []

    def script(shard: int) -> dict | None:
        if shard == 1 and not hung:
            hung.append(shard)
            return None
        return DONE

    supervisor, _ = supervised(script, 3, stall_s=0.3)
    assert sorted(supervisor.done) == [0, 1, 2]
    assert supervisor.counts.restarts == 1


def test_a_worker_whose_end_is_not_heard_of_is_not_waited_for():
    lost = []

    def script(shard: int) -> dict | None:
        if shard == 1 and not lost:
            lost.append(shard)
            return None
        return DONE

    class Silent(FakePool):
        def kill(self, worker: int) -> None:
            self.killed = worker

    supervisor, pool = supervised(script, 3, pool=Silent, silent_s=0.3, grace_s=0.3)
    assert sorted(supervisor.done) == [0, 1, 2]
    assert supervisor.counts.restarts == 1
    assert pool.killed == 0


def test_workers_that_never_start_are_given_up():
    pool = FakePool(lambda shard: DONE)
    pool.start = lambda worker: pool.events.put(
        (worker, {"event": "died", "reason": "exit code 1: no"})
    )
    with pytest.raises(InputError, match="3 in a row ended: exit code 1: no"):
        Supervisor(pool, 1).first_hello()


def test_a_worker_of_another_build_is_refused():
    pool = FakePool(lambda shard: DONE)
    supervisor = Supervisor(pool, 2)
    supervisor.first_hello()
    pool.start(1)
    worker, event = pool.events.get()
    with pytest.raises(
        InputError, match="worker 1 on there: expected batch 1, as worker 0 has, found 2"
    ):
        supervisor._on_hello(worker, {**event, "host": "there", "batch": 2})
    with contextlib.suppress(queue.Empty):
        pool.events.get_nowait()


# ---- a folder that was tampered with ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that is complete, and its command's words; who changes a file puts it back."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, whole_run(folder)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run.json", "[1, 2]", "a document of schema 1, found None"),
        ("run.json", '{"schema": 99}', "a document of schema 1, found 99"),
        ("run.json", '{"schema": 1}', "what the run's settings are, found None"),
        ("run.json", '{"schema": 1, ', "the JSON document of a run"),
        ("pieces", None, "a part of the run's plan, found none"),
        ("pieces", "x", "a part of the run's plan, found "),
        ("shards", None, "a part of the run's plan, found none"),
        ("shards", "ARROW1", "a part of the run's plan, found "),
    ],
)
def test_a_plan_that_is_broken_is_an_error_of_one_line(name, text, expected, finished, capsys):
    folder, words = finished
    path = folder / "rows/_run" / name
    whole = path.read_bytes()
    path.unlink() if text is None else path.write_text(text)
    try:
        assert infer.main(words) == 2
    finally:
        path.write_bytes(whole)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}: expected {expected}" in error


@pytest.mark.parametrize("what", ["pipe", "link to nothing", "link to a folder", "empty"])
def test_what_has_a_shards_name_and_is_none_is_done_again(what, tmp_path):
    words = whole_run(tmp_path)
    path = tmp_path / "rows/shard-000000.parquet"
    wanted = path.read_bytes()
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "empty":
        path.touch()
    else:
        path.symlink_to("/nowhere" if what == "link to nothing" else tmp_path)
    assert infer.main(words) == 0
    assert not path.is_symlink()
    assert path.read_bytes() == wanted


def test_a_folder_with_a_shards_name_is_left_alone(tmp_path, capsys):
    words = whole_run(tmp_path)
    path = tmp_path / "rows/shard-000000.parquet"
    path.unlink()
    path.mkdir()
    (path / "mine").touch()
    assert infer.main(words) == 2
    assert f"cannot remove {path}: Is a directory" in capsys.readouterr().err
    assert (path / "mine").exists()


def test_a_worker_that_cannot_be_started_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    def none(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(local_pool.subprocess, "Popen", none)
    infer_inputs.make("npy", tmp_path / "in", infer_inputs.pixels(3))
    words = [str(tmp_path / "in"), "--output", str(tmp_path / "rows"), "--device=cpu"]
    assert infer.main(words) == 2
    error = capsys.readouterr().err
    assert "worker: cannot be started: Resource temporarily unavailable" in error
    assert "Traceback" not in error


def whole_run(folder: Path) -> list[str]:
    """Runs a command to its end, with a worker of this process; returns its words."""
    infer_inputs.make("npy", folder / "in", infer_inputs.pixels(30))
    words = [str(folder / "in"), "--output", str(folder / "rows"), "--device=cpu", "--workers=1",
             "--no-ceilings", "--quiet"]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_pool, "LocalPool", infer_inputs.InlinePool)
        assert infer.main(words) == 0
    return words
