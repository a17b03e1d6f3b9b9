"""Plans that wait for their next pass: how many are kept, without an engine and without memory."""

from __future__ import annotations

import pytest

from cnn_engine.engine.pool import KEPT_SHELVES, PlanPool
from cnn_engine.errors import InputError


class FakePlan:
    """As far as a pool knows a plan: bytes, and a pass during which something may happen."""

    def __init__(self, nbytes: int, inside=lambda: None) -> None:
        self.nbytes = {"cpu": nbytes}
        self.inside = inside

    def bind(self, images: int, probabilities: int) -> None:
        """Takes any address."""

    def run(self) -> None:
        self.inside()


def calls_at_once(pool: PlanPool, count: int, nbytes: int, keep: bool = False) -> list[FakePlan]:
    """Runs ``count`` calls that are alike, each inside of the one before; returns the plans they made."""
    made: list[FakePlan] = []

    def call(left: int) -> None:
        def make() -> FakePlan:
            made.append(FakePlan(nbytes))
            return made[-1]

        if left:
            shelf, plan = pool.take("key", make, keep)
            plan.inside = lambda: call(left - 1)
            shelf.run(0, 0, plan)
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


def test_a_plan_whose_pass_failed_does_not_wait():
    pool = PlanPool()

    def fail() -> None:
        raise RuntimeError("as it must")

    with pytest.raises(RuntimeError):
        pool.run("key", lambda: FakePlan(1000, fail), 0, 0)
    assert pool.nbytes == 0
    pool.run("key", lambda: FakePlan(1000), 0, 0)
    assert pool.nbytes == 1000


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
