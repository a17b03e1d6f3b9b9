"""Random numbers by counter: Philox4x32-10, for many counters at once.

A number depends on its key and its counter alone, not on what was drawn before it, so that every process
draws the same for a sample, whichever samples it sees. J. K. Salmon et al., "Parallel Random Numbers: As Easy
as 1, 2, 3", SC'11, 10.1145/2063384.2063405.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Returns four random words for each counter.

    Args:
        counters: uint32 [N, 4].
        key: two numbers of 32 bits.

    Returns:
        uint32 [N, 4].
    """
    x0, x1, x2, x3 = (counters[:, k].astype(np.uint64) for k in range(4))
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0 = (second >> _HALF) ^ x1 ^ np.uint64(k0)
        x2 = (first >> _HALF) ^ x3 ^ np.uint64(k1)
        x1, x3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=1).astype(np.uint32)


def words(samples: np.ndarray, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Returns four random words for each sample: uint32 [N, 4].

    Args:
        samples: their numbers in the data set, [N], each below 2**64.
        seed: below 2**63.
        epoch: below 2**32.
        purpose: what the words are for, so that two purposes do not see the same ones.
    """
    samples = np.asarray(samples, np.uint64)
    counters = np.empty((len(samples), 4), np.uint32)
    counters[:, 0] = samples & _LOW
    counters[:, 1] = samples >> _HALF
    counters[:, 2] = epoch
    counters[:, 3] = purpose
    return philox(counters, (seed & 0xFFFFFFFF, seed >> 32))
