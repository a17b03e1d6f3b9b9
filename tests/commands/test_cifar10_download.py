"""``python -m cifar10.download`` against a local server that misbehaves, and hostile archives."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cnn_engine.workloads.cifar10 import dataset, download

from cnn_engine.errors import InputError
from cnn_engine.io import fetch as fetching

RECORDS = 4
BATCH = b"".join(bytes([n]) + os.urandom(3072) for n in range(RECORDS))
NAMES = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]


def archive(members=None, directory=dataset.FOLDER) -> bytes:
    """Returns a .tar.gz of ``members`` (TarInfo, data) and those of the six files they lack."""
    members = members or []
    taken = {member.name for member, _ in members}
    good = [tarfile.TarInfo(f"{directory}/{name}") for name in NAMES]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for member, data in [*((m, BATCH) for m in good if m.name not in taken), *members]:
            if member.isreg():
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def member(name, data=b"", kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, data


@dataclass
class Server:
    """What the server sends, how it misbehaves, and what it was asked."""

    content: bytes
    break_after: list[int] = field(default_factory=list)  # bytes sent by the first answers
    ranges: bool = True
    etag: str | None = '"one"'
    status: int = 200
    claim: int | None = None  # the Content-Length, if not the truth
    shift: int = 0  # a resumed answer starts so many bytes too late
    requests: list[dict] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server():
    state = Server(archive())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.requests.append(dict(self.headers))
            if state.status != 200:
                self.send_error(state.status)
                return
            start = 0
            wanted = self.headers.get("Range")
            if wanted and state.ranges and self.headers.get("If-Range") in (None, state.etag):
                start = int(wanted.removeprefix("bytes=").rstrip("-")) + state.shift
                if start >= len(state.content):
                    self.send_error(416)
                    return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(state.claim or len(body)))
            if state.etag:
                self.send_header("ETag", state.etag)
            if start:
                end = f"{len(state.content) - 1}/{len(state.content)}"
                self.send_header("Content-Range", f"bytes {start}-{end}")
            self.end_headers()
            if state.break_after:
                body = body[: state.break_after.pop(0)]
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}/cifar-10-binary.tar.gz"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(download, "_BATCH_BYTES", len(BATCH))
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_S", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def fetch(server, folder, **options):
    md5 = options.pop("md5", None) or hashlib.md5(server.content).hexdigest()
    return download.download(folder, server.url, md5, **options)


def assert_whole(folder):
    assert sorted(os.listdir(folder)) == [dataset.FOLDER]  # no part, nothing temporary
    found = folder / dataset.FOLDER
    assert sorted(os.listdir(found)) == NAMES
    assert all((found / name).read_bytes() == BATCH for name in NAMES)
    assert len(dataset.load(found)) == 6 * RECORDS


def test_download_and_unpack(server, tmp_path):
    reports = []
    found = fetch(server, tmp_path / "new" / "folder", report=lambda *r: reports.append(r))
    assert found == tmp_path / "new" / "folder" / dataset.FOLDER
    assert_whole(found.parent)
    assert found.stat().st_mode & 0o777 == 0o777 & ~download._umask()
    assert reports[0] == (0, len(server.content))
    assert reports[-1] == (len(server.content), len(server.content))


def test_present_data_is_not_fetched_again_unless_forced(server, tmp_path):
    fetch(server, tmp_path)
    lines = []
    fetch(server, tmp_path, say=lines.append)
    assert len(server.requests) == 1
    assert "is there already" in lines[0]
    fetch(server, tmp_path, force=True)
    assert len(server.requests) == 2
    assert_whole(tmp_path)


def test_incomplete_folder_is_left_alone_unless_forced(server, tmp_path):
    (tmp_path / dataset.FOLDER).mkdir()
    (tmp_path / dataset.FOLDER / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="--force replaces it"):
        fetch(server, tmp_path)
    assert (tmp_path / dataset.FOLDER / "mine.txt").exists()
    assert not server.requests
    fetch(server, tmp_path, force=True)
    assert_whole(tmp_path)


def test_broken_connection_resumes(server, tmp_path):
    server.break_after = [1000, 2000]
    lines = []
    fetch(server, tmp_path, say=lines.append)
    assert_whole(tmp_path)
    assert [r.get("Range") for r in server.requests] == [None, "bytes=1000-", "bytes=3000-"]
    assert server.requests[1]["If-Range"] == '"one"'
    assert any("broke off (1000 of" in line for line in lines)


def test_as_long_as_bytes_come_it_goes_on(server, tmp_path):
    """However often the connection breaks, and where only the last byte is missing."""
    server.break_after = [300] * 12 + [len(server.content) - 12 * 300 - 1]
    fetch(server, tmp_path)
    assert_whole(tmp_path)
    assert len(server.requests) == 14
    assert server.requests[-1]["Range"] == f"bytes={len(server.content) - 1}-"


def test_interrupted_run_is_resumed_by_the_next(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_CHUNK_BYTES", 1000)

    def interrupt(done, total):
        if done >= 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, tmp_path, report=interrupt)
    done = (tmp_path / "cifar-10-binary.tar.gz.part").stat().st_size
    assert done == 3000
    fetch(server, tmp_path)
    assert server.requests[1]["Range"] == f"bytes={done}-"
    assert_whole(tmp_path)


def test_whole_part_is_unpacked_without_a_request(server, tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz.part").write_bytes(server.content)
    fetch(server, tmp_path)
    assert not server.requests
    assert_whole(tmp_path)


def test_server_that_ignores_range_restarts(server, tmp_path):
    server.break_after, server.ranges = [5000], False
    fetch(server, tmp_path)
    assert "Range" in server.requests[1]
    assert_whole(tmp_path)


def test_server_without_validator_restarts(server, tmp_path):
    server.break_after, server.etag = [5000], None
    fetch(server, tmp_path)
    assert "Range" not in server.requests[1]
    assert_whole(tmp_path)


def test_weak_tag_is_no_validator(server, tmp_path):
    server.break_after, server.etag = [5000], 'W/"one"'
    fetch(server, tmp_path)
    assert "Range" not in server.requests[1]


def test_file_that_changed_meanwhile_restarts(server, tmp_path):
    server.break_after = [5000]

    def change(line):
        if "broke off" in line:
            server.etag = '"two"'

    fetch(server, tmp_path, say=change)
    assert server.requests[1]["If-Range"] == '"one"'
    assert_whole(tmp_path)


def test_resumed_at_the_wrong_place_restarts(server, tmp_path):
    server.break_after, server.shift = [5000], 7
    fetch(server, tmp_path)
    assert [("Range" in r) for r in server.requests] == [False, True, False]
    assert_whole(tmp_path)


def test_part_longer_than_the_file_restarts(server, tmp_path):
    part = tmp_path / "cifar-10-binary.tar.gz.part"
    part.write_bytes(server.content + b"more")
    (tmp_path / (part.name + ".version")).write_text(f'{server.url}\n"one"')
    fetch(server, tmp_path)
    assert [("Range" in r) for r in server.requests] == [True, False]
    assert_whole(tmp_path)


def test_part_of_another_address_is_not_resumed(server, tmp_path):
    part = tmp_path / "cifar-10-binary.tar.gz.part"
    part.write_bytes(b"other")
    (tmp_path / (part.name + ".version")).write_text('http://elsewhere/\n"one"')
    fetch(server, tmp_path)
    assert "Range" not in server.requests[0]


def test_server_that_always_breaks_off_gives_up_and_keeps_the_part(server, tmp_path):
    server.claim = len(server.content) + 5  # a wrong length looks like a broken connection
    with pytest.raises(InputError, match=r"found .* \(5 times\); the same command resumes"):
        fetch(server, tmp_path)
    assert not (tmp_path / dataset.FOLDER).exists()
    server.claim = None
    fetch(server, tmp_path)
    assert_whole(tmp_path)


def test_endless_restarts_end(server, tmp_path):
    server.ranges, server.break_after = False, [4000] * 50
    with pytest.raises(InputError, match="5 times"):
        fetch(server, tmp_path)
    assert len(server.requests) == 5


def test_wrong_checksum(server, tmp_path):
    with pytest.raises(
        InputError, match=r"expected the archive with MD5 0{32}, found [0-9a-f]{32}"
    ):
        fetch(server, tmp_path, md5="0" * 32)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (503, 5)])
def test_http_errors(server, tmp_path, status, requests):
    server.status = status
    with pytest.raises(InputError, match=f"expected the archive, found HTTP {status}"):
        fetch(server, tmp_path)
    assert len(server.requests) == requests


def test_claim_of_an_absurd_length(server, tmp_path):
    server.claim = 10**12
    with pytest.raises(InputError, match="expected at most 1073741824 bytes, found 1000000000000"):
        fetch(server, tmp_path)


def test_nobody_listens_or_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(InputError, match="timed out"):
            download.download(tmp_path, f"http://127.0.0.1:{port}/", "0" * 32)
    with pytest.raises(InputError, match="Connection refused"):
        download.download(tmp_path, f"http://127.0.0.1:{port}/", "0" * 32)


@pytest.mark.parametrize(
    "url",
    ["", "file:///etc/passwd", "ftp://x/y", "http://", "http://a b/", "http://x:y/", "http://["],
)
def test_wrong_url(tmp_path, url):
    with pytest.raises(InputError, match="--url: expected an http:// or https:// address"):
        download.download(tmp_path, url, "0" * 32)


def test_second_download_at_the_same_time(server, tmp_path):
    locked = fetching._locked(tmp_path / "cifar-10-binary.tar.gz.part")
    with locked, pytest.raises(InputError, match="another download is writing it"):
        fetch(server, tmp_path)


def test_full_disk_keeps_what_was_there(server, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.shutil, "copyfileobj", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        fetch(server, tmp_path)
    assert not (tmp_path / dataset.FOLDER).exists()
    assert (tmp_path / "cifar-10-binary.tar.gz.part").exists()


FOLDER = dataset.FOLDER
HOSTILE = {
    "parent path": ([member(f"{FOLDER}/../../evil", b"x")], "a member 'cifar-10-batches-bin/"),
    "absolute path": ([member("/tmp/evil", b"x")], "a member '/tmp/evil'"),
    "unexpected name": ([member(f"{FOLDER}/run.sh", b"x")], "a member"),
    "nested folder": ([member(f"{FOLDER}/a/test_batch.bin", b"x")], "a member"),
    "other folder": ([member("a", kind=tarfile.DIRTYPE)], "a member 'a'"),
    "symbolic link": (
        [member(f"{FOLDER}/test_batch.bin", kind=tarfile.SYMTYPE, target="/etc/passwd")],
        "test_batch.bin: expected a plain file",
    ),
    "hard link": (
        [member(f"{FOLDER}/test_batch.bin", kind=tarfile.LNKTYPE, target="/etc/passwd")],
        "test_batch.bin: expected a plain file",
    ),
    "link for the folder": ([member(FOLDER, kind=tarfile.SYMTYPE, target="/tmp")], "a member"),
    "device": (
        [member(f"{FOLDER}/test_batch.bin", kind=tarfile.CHRTYPE)],
        "test_batch.bin: expected a plain file",
    ),
    "pipe": (
        [member(f"{FOLDER}/test_batch.bin", kind=tarfile.FIFOTYPE)],
        "test_batch.bin: expected a plain file",
    ),
    "long batch": ([member(f"{FOLDER}/test_batch.bin", BATCH + BATCH)], "expected 12292 bytes"),
    "long document": (
        [member(f"{FOLDER}/readme.html", bytes((1 << 20) + 1))],
        "readme.html: expected at most 1048576 bytes",
    ),
    "twice": (
        [member(f"{FOLDER}/readme.html", b"1"), member(f"{FOLDER}/readme.html", b"2")],
        "readme.html: expected one member of that name, found two",
    ),
    "many members": ([member(FOLDER, kind=tarfile.DIRTYPE)] * 20, "at most 16 members, found more"),
}


def assert_refused(server, folder, content, message):
    server.content = content
    with pytest.raises(InputError, match=message) as error:
        fetch(server, folder)
    assert "\n" not in str(error.value)
    assert not [n for n in os.listdir(folder) if not n.startswith("cifar-10-binary.tar.gz.part")]


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archive_is_refused(server, tmp_path, kind):
    members, message = HOSTILE[kind]
    assert_refused(server, tmp_path, archive(members), message)


def test_archive_that_lacks_a_file(server, tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz"):
        pass
    assert_refused(server, tmp_path, file.getvalue(), "expected an archive with data_batch_1.bin")


def test_broken_archives(server, tmp_path):
    good = archive()
    for content in (b"<html>", good[: len(good) // 2], b"\x1f\x8b" + os.urandom(5000)):
        assert_refused(server, tmp_path, content, "expected (an|the) archive")


def test_archive_that_grows_without_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_MAX_UNPACKED_BYTES", 50_000)
    assert_refused(server, tmp_path, archive(), "at most 50000 bytes unpacked, found more")


def test_good_extras_of_the_official_archive(server, tmp_path):
    server.content = archive(
        [
            member(FOLDER, kind=tarfile.DIRTYPE),
            member(f"{FOLDER}/batches.meta.txt", b"airplane\n"),
            member(f"./{FOLDER}/readme.html", b"<p>"),
        ]
    )
    found = fetch(server, tmp_path)
    assert (found / "readme.html").read_bytes() == b"<p>"


# The command


@pytest.fixture
def official(server, monkeypatch):
    monkeypatch.setattr(download, "MD5", hashlib.md5(server.content).hexdigest())
    return server


def test_command(official, tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--url", official.url]
    assert download.main(arguments) == 0
    output, errors = capsys.readouterr()
    assert output == f"CIFAR-10: {tmp_path / FOLDER}\n"
    assert f"downloading {official.url}" in errors
    assert_whole(tmp_path)
    assert download.main(arguments) == 0
    assert "is there already" in capsys.readouterr().err
    assert download.main([*arguments, "--quiet", "--force"]) == 0
    assert capsys.readouterr() == ("", "")


def test_command_fills_the_cache_that_auto_reads(official, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(dataset.DATA_VARIABLE, raising=False)
    assert download.main(["--url", official.url, "--quiet"]) == 0
    assert dataset.load("auto").source == str(tmp_path / "cnn_engine" / FOLDER)


def test_command_errors(official, tmp_path, capsys):
    official.status = 404
    (tmp_path / "file").write_text("")
    for arguments, message in [
        (["--url", official.url], f"error: {official.url}: expected the archive, found HTTP 404"),
        (["--output", str(tmp_path / "file")], f"error: {tmp_path / 'file'}: cannot be written"),
        (["--nonsense"], "error: unrecognized arguments: --nonsense"),
    ]:
        assert download.main(["--output", str(tmp_path), *arguments]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.splitlines()[-1].startswith(message)


def test_interrupted_command(official, tmp_path, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_fetch", interrupt)
    assert download.main(["--output", str(tmp_path), "--url", official.url]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted: the same command")


def test_official_checksum_and_sizes():
    assert download.MD5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert download.URL.startswith("https://www.cs.toronto.edu/")
