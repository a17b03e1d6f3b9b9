"""The user's cache: what another user could have written is not read, and no state of it is an error."""

from __future__ import annotations

import os
import signal
import stat
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnn_engine.engine import autotune
from cnn_engine.io import cache
from cnn_engine.kernel import templates
from cnn_engine.kernels.user import cpp, source

DATA = b"compiled" * 100


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(path))
    made: list = []
    monkeypatch.setattr(cache, "_made", made)
    monkeypatch.setattr(cache, "_said", set())
    yield path
    for one in made:
        one.cleanup()


@pytest.fixture(autouse=True)
def in_time():
    """Whatever waits for a fifo, or reads a device to its end, is stopped."""

    def late(*_):
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def in_other_hands(monkeypatch):
    """Makes this process another user than the one that owns what it made."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_what_was_kept_is_read(folder):
    assert cache.read("a") is None
    assert cache.keep("a", DATA)
    assert cache.read("a") == DATA
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]


def as_link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def as_link_to_zeros(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def as_fifo(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut in its head": lambda path: os.truncate(path, 30),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a link": as_link,
    "a link to zeros": as_link_to_zeros,
    "a fifo": as_fifo,
    "for all to write": lambda path: path.chmod(0o666),
    "for the group to write": lambda path: path.chmod(0o660),
    "without a head": lambda path: path.write_bytes(DATA),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_absent_and_made_anew(folder, damage):
    cache.keep("a", DATA)
    damage(folder / "a")
    assert cache.read("a") is None
    assert cache.keep("a", DATA)
    assert cache.read("a") == DATA
    assert (folder / "a").lstat().st_mode == stat.S_IFREG | 0o600


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_bit_that_flips_is_seen(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CNN_ENGINE_KERNEL_CACHE", str(path))
        cache.keep("a", DATA)
        content = bytearray((path / "a").read_bytes())
        content[place % len(content)] ^= 1 << bit
        (path / "a").write_bytes(content)
        assert cache.read("a") is None


def test_a_folder_in_the_place_of_an_entry(folder):
    (folder / "a").mkdir(parents=True)
    folder.chmod(0o700)
    assert cache.read("a") is None
    assert not cache.keep("a", DATA)


def test_an_entry_of_another_user_is_absent(folder, monkeypatch):
    """The folder is this user's; the file's owner is looked at by itself."""
    cache.keep("a", DATA)
    fstat = os.fstat

    def of_another(descriptor):
        found = list(fstat(descriptor))
        if stat.S_ISREG(found[stat.ST_MODE]):
            found[stat.ST_UID] += 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", of_another)
    assert cache.read("a") is None


def untrusted(path, monkeypatch, why):
    path.mkdir(mode=0o700)
    if why == "another user's":
        in_other_hands(monkeypatch)
        # The folder that stands in is made by the same hands.
        monkeypatch.setattr(cache, "_check_owner", only_of(path, cache._check_owner))
    elif why == "a link":
        path.rename(path.with_name("real"))
        path.symlink_to("real")
    else:
        path.chmod(why)


def only_of(path, check):
    inode = path.stat().st_ino
    return lambda found: check(found) if found.st_ino == inode else None


@pytest.mark.parametrize("why", ["another user's", 0o777, 0o770, 0o1777, "a link"])
def test_a_folder_that_is_not_trusted_is_not_used_and_said_once(folder, monkeypatch, why):
    untrusted(folder, monkeypatch, why)
    with pytest.warns(RuntimeWarning, match="is not used: .*a temporary folder stands in"):
        assert not cache.keep("a", DATA)  # other processes will not find it
    assert cache.read("a") == DATA  # and a second warning would be an error
    assert not list(folder.iterdir())
    private = cache.folder()
    assert private != folder
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_a_new_folder_is_the_users_alone(folder, umask):
    before = os.umask(umask)
    try:
        assert cache.keep("a", DATA)
        assert cache.read("a") == DATA
    finally:
        os.umask(before)


def test_a_folder_that_cannot_be_made_is_replaced_in_silence(folder):
    folder.write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.keep("a", DATA)
        assert cache.read("a") == DATA


def test_an_interrupted_write_leaves_nothing(folder, monkeypatch):
    cache.keep("a", DATA)

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.keep("a", b"other")
    assert cache.read("a") == DATA
    assert [path.name for path in folder.iterdir()] == ["a"]


# ---- compiled kernels ----


@pytest.fixture
def kernel(tmp_path):
    path = tmp_path / "my_relu.cpp"
    path.write_text(templates.text("relu", "cpu", path.name))
    return source.read(path)


PLANTED = b"\x7fELF planted"


def plant(path, how):
    if how == "a planted library":
        path.write_bytes(PLANTED)
    elif how == "a planted library with a head":
        path.write_bytes(cache._head(PLANTED) + PLANTED)
        path.chmod(0o666)
    else:
        DAMAGE[how](path)


@pytest.mark.parametrize(
    "how",
    ["a planted library", "a planted library with a head", "cut", "empty", "a link to zeros", "a fifo"],
)  # fmt: skip
def test_a_compiled_kernel_is_made_anew(folder, kernel, how):
    made = cpp.compile(kernel)
    (file,) = folder.iterdir()
    plant(file, how)
    assert cpp.compile(kernel) == made
    assert cache.read(file.name) == made
    cpp.Library(kernel)


def test_what_is_loaded_cannot_change(folder, kernel):
    """The file may be cut, or another put in its place, after it was verified: neither is seen."""
    path = cpp.file_of(cpp.compile(kernel))
    with pytest.raises(PermissionError), open(path, "r+b") as file:
        file.write(b"other")
    with pytest.raises(PermissionError):
        os.truncate(path, 0)
    (file,) = folder.iterdir()
    os.truncate(file, 10)
    cpp.Library(kernel, path)


def test_equal_libraries_are_loaded_once(folder, kernel):
    assert cpp.file_of(cpp.compile(kernel)) == cpp.file_of(cpp.compile(kernel))


# ---- tuning ----


class Device:
    kind, model = "cpu", "a processor"


@pytest.mark.parametrize("how", ["a link to zeros", "a fifo", "for all to write", "a link"])
def test_a_tuning_file_that_is_not_trusted_is_not_read(folder, how):
    tuner = autotune.Tuner(Device(), "float32")
    found = {"conv": autotune.Found("tiled", "", 1e-3, 2e-3)}
    tuner._keep(found)
    assert tuner._read() == found
    (file,) = folder.iterdir()
    DAMAGE[how](file)
    assert tuner._read() == {}
    assert len(tuner.notes) == 1
    assert "is not used, as it does not fit: " in tuner.notes[0]
    tuner._keep(found)
    assert tuner._read() == found


def test_a_tuning_file_that_is_too_long_is_not_read(folder, monkeypatch):
    tuner = autotune.Tuner(Device(), "float32")
    tuner._keep({"conv": autotune.Found("tiled", "", 1e-3, 2e-3)})
    monkeypatch.setattr(autotune, "MOST_BYTES", 100)
    assert tuner._read() == {}
    assert "expected at most 100 bytes" in tuner.notes[0]
