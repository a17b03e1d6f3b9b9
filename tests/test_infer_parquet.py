"""The files of rows, written past Arrow and read by it, by Polars and by DuckDB."""

from __future__ import annotations

import numpy as np
import pytest

from cnn_engine.infer import output, parquet, readers, thrift

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def listed(count: int, rng: np.random.Generator) -> list[str]:
    return ["é" * int(rng.integers(0, 600)) + str(at) for at in range(count)]


@pytest.mark.parametrize("top", [None, 1, 3])
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("group_bytes", [200, output.GROUP_BYTES])
@pytest.mark.parametrize("seed", range(4))
def test_what_was_written_is_read(tmp_path, monkeypatch, seed, group_bytes, numbered, top):
    monkeypatch.setattr(output, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(output, "LEAST_ROWS", 5)
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(3, 12))
    file = output.ShardFile(tmp_path, tmp_path / "t", "s", "run", classes, top)
    ids, rows, labels, errors = [], [], [], []
    for part in range(6):
        count = int(rng.integers(1, 700))
        numbers = rng.random((count, classes), np.float32)
        if numbered:
            first = int(rng.integers(0, 20_000))
            given = readers.numbered("ü", first, count)
            ids += [f"ü#{number}" for number in range(first, first + count)]
        else:
            given = listed(count, rng)
            ids += given
        some = rng.integers(-2, 2**40, count)
        given_labels, shown = [
            (None, [None] * count),
            (some, [int(x) if x >= 0 else None for x in some]),
            ([-(2**63), *[None] * (count - 1)], [-(2**63), *[None] * (count - 1)]),
            ([7] * count, [7] * count),
        ][(part + seed) % 4]
        labels += shown
        bad = {int(at): f"bäd {at}" for at in rng.integers(0, count, seed)}
        if part == 5 and seed == 3:
            bad = dict.fromkeys(range(count), "all")
        errors += [bad.get(at) for at in range(count)]
        shown = numbers if top is None else -np.sort(-numbers)[:, :top]
        rows += [None if at in bad else shown[at].tolist() for at in range(count)]
        file.add(given, numbers, given_labels, bad)
        numbers[:] = -1  # the next chunk's
    record = file.commit()
    path = tmp_path / "s.parquet"
    assert output.verify(path) is None
    assert record == output.inspect(path, "s", "run")
    assert record == output.Record(
        len(ids), sum(x is not None for x in errors), path.stat().st_size
    )
    table = pq.read_table(path, page_checksum_verification=True)
    table.validate(full=True)
    assert table.schema.equals(output.schema(classes, top))
    column = "probabilities" if top is None else "top_probabilities"
    wanted = {"id": ids, column: rows, "label": labels, "error": errors}
    assert {name: table[name].to_pylist() for name in wanted} == wanted
    if top is not None:
        for classes_on_top, row in zip(table["top_classes"].to_pylist(), rows, strict=True):
            assert (classes_on_top is None) == (row is None)
    check_statistics(path, ids, labels)
    check_elsewhere(path, wanted)


def check_statistics(path, ids, labels):
    metadata, at = pq.ParquetFile(path).metadata, 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        end = at + group.num_rows
        found = group.column(0).statistics
        words = [name.encode() for name in ids[at:end]]
        assert (found.min.encode(), found.max.encode()) == (min(words), max(words))
        known = [label for label in labels[at:end] if label is not None]
        found = group.column(metadata.num_columns - 2).statistics
        assert found.null_count == group.num_rows - len(known)
        assert not known or (found.min, found.max) == (min(known), max(known))
        at = end
    assert at == len(ids)


def check_elsewhere(path, wanted):
    """Readers that are other programs, where they are installed."""
    names = ", ".join(wanted)
    for module in ("polars", "duckdb"):
        try:
            reader = __import__(module)
        except ImportError:
            continue
        if module == "polars":
            found = reader.read_parquet(path)
            assert {name: found[name].to_list() for name in wanted} == wanted
        else:
            rows = reader.sql(f"select {names} from '{path}'").fetchall()
            columns = [
                [list(x) if isinstance(x, tuple) else x for x in c] for c in zip(*rows, strict=True)
            ]
            assert dict(zip(wanted, columns, strict=True)) == wanted


def test_numbers_that_differ_by_much_are_packed(tmp_path):
    """Lengths whose differences take 8, 16 and 32 bits, in whole blocks and in parts of them."""
    for count in (1, 2, 32, 33, 128, 129, 130, 161, 1000):
        for most in (1, 200, 40_000, 70_000):
            rng = np.random.default_rng(count)
            ids = ["x" * int(length) for length in rng.integers(0, most, count)]
            ids[count // 2] = "x" * most
            name = f"{count}-{most}"
            file = output.ShardFile(tmp_path, tmp_path / "t", name, "run", 1, None)
            file.add(ids, np.zeros((count, 1), np.float32), None, {})
            file.commit()
            assert pq.read_table(tmp_path / f"{name}.parquet")["id"].to_pylist() == ids


def test_a_shard_without_rows_is_a_table_without_rows(tmp_path):
    file = output.ShardFile(tmp_path, tmp_path / "t", "s", "run", 3, None)
    file.add([], np.zeros((0, 3), np.float32), [], {})
    assert file.commit().rows == 0
    table = pq.read_table(tmp_path / "s.parquet")
    assert (len(table), table.schema.equals(output.schema(3, None))) == (0, True)


def test_a_changed_byte_of_a_page_is_seen(tmp_path):
    file = output.ShardFile(tmp_path, tmp_path / "t", "s", "run", 4, None)
    file.add(
        readers.numbered("a", 0, 300), np.ones((300, 4), np.float32), np.arange(300), {7: "bad"}
    )
    file.commit()
    path = tmp_path / "s.parquet"
    data = path.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    pages = pq.ParquetFile(path).metadata.row_group(0)
    for column in range(4):
        chunk = pages.column(column)
        end = chunk.data_page_offset + chunk.total_compressed_size
        assert end <= len(data) - footer
        broken = bytearray(data)
        broken[end - 1] ^= 1
        path.write_bytes(broken)
        assert output.verify(path) is not None


def test_what_the_file_system_takes_in_parts_is_written_whole(tmp_path, monkeypatch):
    whole = parquet.os.writev
    monkeypatch.setattr(
        parquet.os, "writev", lambda to, parts: whole(to, [memoryview(parts[0])[:7]])
    )
    file = output.ShardFile(tmp_path, tmp_path / "t", "s", "run", 3, None)
    rows = np.random.default_rng(0).random((500, 3), np.float32)
    file.add([str(at) for at in range(500)], rows, None, {})
    file.commit()
    found = pq.read_table(tmp_path / "s.parquet")["probabilities"].to_pylist()
    assert found == rows.tolist()


@pytest.mark.parametrize("value", [0, 1, -1, 63, 64, -64, -65, 2**31, -(2**63), 2**63 - 1])
def test_numbers_of_thrift(value):
    data, found, shift = thrift.number(value), 0, 0
    for byte in data:
        found |= (byte & 127) << shift
        shift += 7
    assert [byte >> 7 for byte in data] == [1] * (len(data) - 1) + [0]
    assert (found >> 1) ^ -(found & 1) == value
