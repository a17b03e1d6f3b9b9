"""Plans that wait for their next pass: how many are kept, and which are used again."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import resnet

from cnn_engine import Engine
from cnn_engine.engine.plan_cache import KEPT_SHELVES, Arena, PlanPool
from cnn_engine.errors import InputError
from cnn_engine.plan.plan import Plan


class FakePlan:
    """As far as a pool knows a plan: bytes, and a pass during which something may happen."""

    arena, calls = None, ()

    def __init__(self, nbytes: int, inside=lambda: None) -> None:
        self.nbytes = {"cpu": nbytes}
        self.inside = inside

    def bind(self, images: int, probabilities: int) -> None:
        """Takes any address."""

    def abandon(self) -> None:
        """Has no device."""

    def run(self) -> None:
        self.inside()


def calls_at_once(pool: PlanPool, count: int, nbytes: int) -> list[FakePlan]:
    """Runs ``count`` calls that are alike, each inside of the one before; returns the plans they made."""
    made: list[FakePlan] = []

    def call(left: int) -> None:
        def make() -> FakePlan:
            made.append(FakePlan(nbytes))
            return made[-1]

        if left:
            shelf, plan = pool.take("key", make)
            plan.inside = lambda: call(left - 1)
            shelf.run(0, 0, plan=plan)
            plan.inside = lambda: None

    call(count)
    return made


@pytest.mark.parametrize(("calls", "kept"), [(1, 1), (3, 3), (4, 4), (6, 4)])
def test_as_many_plans_wait_as_the_bytes_allow(calls, kept):
    """So that threads which call again and again do not build again and again."""
    pool = PlanPool(kept_bytes=4000)
    assert len(calls_at_once(pool, calls, 1000)) == calls
    assert pool.nbytes == kept * 1000
    assert len(calls_at_once(pool, calls, 1000)) == calls - kept


def test_a_plan_larger_than_all_that_is_kept_waits_alone():
    pool = PlanPool(kept_bytes=4000)
    calls_at_once(pool, 3, 9000)
    assert pool.nbytes == 9000


def test_plans_of_one_call_are_kept_together():
    """A call of 256 images in passes of 185 and 71 would build both again each time."""
    pool, made = PlanPool(kept_bytes=4000), []

    def make(nbytes: int) -> FakePlan:
        made.append(nbytes)
        return FakePlan(nbytes)

    def call(**sizes: int) -> None:
        for key, nbytes in sizes.items():
            pool.run(key, lambda nbytes=nbytes: make(nbytes), 0, 0, call=sizes)

    call(other=900)
    for _ in range(3):
        call(most=9000, rest=4000)
    assert made == [900, 9000, 4000]
    assert pool.nbytes == 13000, "and nothing beside them"
    call(small=100)
    assert pool.nbytes <= 4000, "the next call's plans are bound again"
    for _ in range(3):
        call(most=9000, rest=4000)
    assert made == [900, 9000, 4000, 100, 9000, 4000]


@pytest.mark.parametrize("seed", range(5))
def test_plans_of_all_sizes_together_keep_to_the_bytes(seed):
    """But for the plan of the last call, when that alone is larger."""
    sizes, pool = (
        np.random.default_rng(seed).integers(1, 6000, 200).tolist(),
        PlanPool(kept_bytes=4000),
    )
    for size in sizes:
        pool.run(size, lambda size=size: FakePlan(size), 0, 0)
        assert pool.nbytes <= max(4000, size)


def test_shared_memory_of_nothing():
    arena = Arena(0)
    arena.begin()
    assert [arena.allocate(nbytes).nbytes for nbytes in (0, 8, 0)] == [0, 8, 0]


def test_a_plan_whose_pass_failed_does_not_wait():
    pool = PlanPool()

    def fail() -> None:
        raise RuntimeError("as it must")

    with pytest.raises(RuntimeError):
        pool.run("key", lambda: FakePlan(1000, fail), 0, 0)
    assert pool.nbytes == 0
    pool.run("key", lambda: FakePlan(1000), 0, 0)
    assert pool.nbytes == 1000


@pytest.mark.parametrize("call", ["predict", "run"])
@pytest.mark.parametrize("where", ["bind", "run"])
def test_a_plan_is_not_used_again_after_a_pass_that_failed(monkeypatch, call, where):
    """Threads of the failed pass may still write its memory; the next call has a plan of its own."""
    graph = resnet((1,), (1, 3, 16, 16), width=4)
    images = np.ones((2, 3, 16, 16), np.float32)
    used, real = [], getattr(Plan, where)

    def failing(plan, *arguments):
        used.append(plan)
        if len(used) == 2:
            raise RuntimeError("as it must")
        return real(plan, *arguments)

    with Engine(graph, device="cpu", threads=1) as engine:
        run = engine.predict if call == "predict" else lambda x: engine.run({"images": x})
        monkeypatch.setattr(Plan, where, failing)
        wanted = run(images)
        with pytest.raises(RuntimeError, match="as it must"):
            run(images)
        assert used[1] is used[0]
        found = run(images)
        assert used[2] is not used[1]
        np.testing.assert_equal(found, wanted)
        run(images)
        assert used[3] is used[2]
        assert engine._plans.pool.nbytes == sum(used[2].nbytes.values())


def test_memory_is_looked_for_among_idle_plans_before_a_call_is_refused():
    pool = PlanPool(kept_bytes=10_000)
    pool.run("small", lambda: FakePlan(1000), 0, 0)
    tries = []

    def make() -> FakePlan:
        tries.append(pool.nbytes)
        if pool.nbytes:
            raise InputError("no memory")
        return FakePlan(5000)

    pool.run("large", make, 0, 0)
    assert tries == [1000, 0]
    with pytest.raises(InputError, match="no memory"):
        pool.run("larger", lambda: (_ for _ in ()).throw(InputError("no memory")), 0, 0)


def test_kinds_of_calls_are_forgotten_though_their_plans_have_no_memory():
    made = []

    def make() -> FakePlan:
        made.append(FakePlan(0))
        return made[-1]

    pool = PlanPool()
    for key in range(KEPT_SHELVES + 100):
        pool.run(key, make, 0, 0)
    assert len(made) == KEPT_SHELVES + 100
    pool.run(KEPT_SHELVES + 99, make, 0, 0)
    assert len(made) == KEPT_SHELVES + 100, "the last is kept"
    for key in range(KEPT_SHELVES + 100):
        pool.run(key, make, 0, 0)
    assert len(made) >= KEPT_SHELVES + 200, "of the others at least as many as are too many are not"
