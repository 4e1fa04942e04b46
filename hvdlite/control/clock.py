"""What ranks tell each other about their clocks and links. Every rank calls these at the same agreed point.

*Source*: the round trip as NTP uses it (Mills, RFC 5905, section 8); of several the shortest, which queues least.
"""

from __future__ import annotations

import time

import numpy as np

from hvdlite.control.base import ControlPlane
from hvdlite.timeline.clock import Reading, best_reading

#: Pings to each rank. Chosen: some ten find a quiet moment, and 100 ranks take less than 0.1 s.
NUM_PINGS = 12
#: Bytes of the link's test transfers, and the ns from which a transfer is the last one: the first one also opens the
#: connection, the third is for links that the second says little about. Chosen.
_REPEATS = 3
PROBE_BYTES, ENOUGH_NS = (1 << 20, 1 << 20, 8 << 20), (500_000_000, 50_000_000, 0)


def compare_clocks(control: ControlPlane) -> Reading:
    """Return this rank's time and rank 0's at one moment."""
    topology = control.topology
    message = np.zeros(3, np.int64)
    if topology.rank:
        for _ in range(NUM_PINGS):
            control.receive(message, 0)
            there = time.monotonic_ns()
            message[:] = there, time.monotonic_ns(), 0
            control.send(message, 0)
        control.receive(message, 0)
        return Reading(int(message[0]), int(message[1]), float(message[2]))
    for peer in range(1, topology.size):
        pings = []
        for _ in range(NUM_PINGS):
            asked = time.monotonic_ns()
            control.send(message, peer)
            control.receive(message, peer)
            pings.append((asked, int(message[0]), int(message[1]), time.monotonic_ns()))
        found = best_reading(pings)
        message[:] = found.own_ns, found.zero_ns, int(np.ceil(found.error_ns))
        control.send(message, peer)
    now = time.monotonic_ns()
    return Reading(now, now, 0.0)


def probe_link(control: ControlPlane) -> tuple[int, int, int, int] | None:
    """Time transfers from the rank before, if that is on another host; all at once, as in a ring. The median of each
    size counts: one that was disturbed takes longer, one before which a shaper's bucket could fill takes less.

    Returns: that rank, the bytes, when it began and when it ended; None where both are on one host.
    """
    topology = control.topology
    hosts, rank, size = topology.hosts, topology.rank, topology.size
    if len(set(hosts)) < 2:
        return None
    after, before = (rank + 1) % size, (rank - 1) % size
    sends, receives = hosts[after] != hosts[rank], hosts[before] != hosts[rank]
    found = None
    go = np.zeros(1, np.int64)
    for number in range(len(PROBE_BYTES)):
        data, arrived = np.zeros(PROBE_BYTES[number], np.uint8), np.zeros(PROBE_BYTES[number], np.uint8)
        timed = []
        for _ in range(_REPEATS):
            waits = [control.start_send(go, after), control.start_send(data, after)] if sends else []
            if receives:
                begun = np.zeros(1, np.int64)
                control.receive(begun, before)
                started = time.monotonic_ns()
                control.receive(arrived, before)
                timed.append((started, time.monotonic_ns()))
            for wait in waits:
                wait()
        if timed:
            started, ended = sorted(timed, key=lambda one: one[1] - one[0])[len(timed) // 2]
            found = before, PROBE_BYTES[number], started, ended
        # The receiver says whether it has seen enough; the sender hears it.
        answer = np.zeros(1, np.int64)
        if receives and found is not None:
            answer[0] = found[3] - found[2] < ENOUGH_NS[number]
            control.send(answer, before)
        if sends:
            heard = np.zeros(1, np.int64)
            control.receive(heard, after)
            sends = bool(heard[0])
        receives = receives and bool(answer[0])
    return found
