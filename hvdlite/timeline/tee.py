"""Recording into several places at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import Record, RingTimeline, Timed, Timeline


class TeeTimeline:
    """Records into several timelines."""

    is_recording = True

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self.timelines = tuple(timelines)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("operation", "plan", "process_set"):
            for timeline in self.timelines:
                setattr(timeline, name, value)

    operation = plan = process_set = 0

    def span(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        for timeline in self.timelines:
            timeline.span(phase, name, start_ns, end_ns, num_bytes, detail, count, value)

    def note(
        self, phase: Phase, name: str, start_ns: int, end_ns: int, num_bytes: int = 0, detail: int = 0, count: int = 0,
        value: float = 0.0,
    ) -> None:
        for timeline in self.timelines:
            timeline.note(phase, name, start_ns, end_ns, num_bytes, detail, count, value)

    def write(self, records: Sequence[Record]) -> None:
        for timeline in self.timelines:
            timeline.write(records)

    def describe(self, name: str, about: Any) -> None:
        for timeline in self.timelines:
            timeline.describe(name, about)

    def timed(self, phase: Phase, name: str, num_bytes: int = 0) -> Timed:
        return Timed(self, phase, name, num_bytes)

    def flush(self) -> None:
        for timeline in self.timelines:
            timeline.flush()

    def close(self) -> None:
        for timeline in self.timelines:
            timeline.close()


def rings_of(timeline: Timeline) -> list[RingTimeline]:
    """The rings among what a timeline records into."""
    parts = timeline.timelines if isinstance(timeline, TeeTimeline) else (timeline,)
    return [one for one in parts if isinstance(one, RingTimeline)]
