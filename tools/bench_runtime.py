"""Figures of the runtime itself: latency, the cost of waiting, order of submission. Prints one JSON line per figure.

    python tools/bench_runtime.py [--np 2] [latency idle late order]

Each is measured against a control in the same run, because timings of a shared machine differ from run to run.
latency: one-element synchronous allreduce, against the same MPI calls made directly by the main thread.
idle: share of a core used by one rank that does nothing after init() for 20 s.
late: the same for a rank that waits 5 s for another one's tensor.
order: time of two allreduces that the ranks submit in opposite orders, against equal orders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", default=list(FIGURES), help=", ".join(FIGURES))
    options = parser.parse_args()
    if options.as_rank:
        import hvdlite as hvd

        hvd.init()
        for figure in options.figures:
            hvd.barrier()
            found = FIGURES[figure](hvd)
            if hvd.rank() == 0:
                print(json.dumps({"figure": figure, "ranks": hvd.size(), **found}), flush=True)
    else:
        hvdrun = [sys.executable, "-m", "hvdlite.launch", "-np", str(options.np)]
        sys.exit(subprocess.call([*hvdrun, sys.executable, __file__, "--as-rank", *options.figures]))


def latency(hvd: Any) -> dict[str, Any]:
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD.Dup()
    words, received = np.zeros(3, np.int64), np.zeros(3, np.int64)
    one, out = np.ones(1, np.float32), np.ones(1, np.float32)

    def control() -> None:
        request = communicator.Iallreduce(words, received, MPI.BAND)
        while not request.Test():
            pass
        communicator.Allreduce(one, out)

    cases: dict[str, Callable[[], Any]] = {
        "mpi_alone_us": control,
        "average_named_us": lambda: hvd.allreduce(one, name="latency"),
        "sum_in_place_us": lambda: hvd.allreduce_(out, name="latency_", op=hvd.Sum),
    }
    for case in cases.values():
        times_us(case, 300)
    raw: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, case in cases.items():
            raw[name].append(round(statistics.median(times_us(case, 1000)), 1))
    return {name: statistics.median(values) for name, values in raw.items()} | {"raw": raw}


def times_us(case: Callable[[], Any], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        case()
        taken.append((time.perf_counter() - started) * 1e6)
    return taken


def idle(hvd: Any) -> dict[str, Any]:
    return {"core_percent": [round(share, 3) for share in shares(hvd, 20.0)]}


def late(hvd: Any) -> dict[str, Any]:
    def wait() -> None:
        if hvd.rank() == hvd.size() - 1:
            time.sleep(5)
        hvd.allreduce(1.0, name="late")

    return {"core_percent": [round(share, 3) for share in shares(hvd, 5.0, wait)][:-1]}


def shares(hvd: Any, seconds: float, wait: Callable[[], None] | None = None) -> Any:
    """Per rank: percent of a core used meanwhile."""
    before = time.process_time()
    if wait:
        wait()
    else:
        time.sleep(seconds)
    used = time.process_time() - before
    return hvd.allgather(np.array([used / seconds * 100])).tolist()


def order(hvd: Any) -> dict[str, Any]:
    one = np.ones(1, np.float32)

    def both(names: str) -> Callable[[], None]:
        def case() -> None:
            handles = [hvd.allreduce_async(one, name=f"order.{name}") for name in names]
            for handle in handles:
                handle.wait()
        return case

    cases = {"same_us": both("AB"), "opposite_us": both("AB" if hvd.rank() == 0 else "BA")}
    raw: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, case in cases.items():
            raw[name].append(round(statistics.median(times_us(case, 300)), 1))
    return {name: statistics.median(values) for name, values in raw.items()} | {"raw": raw}


FIGURES: dict[str, Callable[[Any], dict[str, Any]]] = {"latency": latency, "idle": idle, "late": late, "order": order}

if __name__ == "__main__":
    main()
