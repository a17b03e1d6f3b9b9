"""Assigns roles to ranks: preprocessing, merging, members. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import expected

NONE, ALL_SHARED, SINGLE, MULTI, IN_PROCESS = (
    "none", "all-shared", "single-bcast", "multi-bcast", "in-process",
)  # fmt: skip

#: One model over all ranks, each with its part of every batch: not of ensembles, so not among the designs.
DATA_PARALLEL = "data-parallel"

#: Design -> what it does.
DESIGNS = {
    NONE: "every member reads and decodes for itself",
    ALL_SHARED: "all ranks decode an equal part of each batch and gather all parts",
    SINGLE: "P ranks decode parts of each batch, one merges and broadcasts them",
    MULTI: "P ranks decode whole batches in turn, each broadcasts its own",
    IN_PROCESS: "all members in one process read one buffer: nothing is sent",
}


@dataclass(frozen=True)
class Roles:
    """Attributes:
    design: of :data:`DESIGNS`.
    ranks: how many.
    preprocessors: ranks that read and decode.
    members: of each rank, the numbers of the members that it runs.
    """

    design: str
    ranks: int
    preprocessors: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def merger(self) -> int | None:
        """Rank that gathers the parts and broadcasts them, or None."""
        return self.preprocessors[0] if self.design == SINGLE else None

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that have members."""
        return tuple(rank for rank, own in enumerate(self.members) if own)

    @property
    def shares(self) -> bool:
        """Whether ranks send samples to each other."""
        return self.design in (ALL_SHARED, SINGLE, MULTI)

    def replicas(self, member: int) -> tuple[int, ...]:
        """Ranks that run ``member``."""
        return tuple(rank for rank, own in enumerate(self.members) if member in own)

    def says(self, rank: int, names: Sequence[str] = ()) -> str:
        """Returns a rank's role in a few words."""
        words = []
        if rank in self.preprocessors:
            many = self.design == NONE and len(self.members[rank]) > 1
            words.append("preprocesses for each of its members" if many else "preprocesses")
        if rank == self.merger:
            words.append("merges")
        if own := self.members[rank]:
            named = [f"{m} ({names[m]})" if names else str(m) for m in own]
            words.append(f"member{'s' if len(own) > 1 else ''} {', '.join(named)}")
        return "; ".join(words) or "idle"


def roles(
    design: str,
    ranks: int,
    members: int,
    preprocessors: int | None = None,
    dedicated: bool = False,
    costs: Sequence[float] | None = None,
    replicate: bool = False,
) -> Roles:
    """Returns the roles of all ranks.

    Args:
        design: of :data:`DESIGNS`.
        ranks, members: how many.
        preprocessors: P of the broadcasting designs; None: half of the ranks.
        dedicated: preprocessors have no members.
        costs: of each member, seconds per batch; None: all equal.
        replicate: give ranks that would have none to the members that cost most, in proportion.

    Raises:
        InputError: the numbers do not fit each other.
    """
    if design == DATA_PARALLEL:
        return Roles(design, ranks, tuple(range(ranks)), ((0,),) * ranks)
    if design not in DESIGNS:
        raise expected("--design", f"one of {', '.join(DESIGNS)}", repr(design))
    broadcasts = design in (SINGLE, MULTI)
    for option, given in (
        ("--preprocessors", preprocessors is not None),
        ("--dedicated", dedicated),
    ):
        if given and not broadcasts:
            raise expected(option, f"the design {SINGLE} or {MULTI}", design)
    if design == IN_PROCESS:
        return Roles(design, ranks, (0,), (tuple(range(members)), *[()] * (ranks - 1)))
    most = ranks - 1 if dedicated else ranks
    if dedicated and ranks < 2:
        raise expected("--dedicated", "at least two ranks (mpirun -n 2)", "one")
    decoding = min(max(ranks // 2, 1), most) if preprocessors is None else preprocessors
    if broadcasts and decoding > most:
        raise expected("--preprocessors", f"at most {most} of {ranks} ranks", decoding)
    first = decoding if dedicated else 0
    placed = place([1.0] * members if costs is None else costs, ranks - first, replicate)
    own = ((),) * first + placed
    if design == NONE:
        working = tuple(rank for rank, some in enumerate(own) if some)
    else:
        working = tuple(range(decoding if broadcasts else ranks))
    return Roles(design, ranks, working, own)


def place(
    costs: Sequence[float], ranks: int, replicate: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Returns the members of each of ``ranks``: the costliest first, each to the rank with the least to do.

    Args:
        costs: of each member.
        replicate: ranks beyond the members' number are given to members in proportion to cost: the next to
            the one whose replicas have most to do each.
    """
    members = range(len(costs))
    if len(costs) >= ranks or not replicate:
        load = [0.0] * ranks
        found: list[list[int]] = [[] for _ in range(ranks)]
        for member in sorted(members, key=lambda m: (-costs[m], m)):
            rank = min(range(ranks), key=lambda r: (load[r], len(found[r]), r))
            load[rank] += costs[member]
            found[rank].append(member)
        return tuple(tuple(sorted(own)) for own in found)
    replicas = [1] * len(costs)
    for _ in range(ranks - len(costs)):
        replicas[max(members, key=lambda m: (costs[m] / replicas[m], -m))] += 1
    return tuple((member,) for member in members for _ in range(replicas[member]))
