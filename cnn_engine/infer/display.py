"""Progress of a run: a bar on a terminal, lines elsewhere, and a file for Prometheus."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from time import monotonic
from typing import Any

from .. import cli
from ..errors import InputError, printable
from ..io.files import describe_os_error
from ..report import units
from . import packages

#: Seconds between lines where there is no terminal, between updates of a bar, and of the metrics' file.
LINE_S, BAR_S, METRICS_S = 10.0, 0.25, 2.0


@dataclass(frozen=True)
class State:
    """State of the display.

    Attributes:
        shards, shards_done: of this command's part, those that were done before included.
        images: done by this command so far; ``total`` how many it is to do, None where not known.
        fraction: of the work that this command has done, from 0 to 1, by bytes where images are not known.
        rate: images/s over the last seconds, without bad ones.
        bound_by: the stage that is at work most of the time, or None.
    """

    shards: int
    shards_done: int
    images: int
    total: int | None
    fraction: float
    rate: float | None
    eta_s: float | None
    errors: int
    retries: int
    set_aside: int
    workers: int
    bound_by: str | None
    peak_bytes: int

    def line(self) -> str:
        """Returns the state as one line."""
        of = "" if self.total is None else f" of {units.count(self.total)}"
        words = [
            f"{units.count(self.images)}{of} images ({units.percent(self.fraction)})",
            "-" if self.rate is None else f"{units.number(self.rate)} images/s",
            f"{units.count(self.shards_done)} of {units.counted(self.shards, 'shard')}",
        ]
        if self.eta_s is not None:
            words.append(f"{duration(self.eta_s)} left")
        if self.errors:
            words.append(f"{units.counted(self.errors, 'bad image')}")
        if self.retries:
            words.append(f"{units.counted(self.retries, 'retry', 'retries')}")
        if self.set_aside:
            words.append(f"{units.counted(self.set_aside, 'shard')} set aside")
        if self.bound_by:
            words.append(f"bound by {self.bound_by}")
        return ", ".join(words)


def duration(seconds: float) -> str:
    """Returns a time as people say it: ``1:02:03``, ``2:03``, ``9 s``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display:
    """Shows states on standard error: as a bar where that is a terminal, else a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet or sys.stderr is None
        self._terminal = not self._quiet and sys.stderr.isatty()
        self._last = monotonic()
        self._bar: Any = None
        self._task: Any = None

    def show(self, state: State) -> None:
        """Shows ``state``, unless the last one was shown a moment ago."""
        now = monotonic()
        if self._quiet or now - self._last < (BAR_S if self._terminal else LINE_S):
            return
        self._last = now
        if not self._terminal:
            cli.show(state.line(), sys.stderr)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(30), TextColumn("{task.description}", markup=False), console=Console(stderr=True),
                auto_refresh=False, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        self._bar.update(self._task, completed=state.fraction, description=printable(state.line()))
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        if not self._quiet:
            if self._bar is not None:
                self._bar.console.print(printable(text), markup=False, highlight=False)
            else:
                cli.show(text, sys.stderr)

    def stop(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Metrics:
    """Writes states in Prometheus' text format, for its node exporter's textfile collector.

    Raises:
        UnsupportedError: prometheus-client is not installed.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self._last = path, 0.0
        if path is None:
            return
        client = packages.need("prometheus_client", "prometheus-client", "for --metrics")
        self._client = client
        self._registry = client.CollectorRegistry()

        def gauge(name: str, what: str) -> Any:
            return client.Gauge(f"cnn_engine_infer_{name}", what, registry=self._registry)

        self._gauges = {
            "images": gauge("images", "Images done by this command"),
            "rate": gauge(
                "images_per_second", "Images per second over the last seconds, without bad ones"
            ),
            "fraction": gauge("progress_ratio", "Share of the work that is done"),
            "eta_s": gauge("remaining_seconds", "Expected time to the end"),
            "errors": gauge("bad_images", "Images with an error in their row"),
            "retries": gauge("retries", "Attempts that were repeated"),
            "set_aside": gauge("shards_set_aside", "Shards that could not be done"),
            "shards": gauge("shards", "Shards of this command"),
            "shards_done": gauge("shards_done", "Shards that are done"),
            "workers": gauge("workers", "Workers"),
            "peak_bytes": gauge("worker_peak_bytes", "Largest peak of a worker's resident memory"),
        }
        self._stage = client.Gauge(
            "cnn_engine_infer_stage_seconds",
            "Seconds that a stage was at work, over all workers",
            ["stage"],
            registry=self._registry,
        )

    def write(self, state: State, stages: dict[str, dict[str, float]], now: bool = False) -> None:
        """Writes ``state``, unless the last one was written a moment ago; ``now`` writes in any case.

        Raises:
            InputError: the file cannot be written.
        """
        if self._path is None or (not now and monotonic() - self._last < METRICS_S):
            return
        self._last = monotonic()
        for name, metric in self._gauges.items():
            value = getattr(state, name)
            metric.set(float("nan") if value is None else value)
        for name, stage in stages.items():
            self._stage.labels(name).set(stage["seconds"])
        try:
            self._client.write_to_textfile(os.fspath(self._path), self._registry)
        except OSError as error:
            raise InputError(
                f"--metrics: cannot write {self._path}: {describe_os_error(error)}"
            ) from error
