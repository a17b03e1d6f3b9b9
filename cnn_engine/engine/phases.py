"""Wall time of an engine's phases: creation, loading, first pass, closing."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Phases:
    """Seconds of each phase of a run; None for a phase that did not take place.

    ``forward_s`` is the wall time of one forward pass over all images, copies included, in the run that
    does not time layers; ``total_s`` is the sum of the other phases.
    """

    load_data_s: float | None = None
    create_network_s: float | None = None
    load_parameters_s: float | None = None
    create_outputs_s: float | None = None
    forward_s: float | None = None
    accuracy_s: float | None = None
    free_memory_s: float | None = None

    @property
    def total_s(self) -> float:
        return sum(seconds for seconds in asdict(self).values() if seconds is not None)
