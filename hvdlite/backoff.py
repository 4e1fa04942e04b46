"""Waiting for an MPI request without spinning on a core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: Tests before the first sleep, about 0.2 ms. Measured: two ranks that answer one another's calls meet within it;
#: with a third of it most waits ended in a sleep and a one-element allreduce took 1.4 times as long.
EAGER_TESTS = 300
#: Tests before other ranks may have the core. Measured: 4 ranks on 2 cores answer one another in a fifth of the time.
TESTS_A_TURN = 20
#: After this long without progress the burst is left out. Chosen.
EAGER_FOR_S = 5e-3
#: The sleep between two tests is this share of the time waited so far, which it makes at most so much longer.
SLEEP_SHARE = 0.01
FIRST_SLEEP_S = 50e-6
#: Waiting for a rank may take for ever. Measured: a rank that waits 5 s for another uses 2.3 % of a core
#: (tools/bench_runtime.py); with half of this 3.1 %.
LONGEST_SLEEP_S = 20e-3
#: While data flows the transport moves only inside a test: sleep no longer than this.
LONGEST_TRANSFER_SLEEP_S = 100e-6


#: Where the system has none, ranks that share a core wait for its time slices.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def sleep_s(waited_s: float, longest_s: float = LONGEST_SLEEP_S) -> float:
    """How long to sleep until the next look, after having waited ``waited_s`` in all."""
    return min(longest_s, max(FIRST_SLEEP_S, SLEEP_SHARE * waited_s))


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def complete(
    request: Any, pause: Callable[[float], bool] = _sleep, waited_s: float = 0.0, longest_s: float = LONGEST_SLEEP_S
) -> None:
    """Wait for an MPI request: a burst of tests, then sleeps that grow to ``longest_s``.

    ``pause`` sleeps, and tells whether something happened that makes another burst worth it; what it raises ends the
    wait and leaves the request behind. ``waited_s``: how long the caller has waited already.
    """
    test = request.Test
    if test() or (waited_s < EAGER_FOR_S and _burst(test)):
        return
    since_s = time.monotonic() - waited_s
    while not test():
        if pause(sleep_s(time.monotonic() - since_s, longest_s)) and _burst(test):
            return


def _burst(test: Callable[[], bool]) -> bool:
    """Many tests; tell whether one succeeded. Between some of them another rank may have the core, where cores are shared."""
    for _ in range(EAGER_TESTS // TESTS_A_TURN):
        for _ in range(TESTS_A_TURN):
            if test():
                return True
        _give_way()
    return False
