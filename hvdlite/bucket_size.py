"""How large an optimizer's buckets are: measured once per kind of job and kept in a file, refined on live steps by --autotune.

A fusion threshold that was set explicitly is obeyed, and nothing here runs. Every decision is taken from the times of the slowest
rank, which all ranks of the set hear, so all decide alike. ``python -m hvdlite.bucket_size LOG`` replays a log of --autotune.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hvdlite.config import Config, cache_directory
from hvdlite.errors import InvalidRequestError

_log = logging.getLogger("hvdlite")

_MEBIBYTE = 1 << 20
CANDIDATES = tuple(_MEBIBYTE * mebibytes // 4 for mebibytes in (1, 4, 8, 16, 32, 64, 128, 256))
#: A model below this has one small bucket or two, whatever the threshold.
SMALLEST_MODEL_BYTES = _MEBIBYTE
#: Of a larger model the probe exchanges this much.
PROBED_BYTES = 16 * _MEBIBYTE
#: A pass that takes longer waits for the wire, which takes as long whatever the buckets are. Chosen.
_LINK_BOUND_S = 0.1
_PROBE_ROUNDS = 5
#: What another size must save to be taken instead of the one before. Chosen: below it medians of so few passes mean little.
_LEAST_GAIN = 0.05
#: Steps of one sample of --autotune; the first lets the ranks agree on the new buckets and is left out.
SAMPLE_STEPS = 6
_FINALISTS, _FINAL_ROUNDS = 3, 3


def probe(
    make: Callable[[int], Callable[[], Any]], slowest: Callable[[Sequence[float]], list[float]], default_bytes: int,
    num_bytes: int,
) -> tuple[int, str]:
    """Return the bucket size whose passes were fastest, in bytes, and why. Collective, the same on every rank.

    ``make(size)`` gives a function that exchanges ``num_bytes`` once in buckets of that size; ``slowest`` turns this rank's
    seconds into those of the slowest rank.
    """
    first = make(default_bytes)
    first()  # agrees and compiles
    [seconds] = slowest([_timed(first)])
    if seconds > _LINK_BOUND_S:
        return default_bytes, f"{num_bytes / 1e6:.0f} MB take {seconds * 1e3:.0f} ms: the link is what takes time"
    sizes = [size for size in CANDIDATES if size < 2 * num_bytes and size != default_bytes]
    passes = {default_bytes: first} | {size: make(size) for size in sizes}
    for one in passes.values():
        one()
    times = [[_timed(one) for one in passes.values()] for _ in range(_PROBE_ROUNDS)]
    agreed = slowest([seconds for row in times for seconds in row])
    medians = {size: median(agreed[place :: len(passes)]) for place, size in enumerate(passes)}
    return _choice(medians, default_bytes)


def _timed(function: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def _choice(medians: dict[int, float], before: int) -> tuple[int, str]:
    best = min(medians, key=lambda size: medians[size])
    if medians[best] > (1 - _LEAST_GAIN) * medians[before]:
        best = before
    return best, ", ".join(f"{_text(size)} {medians[size] * 1e3:.2f} ms" for size in sorted(medians))


def _text(size: int) -> str:
    return f"{size / _MEBIBYTE:g} MiB"


class Tuner:
    """Tries bucket sizes on live steps: each candidate once, then the fastest few again in turn; then it stays with the best.

    Knows nothing of ranks or clocks: fed with the same seconds it always does the same, which is what makes its log replayable.
    """

    def __init__(self, start_bytes: int, num_bytes: int) -> None:
        self.start_bytes, self.num_bytes = start_bytes, num_bytes
        others = [size for size in CANDIDATES if size < 2 * num_bytes and size != start_bytes]
        self._next = [start_bytes, *others]
        self._rounds_left = _FINAL_ROUNDS
        self._finalists: list[int] = []
        self._seconds: dict[int, list[float]] = {}
        #: The size to use now, in bytes.
        self.size = start_bytes
        #: Why it stays with that size; empty while it tries.
        self.why = ""

    def add(self, seconds: Iterable[float]) -> None:
        """Take in a sample: how long each step took with ``size``, on the slowest rank."""
        if self.why:
            raise InvalidRequestError(f"the tuner has chosen {_text(self.size)} already: make another one")
        self._seconds.setdefault(self.size, []).extend(seconds)
        self._next.pop(0)
        if not self._next and self._rounds_left:
            medians = self._medians()
            self._finalists = self._finalists or sorted(medians, key=lambda size: medians[size])[:_FINALISTS]
            self._next = self._finalists if self._rounds_left % 2 else self._finalists[::-1]
            self._next = list(self._next)
            self._rounds_left -= 1
        if self._next:
            self.size = self._next[0]
            return
        medians = {size: value for size, value in self._medians().items() if size in self._finalists}
        best = min(medians, key=lambda size: medians[size])
        self.size = best
        self.why = ", ".join(f"{_text(size)} {value * 1e3:.2f} ms/step" for size, value in sorted(medians.items()))

    def _medians(self) -> dict[int, float]:
        return {size: median(seconds) for size, seconds in self._seconds.items()}


class LiveTuner:
    """A Tuner at work in one optimizer: it measures its steps, asks the other ranks, and writes what it does into the log."""

    def __init__(
        self, tuner: Tuner, slowest: Callable[[Sequence[float]], list[float]], log: Callable[[dict[str, Any]], None],
    ) -> None:
        self._tuner, self._slowest, self._write = tuner, slowest, log
        self._seconds: list[float] = []
        self._before_s: float | None = None
        log({"event": "start", "bytes": tuner.start_bytes, "model_bytes": tuner.num_bytes, "steps_per_sample": SAMPLE_STEPS - 1})

    @property
    def choice(self) -> tuple[int, str] | None:
        """The size it stays with, and why; None while it tries."""
        return (self._tuner.size, self._tuner.why) if self._tuner.why else None

    def step(self) -> int | None:
        """Note that a step has ended; return the bucket size to use from now on where it is another. Collective."""
        now_s = time.perf_counter()
        if self._before_s is not None:
            self._seconds.append(now_s - self._before_s)
        self._before_s = now_s
        if len(self._seconds) < SAMPLE_STEPS:
            return None
        used = self._tuner.size
        seconds = self._slowest(self._seconds[1:])
        self._seconds.clear()
        self._tuner.add(seconds)
        self._write({"event": "sample", "bytes": used, "seconds": [round(one, 9) for one in seconds]})
        if self._tuner.why:
            self._write({"event": "choice", "bytes": self._tuner.size, "why": self._tuner.why})
        self._before_s = time.perf_counter()
        return self._tuner.size if self._tuner.size != used else None


class Cache:
    """Bucket sizes found before, in a JSON file: ``{kind of job: {"bytes": ..., "by": "probe" or "autotune", "why": ...}}``."""

    def __init__(self, config: Config) -> None:
        self.path = Path(cache_directory(config)) / "bucket_sizes.json"

    def get(self, kind: str) -> int | None:
        """The size kept for a kind of job, in bytes. A file that cannot be read is said so and holds nothing."""
        size = self._read().get(kind, {}).get("bytes")
        return size if isinstance(size, int) and size > 0 else None

    def put(self, kind: str, size: int, by: str, why: str) -> None:
        """Keep a size; where the file cannot be written, say so."""
        known = self._read()
        known[kind] = {"bytes": size, "by": by, "why": why}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(known, file, indent=1)
            os.replace(file.name, self.path)  # never half a file, whoever else writes
        except OSError as error:
            _log.warning("the bucket size found is not kept: %s: set HVDLITE_CACHE_DIR to a folder that can be written", error)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning("%s holds no bucket sizes: %s: it will be written anew", self.path, error)
            return {}
        return found if isinstance(found, dict) and all(isinstance(one, dict) for one in found.values()) else {}


def kind_of_job(plane: str, num_ranks: int, num_hosts: int, sizes_bytes: Sequence[int]) -> str:
    """What bucket sizes depend on: how and between how many ranks and hosts data travels, the cores of a host, the gradients."""
    gradients = hashlib.sha256(repr(list(sizes_bytes)).encode()).hexdigest()[:12]
    return (f"{plane}, {num_ranks} ranks, {num_hosts} hosts, {os.cpu_count()} cores, {len(sizes_bytes)} gradients "
            f"of {sum(sizes_bytes)} bytes ({gradients})")


def appender(path: str, label: str) -> Callable[[dict[str, Any]], None]:
    """A function that appends a line of JSON per record about ``label`` to ``path``, or does nothing where that is empty."""

    def append(record: dict[str, Any]) -> None:
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"label": label} | record) + "\n")

    return append


def replay(lines: Iterable[str]) -> dict[str, Tuner]:
    """Feed a log's samples to new Tuners and return these by label; of several jobs in one log the last.

    Raises: ValueError at the first line where the log says something else than what the Tuner does.
    """
    tuners: dict[str, Tuner] = {}
    for number, record in enumerate(map(json.loads, lines), 1):
        if record["event"] == "start":
            tuners[record["label"]] = Tuner(record["bytes"], record["model_bytes"])
            continue
        tuner = tuners.get(record["label"])
        if tuner is None:
            raise ValueError(f"line {number}: a {record['event']} before the start")
        if record["bytes"] != tuner.size:
            raise ValueError(f"line {number}: {_text(record['bytes'])}, where the samples before it give {_text(tuner.size)}")
        if record["event"] == "sample":
            tuner.add(record["seconds"])
    if not tuners:
        raise ValueError("the log is empty")
    return tuners


def main(arguments: Sequence[str]) -> int:
    """Replay the log named; 1 where it is not what its samples give."""
    if len(arguments) != 1:
        print("usage: python -m hvdlite.bucket_size LOG", file=sys.stderr)
        return 2
    try:
        with open(arguments[0], encoding="utf-8") as file:
            tuners = replay(file)
    except (OSError, ValueError, KeyError) as error:
        print(f"bucket_size: {arguments[0]}: {error}", file=sys.stderr)
        return 1
    for label, tuner in tuners.items():
        print(f"{label}: {_text(tuner.size)}: {tuner.why or 'still trying'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
