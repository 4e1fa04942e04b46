"""Traces of others: Horovod timelines, torch's profiler and viztracer, read also where they are cut or invalid, and merged.

*Source*: Horovod writes an array of events whose processes are tensors, with names that are not escaped, and a first event with
the time of day; torch's profiler an object with ``traceEvents`` and ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.timeline.ring import TimelineError

#: What processes of a kind of trace are called in front.
_PREFIXES = {"Horovod timeline": "Horovod: ", "torch profiler trace": "torch: ", "viztracer trace": "viztracer: "}


@dataclass(frozen=True)
class Trace:
    """``epoch_ns``: the time of day at ts 0, 0 where it is not known. ``lost``: pieces that are no events."""

    path: str
    kind: str
    events: list[dict[str, Any]]
    epoch_ns: int
    lost: int
    is_cut: bool

    def __str__(self) -> str:
        state = [f"{self.lost} piece(s) could not be read and are lost"] if self.lost else []
        state += ["its end is missing"] if self.is_cut else []
        return f"{self.path}: {self.kind}, {len(self.events)} events{': ' if state else ''}{', '.join(state)}"


def read_trace(path: Path | str) -> Trace:
    """Read a trace as far as that is possible. Raises: TimelineError where there is no event in it."""
    raw = Path(path).read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as reason:
            raise TimelineError(f"{path}: {reason}: unpack what is left of it by hand") from reason
    text = raw.decode("utf-8", "replace")
    head: dict[str, Any] = {}
    lost, is_cut = 0, False
    try:
        whole = json.loads(text, strict=False)
        events = whole if isinstance(whole, list) else whole.get("traceEvents", []) if isinstance(whole, dict) else []
        head = whole if isinstance(whole, dict) else {}
        good = [event for event in events if _is_event(event)]
        lost = len(events) - len(good)
    except ValueError:
        good, lost, is_cut, head = _repair(text)
    if not good:
        raise TimelineError(f"{path}: no trace event in it: name a Horovod timeline or a trace of torch's profiler or viztracer")
    other = head.get("otherData") if isinstance(head.get("otherData"), dict) else {}
    if other and other.get("format") == "hvdlite":
        return Trace(str(path), "an export of hvdtrace", good, int(other.get("epoch_unix_ns", 0)), lost, is_cut)
    if "baseTimeNanoseconds" in head or "deviceProperties" in head or "schemaVersion" in head:
        return Trace(str(path), "torch profiler trace", good, int(head.get("baseTimeNanoseconds", 0)), lost, is_cut)
    viztracer = head.get("viztracer_metadata")
    if isinstance(viztracer, dict):
        return Trace(str(path), "viztracer trace", good, int(viztracer.get("baseTimeNanoseconds", 0)), lost, is_cut)
    start = next((event["args"]["start_time_since_epoch_in_micros"] for event in good
                  if isinstance(event.get("args"), dict) and "start_time_since_epoch_in_micros" in event["args"]), 0)
    return Trace(str(path), "Horovod timeline" if start else "trace", good, int(start) * 1000, lost, is_cut)


def _is_event(event: object) -> bool:
    return isinstance(event, dict) and isinstance(event.get("ph"), str) and len(event) > 1


def _repair(text: str) -> tuple[list[dict[str, Any]], int, bool, dict[str, Any]]:
    """Take out every whole event; count the pieces between that are none."""
    decoder = json.JSONDecoder(strict=False)
    head: dict[str, Any] = {}
    at = max(0, text.find("["))
    marker = text.find('"traceEvents"')
    if marker >= 0:
        at = text.find("[", marker)
        for word in ("baseTimeNanoseconds", "schemaVersion"):
            place = text.find(f'"{word}"')
            if place >= 0:
                digits = text[text.find(":", place) + 1 :].lstrip()
                head[word] = int("".join(_leading_digits(digits)) or 0)
    found: list[dict[str, Any]] = []
    lost, is_bad = 0, False
    end = len(text)
    at += 1
    while (at := text.find("{", at)) >= 0:
        try:
            event, stop = decoder.raw_decode(text, at)
        except ValueError:
            # Horovod's names may hold quotes and backslashes as they are: try again with the line's ones escaped.
            event, stop = _by_line(text, at)
        if _is_event(event):
            found.append(event)
            is_bad, end, at = False, stop, stop
        else:
            lost += not is_bad
            is_bad = True
            at += 1
    is_cut = "]" not in text[end:]
    return found, lost, is_cut, head


def _leading_digits(text: str) -> list[str]:
    digits = []
    for one in text:
        if not one.isdigit():
            break
        digits.append(one)
    return digits


def _by_line(text: str, at: int) -> tuple[Any, int]:
    stop = text.find("\n", at)
    line = text[at : stop if stop >= 0 else len(text)].rstrip().rstrip(",")
    for name in ('"name": "', '"name":"'):
        begin = line.rfind(name)
        if begin < 0:
            continue
        begin += len(name)
        for close in ('"}}', '", "', '","', '"}'):
            finish = line.find(close, begin) if close in ('", "', '","') else line.rfind(close)
            if finish > begin:
                value = line[begin:finish]
                try:
                    return json.loads(line[:begin] + json.dumps(value)[1:-1] + line[finish:], strict=False), at + len(line)
                except ValueError:
                    continue
    return None, at


def as_events(trace: Trace, place: Callable[[np.ndarray], np.ndarray], first_pid: int) -> list[dict[str, Any]]:
    """A trace's events as processes from ``first_pid`` on, their times as ``place`` makes them of times of day (int64, ns).

    Raises: TimelineError where the trace does not tell the time of day.
    """
    if not trace.epoch_ns and trace.kind != "torch profiler trace":
        raise TimelineError(f"{trace.path}: it does not tell the time of day, so it cannot be placed beside others: "
                            "use hvdtrace import for it alone")
    timed = [event for event in trace.events if isinstance(event.get("ts"), (int, float))]
    times = place(np.rint([1000.0 * event["ts"] for event in timed]).astype(np.int64) + trace.epoch_ns) / 1e3
    placed = {id(event): at for event, at in zip(timed, times.tolist(), strict=True)}
    pids: dict[Any, int] = {}
    tids: dict[Any, int] = {}
    made: list[dict[str, Any]] = []
    prefix = _PREFIXES.get(trace.kind, "")
    for event in trace.events:
        if "start_time_since_epoch_in_micros" in (event.get("args") or {}):
            continue
        pid = pids.setdefault(event.get("pid", 0), first_pid + len(pids))
        tid = tids.setdefault((pid, event.get("tid", 0)), len(tids) + 1)
        one = {**event, "pid": pid, "tid": tid}
        if id(event) in placed:
            one["ts"] = placed[id(event)]
        elif event["ph"] != "M":
            continue
        if event["ph"] == "M" and event.get("name") == "process_name":
            label = (event.get("args") or {}).get("name", "")
            one["args"] = {"name": f"{prefix}{label}"}
        if event["ph"] in "stf" and "id" in event:
            one["id"] = first_pid * 1_000_000 + zlib.crc32(str(event["id"]).encode()) % 1_000_000
        made.append(one)
    return made


def merge_traces(traces: Sequence[Trace], output: Path | str) -> int:
    """Write traces into one file; those that tell the time of day are placed by it. Returns: the number of events."""
    known = [trace.epoch_ns for trace in traces if trace.epoch_ns]
    if len(traces) > 1 and len(known) < len(traces):
        unknown = next(trace.path for trace in traces if not trace.epoch_ns)
        raise TimelineError(f"{unknown}: it does not tell the time of day, so it cannot be placed beside others: import it alone")
    first = min(_first_us(trace) * 1000 + trace.epoch_ns for trace in traces)
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        placed = trace if trace.epoch_ns else Trace(trace.path, trace.kind, trace.events, 1, trace.lost, trace.is_cut)
        events += as_events(placed, lambda at: at - int(first), 1 + 10_000 * number)
    other = {"format": "hvdlite", "epoch_unix_ns": int(first), "lost_pieces": sum(trace.lost for trace in traces),
             "cut_files": [trace.path for trace in traces if trace.is_cut]}
    with open(output, "w", encoding="ascii") as file:
        json.dump({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}, file, allow_nan=False)
    return len(events)


def _first_us(trace: Trace) -> float:
    return min((event["ts"] for event in trace.events if isinstance(event.get("ts"), (int, float))), default=0.0)
