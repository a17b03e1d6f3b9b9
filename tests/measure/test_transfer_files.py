"""Raw files of transfers: where they lie, how they are read back, and what is refused."""

from __future__ import annotations

import csv
import os
import statistics

import numpy as np
import pytest
from transfers import two_pieces, write_raw

from cnn_engine import shared_options
from cnn_engine.errors import InputError
from cnn_engine.transfer import files, subjects
from cnn_engine.transfer.files import Point, RawNetwork, Samples
from cnn_engine.transfer.subjects import Mode


@pytest.fixture
def folder(tmp_path):
    return write_raw(tmp_path / "raw", two_pieces, [1, 2, 4])


def test_times_survive_to_the_last_digit(tmp_path):
    times = [1e-9, 0.1 + 0.2, 12.5, 3.3e-05]
    files.write_times(tmp_path / "t.txt", times)
    assert files.read_times(tmp_path / "t.txt") == times
    assert (tmp_path / "t.txt").read_text().splitlines()[0] == "0.000000001"


@pytest.mark.parametrize("text", ["1e-5\n2e-5\n", "1e-5\n2e-5", " 1e-5 \r\n2e-5\r\n"])
def test_times_of_others_are_read(tmp_path, text):
    (tmp_path / "t.txt").write_text(text, newline="")
    assert files.read_times(tmp_path / "t.txt") == [1e-5, 2e-5]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"1e-5\nabc\n1e-5\n", "line 2: .*found 'abc'"),
        (b"1e-5\nnan\n", "line 2: .*'nan'"),
        (b"inf\n", "line 1: .*'inf'"),
        (b"1e-5\n-1e-5\n", "line 2: .*'-1e-5'"),
        (b"1e-5\n1e-5\n0\n", "line 3: .*'0'"),
        (b"1e7\n", "line 1: .*up to 1e"),
        (b"1e-5\n\n1e-5\n", "line 2: .*an empty line"),
        (b"1e-5 2e-5\n", "line 1: .*'1e-5 2e-5'"),
        (b"1_0\n", "line 1: .*'1_0'"),
        (b"\xff\xfe1\n", "line 1"),
        (b"\0" * 1000, "line 1"),
        (b"9" * 10**6, "line 1"),
        (b"", "expected one time in seconds a line, found an empty file"),
    ],
)
def test_malformed_times_are_refused_by_file_and_line(folder, content, found):
    path = folder / "2" / "data_transfer_time.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=found) as error:
        RawNetwork(folder).points()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_times_that_cannot_be_read_are_refused(folder):
    path = folder / "2" / "data_transfer_time.txt"
    path.unlink()
    os.mkfifo(path)  # a pipe without a writer would wait for ever
    with pytest.raises(InputError, match="expected a file, found a folder or a special file"):
        RawNetwork(folder).points()


@pytest.mark.parametrize("name", ["abc", "-3", "007", "0", "1.5", "99999999999", "\uff11"])
def test_folders_that_are_no_batch_size_are_refused(folder, name):
    (folder / name).mkdir()
    with pytest.raises(InputError, match="expected a folder named by a batch size"):
        RawNetwork(folder).points()


@pytest.mark.parametrize(
    "name", ["data_transfer_time_up.txt", "data_transfer_time.csv", "data_transfer_times.txt"]
)
def test_files_of_no_mode_are_refused(folder, name):
    (folder / "4" / name).write_text("1e-5\n")
    with pytest.raises(InputError, match="expected one of data_transfer_time.txt"):
        RawNetwork(folder).points()


def test_what_is_no_raw_data_is_left_alone(folder):
    (folder / ".cache").mkdir()
    (folder / "4" / "notes.md").write_text("x")
    (folder / "4" / ".data_transfer_time.txt.abc").write_text("half of a")  # left by a kill
    (folder / "README").write_text("x")
    (folder / "9").mkdir()  # nothing was measured yet
    assert [point.batch_size for point in RawNetwork(folder).points()[Mode()]] == [1, 2, 4]


def test_points_are_in_numeric_order_and_sum_up_their_samples(tmp_path):
    folder = write_raw(tmp_path, two_pieces, [100, 9, 20])
    points = RawNetwork(folder).points()[Mode()]
    assert [point.batch_size for point in points] == [9, 20, 100]
    times = files.read_times(folder / "20" / "data_transfer_time.txt")
    assert points[1].mean_s == pytest.approx(statistics.mean(times))
    assert points[1].median_s == statistics.median(times)
    assert points[1].std_s == pytest.approx(statistics.stdev(times))
    assert points[1].samples == len(times)


def test_modes_have_files_of_their_own(tmp_path):
    for mode in subjects.MODES.values():
        folder = write_raw(tmp_path, two_pieces, [3], mode=mode)
    names = {path.name for path in (folder / "3").iterdir()}
    assert len(names) == len(subjects.MODES) == 20
    assert {"data_transfer_time.txt", "data_transfer_time_d2h_pinned.txt"} <= names
    assert "data_transfer_time_h2d_pageable_float32.txt" in names
    assert list(RawNetwork(folder).points()) == list(subjects.MODES.values())


