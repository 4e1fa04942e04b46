"""ExchangeSpec: what a Request's ``compressor`` says about a quantised exchange; and how its tensors are cut for their owners.

*Ownership*: every tensor is cut, in whole groups, into one piece for each rank, whatever bucket it travels in; which ranks get
the odd groups is told by a hash of its name. So neither fusion nor other buckets change a bit of the result. Pure functions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdlite.compression.rotation import GROUP
from hvdlite.compression.spec import CodecSpec

SCHEDULES = ("auto", "ring", "two_shot")

#: Groups per message. Measured (tools/bench_allreduce.py on 1 Gbit/s): with half as many the same, with twice as many 1.15 times
#: the time.
SEGMENT_GROUPS = 1024

#: Columns of a table of places: the tensor's index, the first element within it, elements, the first group in the message.
TENSOR, START, COUNT, FIRST = range(4)


@dataclass(frozen=True)
class ExchangeSpec:
    """A codec and a schedule; ``str`` gives what is written into a Request, ``parse`` reads it."""

    codec: CodecSpec
    schedule: str = "auto"
    #: Whether values are quantised in units of the square root of a second moment that all ranks hold alike.
    is_preconditioned: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"quantised exchange: schedule is {self.schedule!r}: use one of {', '.join(SCHEDULES)}")

    def __str__(self) -> str:
        codec = self.codec
        precondition = ", precondition=adam" if self.is_preconditioned else ""
        return f"quantized(bits={codec.bits}, scale={codec.scale}, group={codec.group}, schedule={self.schedule}{precondition})"

    @staticmethod
    @lru_cache(64)
    def parse(text: str) -> ExchangeSpec:
        """The way back of ``str``."""
        match = re.fullmatch(
            r"quantized\(bits=(\d+), scale=(\w+), group=(\d+), schedule=(\w+)(, precondition=adam)?\)", text)
        assert match is not None, text
        bits, scale, group, schedule, precondition = match.groups()
        return ExchangeSpec(CodecSpec(int(bits), scale, int(group)), schedule, bool(precondition))


def owned_groups(num_groups: int, num_ranks: int, name: str) -> list[int]:
    """How many groups of a tensor each rank owns, in rank order; rank r's follow those of rank r - 1."""
    each, odd = divmod(num_groups, num_ranks)
    first = zlib.crc32(name.encode()) % num_ranks
    return [each + ((rank - first) % num_ranks < odd) for rank in range(num_ranks)]


@dataclass(frozen=True)
class Layout:
    """Where every group of some tensors travels.

    ``places[rank][segment]``: what the message of that owner and segment holds. *Shapes*: (num_places, 4), int64.
    ``num_groups[rank][segment]``: the message's groups.
    """

    places: tuple[tuple[np.ndarray, ...], ...]
    num_groups: tuple[tuple[int, ...], ...]

    @property
    def num_segments(self) -> int:
        """Of every owner; the last ones may be empty."""
        return len(self.places[0])


@lru_cache(512)
def plan_layout(sizes: tuple[int, ...], names: tuple[str, ...], num_ranks: int, segment_groups: int = SEGMENT_GROUPS) -> Layout:
    """Cut tensors of ``sizes`` elements for their owners, and each owner's share into segments of ``segment_groups``."""
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]  # tensor, first group, groups
    for tensor, (size, name) in enumerate(zip(sizes, names, strict=True)):
        first = 0
        for rank, count in enumerate(owned_groups(-(-size // GROUP), num_ranks, name)):
            if count:
                shares[rank].append((tensor, first, count))
            first += count
    totals = [sum(count for _, _, count in share) for share in shares]
    num_segments = max(1, -(-max(totals) // segment_groups))
    places, num_groups = [], []
    for share, total in zip(shares, totals, strict=True):
        places.append(tuple(_cut(share, sizes, num_segments, segment_groups)))
        num_groups.append(tuple(max(0, min(segment_groups, total - segment * segment_groups)) for segment in range(num_segments)))
    return Layout(tuple(places), tuple(num_groups))


def _cut(share: Sequence[tuple[int, int, int]], sizes: Sequence[int], num_segments: int, segment_groups: int) -> list[np.ndarray]:
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_segments)]
    at = 0
    for tensor, first, count in share:
        while count:
            segment, within = divmod(at, segment_groups)
            taken = min(count, segment_groups - within)
            start = first * GROUP
            rows[segment].append((tensor, start, min(taken * GROUP, sizes[tensor] - start), within))
            at, first, count = at + taken, first + taken, count - taken
    return [np.array(one, np.int64).reshape(-1, 4) for one in rows]
