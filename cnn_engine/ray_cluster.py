"""A Ray cluster, or an instance of Ray on this machine: for commands with ``--engine ray``."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import cli
from .devices import threads
from .errors import InputError


@contextmanager
def _our_signals() -> Iterator[None]:
    """Keeps what this command answers signals with, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def connect(address: str | None, workers: int | None = None) -> Any:
    """Returns ``ray``, connected: to a cluster, or to an instance that ends with this process.

    Raises:
        InputError: there is no cluster at ``address``.
        UnsupportedError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else a call that comes when Ray has been shut down starts another instance, and waits for it.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Of an instance of our own: Ray's 15 would let all else on this machine go before them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's processes inherit it: that is where they find the package, installed or not.
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    ray = cli.need("--engine", "ray", "ray", "for ray", "cnn-engine[ray]")
    if ray.is_initialized():
        return ray
    logging.getLogger("ray").setLevel(logging.ERROR)  # its notes at every start
    local = {"num_cpus": max(threads.default(), workers or 1), "include_dashboard": False}
    try:
        with _our_signals():
            ray.init(
                address or "local", log_to_driver=False, configure_logging=False,
                **({} if address else local),
            )  # fmt: skip
    except Exception as error:  # plain ones too, where its own processes do not start in time
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"--address: expected a Ray cluster, found: {reason[0]}") from error
    return ray


def disconnect() -> None:
    """Leaves the cluster, or ends the instance that :func:`connect` started."""
    cli.need("--engine", "ray", "ray", "for ray", "cnn-engine[ray]").shutdown()


def cluster_workers(address: str | None, cuda: bool) -> int:
    """Returns how many workers a cluster has room for: one per GPU, else one per CPU."""
    resources = connect(address).cluster_resources()
    return max(int(resources.get("GPU" if cuda else "CPU", 1)), 1)


def died_of(error: Exception) -> str:
    """Returns the part of Ray's message that says why an actor has ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "cause:" in line.lower() or "died" in line.lower():
            return line[:300]
    return lines[0][:300] if lines else type(error).__name__
