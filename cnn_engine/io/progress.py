"""A progress bar on a terminal, drawn between passes, never within timed work."""

from __future__ import annotations

import sys
from time import perf_counter

from ..errors import printable

DELAY_S = 1.0
INTERVAL_S = 0.1


class Progress:
    """Shows how many images are done once a run has taken more than a second, if stderr is a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._begin = perf_counter()
        self._last = 0.0
        self._bar = None
        self._task = None
        self._what, self._total, self._done = "", 0, 0

    def start(self, what: str, images: int) -> None:
        """Begins a new part of the run over ``images`` images."""
        self._what, self._total, self._done = what, images, 0
        self._task = None

    def advance(self, images: int) -> None:
        """Counts ``images`` more as done."""
        self._done += images
        if not self._terminal:
            return
        now = perf_counter()
        if now - self._begin < DELAY_S or now - self._last < INTERVAL_S:
            return
        self._last = now
        if self._bar is None:
            self._bar = self._new_bar()
        if self._task is None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(f"timing {printable(self._what)}", total=self._total)
        self._bar.update(self._task, completed=self._done)
        self._bar.refresh()

    def stop(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @staticmethod
    def _new_bar():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("images"), TimeRemainingColumn(), console=Console(stderr=True),
            auto_refresh=False,  # no thread of its own beside what is timed
            transient=True,
        )  # fmt: skip
        bar.start()
        return bar
