"""Branches: which nodes run is settled while loading."""

from __future__ import annotations

from ....errors import InputError
from . import converts


@converts("If")
def if_(call) -> None:
    """Takes the branch that the condition names; the condition must be known while loading."""
    branches = {True: call.body("then_branch"), False: call.body("else_branch")}
    call.refuse_others()
    condition = call.constant(0, "condition")
    if condition.dtype.kind != "b" or condition.size != 1:
        raise InputError(
            f"condition: expected one bool, found {condition.dtype} {list(condition.shape)}"
        )
    call.inline(branches[bool(condition.reshape(()))])
