"""Waiting for an MPI request without spinning on a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Tests before the first sleep, about 0.2 ms. Measured: two ranks that answer one another's calls meet within it;
#: with a third of it most waits ended in a sleep and a one-element allreduce took 1.4 times as long.
EAGER_TESTS = 300
FIRST_SLEEP_S = 50e-6
#: Waiting for a rank may take for ever: sleep up to this between two tests.
LONGEST_SLEEP_S = 1e-3
#: While data flows the transport moves only inside a test: sleep no longer than this.
LONGEST_TRANSFER_SLEEP_S = 100e-6


def complete(
    request: Any, on_wait: Callable[[], None] | None = None, longest_sleep_s: float = LONGEST_SLEEP_S
) -> None:
    """Wait for an MPI request: a burst of tests, then sleeps that grow to ``longest_sleep_s``.

    ``on_wait`` is called after every sleep; what it raises ends the wait and leaves the request behind.
    """
    test = request.Test
    for _ in range(EAGER_TESTS):
        if test():
            return
    sleep_s = FIRST_SLEEP_S
    while not request.Test():
        time.sleep(sleep_s)
        sleep_s = min(longest_sleep_s, sleep_s * 1.2)
        if on_wait:
            on_wait()