def test_csv_has_exactly_the_columns(tmp_path):
    points = [
        Point.of(2, Samples([1e-5, 2e-5, 6e-5], [1e-6])),
        Point.of(3, Samples([1e-5])),
    ]
    files.write_csv(tmp_path / "t.csv", points)
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["batch_size", "mean_s", "median_s", "std_s", "samples"]
    assert [float(value) for value in rows[1]] == pytest.approx(
        [2, 3e-5, 2e-5, np.std([1e-5, 2e-5, 6e-5], ddof=1), 3]
    )
    assert rows[2][3] == ""  # one sample has no deviation


def test_samples_added_are_written_after_those_on_disk(folder):
    raw = RawNetwork(folder)
    before = list(raw.samples(Mode(), 2).wall)
    raw.add(Mode(), 2, Samples([1e-3], [2e-3]))
    raw.add(Mode(), 7, Samples([5e-3]))
    assert not (folder / "7").exists()
    raw.flush()
    assert files.read_times(folder / "2" / "data_transfer_time.txt") == [*before, 1e-3]
    assert files.read_times(folder / "2" / "device_transfer_time.txt") == [2e-3]
    assert files.read_times(folder / "7" / "data_transfer_time.txt") == [5e-3]
    assert not (folder / "7" / "device_transfer_time.txt").exists()


def test_a_write_that_fails_leaves_the_file_as_it_was(folder, monkeypatch):
    raw = RawNetwork(folder)
    path = folder / "2" / "data_transfer_time.txt"
    before = path.read_bytes()
    raw.add(Mode(), 2, Samples([1e-3]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cnn_engine.io.files.os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        raw.flush()
    assert path.read_bytes() == before
    monkeypatch.undo()
    raw.flush()  # nothing that was to be written is lost
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ("{", "expected a network's shape and weights as JSON"),
        ("[" * 100_000, "as JSON"),
        ("[]", "schema: expected 1, found list"),
        ('{"schema": 2}', "schema: expected 1, found 2"),
        ('{"schema": 1, "shape": [3, 0, 4]}', "shape: expected three whole numbers"),
        ('{"schema": 1, "shape": [3, 4, 4], "weights": 7}', "weights: expected bytes and tensors"),
        ('{"schema": 1, "shape": [3, 4, 4], "weights": {"bytes": -1, "tensors": 1}}', "weights"),
    ],
)
def test_malformed_descriptions_are_refused(folder, document, found):
    (folder / "network.json").write_text(document)
    with pytest.raises(InputError, match=found):
        RawNetwork(folder).describe()


@pytest.mark.parametrize(
    "document",
    [
        '{"schema": 1, "peak": 7}',
        '{"schema": 1, "peak": {"h2d": {"bytes": 5, "seconds": []}}}',
        '{"schema": 1, "peak": {"h2d": {"bytes": 5, "seconds": [NaN]}}}',
        '{"schema": 1, "peak": {"h2d": 3}}',
        '{"schema": 1, "environment": []}',
        '{"schema": 1, "machines": 3}',
    ],
)
def test_malformed_machines_are_refused(tmp_path, document):
    (tmp_path / "machine.json").write_text(document)
    with pytest.raises(InputError, match="machine.json"):
        files.read_machine(tmp_path)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["5"], [5]),
        (["1-4"], [1, 2, 3, 4]),
        (["1,2,4-8"], [1, 2, 4, 5, 6, 7, 8]),
        (["1-256:5"], list(range(1, 257, 5))),
        (["8", "1-2", "2"], [1, 2, 8]),
        (["3-3"], [3]),
    ],
)
def test_batch_sizes_are_ranges_lists_and_steps(words, sizes):
    assert (
        shared_options.batch_sizes(words, "--batch", subjects.MOST_BATCHES, subjects.LARGEST_BATCH)
        == sizes
    )


@pytest.mark.parametrize(
    "word",
    [
        "",
        "0",
        "5-1",
        "1-",
        "-3",
        "1-5:0",
        "a",
        "1.5",
        "1-99999999",
        "1--2",
        "9999999999",
        "1,,2",
        "\uff11",
    ],
)
def test_other_batch_sizes_are_refused(word):
    with pytest.raises(InputError, match="--batch: expected"):
        shared_options.batch_sizes([word], "--batch", subjects.MOST_BATCHES, subjects.LARGEST_BATCH)


def test_names_become_folders():
    assert subjects.path_safe("NVIDIA H200") == "NVIDIA_H200"
    assert subjects.path_safe("../../etc") == "etc"
    assert subjects.path_safe("..") == "unnamed"
    assert subjects.from_shape("3,224,224").folder == "3x224x224"
    assert subjects.find("3x224x224") == subjects.from_shape("3,224,224")
    one = subjects.Subject("a b", (1, 2, 3))
    with pytest.raises(InputError, match="found 'a b' and 'a/b'"):
        subjects.distinct([one, subjects.Subject("a/b", (1, 2, 3))])
    assert subjects.distinct([one, one]) == [one]


@pytest.mark.parametrize("shape", ["3,224", "3,224,0", "3,2,2,2", "a,b,c", "3,-1,2", "", "3,,2"])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match="--shape: expected C,H,W"):
        subjects.from_shape(shape)


def test_bytes_are_those_of_the_network():
    cifar10 = subjects.find("cifar10")
    assert cifar10.image_bytes("uint8") == 3072
    assert cifar10.image_bytes("float32") == 4 * 3072
    weights = subjects.workload.get("cifar10").network.random_weights()
    assert cifar10.weights == {
        "bytes": sum(array.nbytes for array in weights.values()),
        "tensors": len(weights),
    }
