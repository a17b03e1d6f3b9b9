"""The GPU that is here, as a target, for tests of what kernels require of it and decide by it."""

from __future__ import annotations

import pytest

from cnn_engine.devices import cuda_module
from cnn_engine.target import Requires, Target


def here() -> Target:
    return cuda_module.target(0)


def need(requires: Requires) -> None:
    """Skips a test where this GPU lacks what a kernel requires."""
    if (reason := requires.why_not(here())) is not None:
        pytest.skip(reason)


def native() -> object:
    """Returns this GPU as compiled functions take it."""
    return here().native
