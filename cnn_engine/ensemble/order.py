"""Order of samples: an epoch's permutation, its batches, and each rank's part of a batch.

Pure arithmetic on the numbers that every rank knows, so that no rank has to tell another what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .philox import words

_SHUFFLE = 0  # purposes of random words
AUGMENT = 1


@lru_cache(maxsize=2)
def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the numbers below ``samples`` in the random order of an epoch: int64, read-only."""
    drawn = words(np.arange(samples), seed, epoch, _SHUFFLE)
    keys = drawn[:, 0].astype(np.uint64) << np.uint64(32) | drawn[:, 1]
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def split(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns the ``parts`` ranges [begin, end) that ``range(length)`` is cut into, the longer ones first."""
    base, longer = divmod(length, parts)
    ends = [(k + 1) * base + min(k + 1, longer) for k in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class Batch:
    """The samples of one step: ``number`` counts through all epochs."""

    number: int
    epoch: int
    samples: np.ndarray
    first: int  # of the samples, in the epoch's order

    def __len__(self) -> int:
        return len(self.samples)

    def part(self, index: int, parts: int) -> Batch:
        """Returns the part ``index`` of ``parts``."""
        begin, end = split(len(self), parts)[index]
        return Batch(self.number, self.epoch, self.samples[begin:end], self.first + begin)


@dataclass(frozen=True)
class Order:
    """The batches of a run, from ``start`` on.

    Attributes:
        samples: in the data set.
        batch: samples per batch; the last one of an epoch has what is left.
        epochs: times through the samples.
        shuffle: in a random order, another one each epoch.
        seed: of the order.
        steps: the most batches in all, or None.
        start: batches that are left out at the beginning, since they were done before.
    """

    samples: int
    batch: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    steps: int | None = None
    start: int = 0

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def end(self) -> int:
        """One more than the last batch's number."""
        total = self.epochs * self.batches_per_epoch
        return total if self.steps is None else min(total, self.steps)

    def __len__(self) -> int:
        return max(self.end - self.start, 0)

    def __getitem__(self, number: int) -> Batch:
        """Returns the batch of that ``number``, counted from the run's first, ``start`` or not."""
        if not 0 <= number < self.end:
            raise IndexError(number)
        epoch, inside = divmod(number, self.batches_per_epoch)
        first = inside * self.batch
        last = min(first + self.batch, self.samples)
        if self.shuffle:
            samples = permutation(self.samples, self.seed, epoch)[first:last]
        else:
            samples = np.arange(first, last)
        return Batch(number, epoch, samples, first)

    @property
    def numbers(self) -> range:
        return range(self.start, max(self.end, self.start))

    @property
    def images(self) -> int:
        """Samples of all batches from ``start`` on."""
        return sum(self._length(number) for number in self.numbers)

    def _length(self, number: int) -> int:
        first = number % self.batches_per_epoch * self.batch
        return min(self.batch, self.samples - first)
