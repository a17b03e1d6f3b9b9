"""How an ensemble's ranks share its work: roles, the pipeline, and the exchange of batches among threads."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import workload
from cnn_engine.ensemble import exchange, pipeline, roles, source
from cnn_engine.ensemble.order import Order
from cnn_engine.errors import InputError
from cnn_engine.io.preprocess import Preprocess

SHARING = (roles.ALL_SHARED, roles.SINGLE, roles.MULTI)


# ---- roles ----


@settings(deadline=None)
@given(
    st.sampled_from(list(roles.DESIGNS)), st.integers(1, 12), st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 12)), st.booleans(),
)  # fmt: skip
def test_every_member_is_somewhere_once_and_somebody_preprocesses(
    design, ranks, count, decoding, dedicated
):
    try:
        found = roles.roles(design, ranks, count, decoding, dedicated)
    except InputError as error:
        assert str(error).startswith(("--preprocessors", "--dedicated"))
        return
    assert len(found.members) == ranks
    assert sorted(m for own in found.members for m in own) == list(range(count))
    assert found.preprocessors
    if dedicated:
        assert not any(found.members[rank] for rank in found.preprocessors)
    if design == roles.NONE:
        assert found.preprocessors == found.receivers
    assert all(found.says(rank) for rank in range(ranks))


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 12))
def test_costly_members_get_more_of_the_ranks(costs, ranks):
    placed = roles.place(costs, ranks, replicate=True)
    assert len(placed) == ranks
    replicas = [sum(m in own for own in placed) for m in range(len(costs))]
    assert min(replicas) >= 1
    if ranks > len(costs):
        assert sum(replicas) == ranks
        loads = [cost / many for cost, many in zip(costs, replicas, strict=True)]
        # No member has so little to do that one of its ranks would serve the slowest better.
        slowest = max(loads)
        for cost, many in zip(costs, replicas, strict=True):
            assert many == 1 or cost / (many - 1) >= slowest - 1e-9
    else:
        assert max(replicas) == 1


# ---- the pipeline and the exchange ----


def numbers_source(samples, shape=(1, 2, 2)):
    images = np.arange(samples * int(np.prod(shape)), dtype=np.int64) % 251
    data = workload.Dataset(
        "numbers", "made", images.astype(np.uint8).reshape(samples, *shape), np.arange(samples) % 10
    )
    return source.ArraySource(data)


class Board:
    """Where ranks that are threads leave their messages: by group, kind and how many came before."""

    def __init__(self, size):
        self.size = size
        self.messages = defaultdict(dict)
        self.groups = [0] * size


class ThreadGroup:
    def __init__(self, board, name, ranks, rank):
        self.board, self.name, self.ranks = board, name, list(ranks)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self.sent = 0

    def _post(self, data, needed, finish):
        key = (self.name, self.sent)
        self.sent += 1
        self.board.messages[key][self.rank] = None if data is None else data.copy()
        done = []

        class Request:
            def done(request):
                found = self.board.messages[key]
                if not done and all(rank in found for rank in needed):
                    finish(found)
                    done.append(True)
                return bool(done)

        return Request()

    def broadcast(self, data, root):
        def finish(found):
            data[...] = found[root]

        return self._post(data if self.rank == root else None, [root], finish)

    def gather(self, part, whole, counts, root):
        def finish(found):
            if self.rank == root:
                whole[...] = np.concatenate([found[rank] for rank in range(self.size)])

        assert len(part) == counts[self.rank]
        return self._post(part, range(self.size) if self.rank == root else [], finish)

    def allgather(self, part, whole, counts):
        def finish(found):
            whole[...] = np.concatenate([found[rank] for rank in range(self.size)])

        assert len(part) == counts[self.rank]
        return self._post(part, range(self.size), finish)


class ThreadTransport:
    def __init__(self, board, rank):
        self.board, self.rank, self.size = board, rank, board.size

    def group(self, ranks):
        name = self.board.groups[self.rank]
        self.board.groups[self.rank] += 1
        if self.rank not in ranks:
            return None
        return ThreadGroup(self.board, name, ranks, self.rank)


def delivered(found, order, rank_source, **options):
    """Returns what each rank was given, all ranks being threads."""
    board = Board(found.ranks)
    got, failures = [[] for _ in range(found.ranks)], []

    def rank_run(rank):
        try:
            groups = exchange.Groups(found, ThreadTransport(board, rank))
            parts = exchange.own_parts(found, rank, order)
            own = None if parts is None else pipeline.Pipeline(rank_source, parts, queue=2)
            running = exchange.Exchange(
                found, rank, order, own, groups, rank_source.shape, **options
            )
            for number, buffer in running:
                got[rank].append((number, buffer.images.copy(), buffer.labels.copy()))
            running.close()
            if own is not None:
                own.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank_run, args=(rank,)) for rank in range(found.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
    return got


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SHARING), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40),
    st.integers(1, 9), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_every_sample_reaches_every_member_once_and_in_order(
    design, ranks, count, samples, batch, epochs, prefetch, decoding, dedicated
):
    broadcasts = design != roles.ALL_SHARED
    try:
        found = roles.roles(
            design, ranks, count, decoding if broadcasts else None, dedicated and broadcasts
        )
    except InputError:
        return
    order = Order(samples, batch, epochs, shuffle=True, seed=3)
    data = numbers_source(samples)
    for rank, got in enumerate(delivered(found, order, data, prefetch=prefetch)):
        if not found.members[rank]:
            assert got == []
            continue
        assert [number for number, _, _ in got] == list(order.numbers)
        for number, images, labels in got:
            wanted = order[number].samples
            assert (images == data.images[wanted]).all()
            assert (labels == data.labels[wanted]).all()


def test_a_pipeline_keeps_the_order_with_many_threads():
    data, order = numbers_source(500), Order(500, 7, shuffle=True)
    made = pipeline.Pipeline(
        data, (order[k].samples for k in order.numbers), queue=5, readers=3, decoders=4
    )
    for number, buffer in zip(order.numbers, made, strict=True):
        assert (buffer.labels == data.labels[order[number].samples]).all()
    made.close()
    assert made.work.images == 500
    assert made.work.core_s > 0


def broken_source(monkeypatch, *samples):
    found = source.SyntheticJpegs(40, (20, 16), Preprocess(resize=(8, 8)), (3, 8, 8))
    read = found.read
    monkeypatch.setattr(
        found, "read", lambda sample: b"\xff\xd8 none" if sample in samples else read(sample)
    )
    return found


def test_every_decoder_has_a_part_to_work_on(monkeypatch):
    """Eight parts meet in as many threads, though the queue is of two."""
    meeting = threading.Barrier(8, timeout=20)
    found = numbers_source(8)
    decode = found.decode

    def met(sample, encoded, out):
        meeting.wait()
        decode(sample, encoded, out)

    monkeypatch.setattr(found, "decode", met)
    one = pipeline.Pipeline(found, [np.array([k]) for k in range(8)], queue=2, decoders=8)
    assert len(list(one)) == 8
    one.close()


def test_corrupt_images_are_named_and_skipped(monkeypatch):
    made = pipeline.Pipeline(
        broken_source(monkeypatch, 3, 25), iter([np.arange(20), np.arange(20, 40)]), corrupt="skip"
    )
    first, second = made
    made.close()
    assert made.work.corrupt == [3, 25]
    assert "synthetic JPEG 3: expected an image" in made.work.reasons[0]
    assert [*np.flatnonzero(first.labels == source.CORRUPT)] == [3]
    assert [*np.flatnonzero(second.labels == source.CORRUPT)] == [5]
    assert not first.images[3].any()
    assert first.images[4].any()


def test_corrupt_images_end_it_where_that_is_asked_for(monkeypatch):
    made = pipeline.Pipeline(broken_source(monkeypatch, 3), iter([np.arange(20)]))
    with pytest.raises(InputError, match="synthetic JPEG 3: .*--corrupt skip goes on without it"):
        made.take()
    made.close()
