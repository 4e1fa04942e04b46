#!/usr/bin/env python3
"""What agreeing costs: against the number of ranks and of tensors, when nothing happens, and after that.

    python tools/bench_control.py [--json FILE] [ranks mpi tensors gradients idle wake]

ranks: 2 to 64 ranks that are threads of this process, each with the same four allreduces in every step; mpi: the same with
MPI ranks, more than there are processors. Per rank and cycle: CPU time of the background thread, bytes and collectives.
tensors: 1 to 10 000 tensors with names of their own on two MPI ranks: CPU time of the background thread per step.
gradients: 10 000 parameters of one optimizer at 10 steps a second: share of a core of the background thread.
idle: share of a core of a rank that does nothing after init(). wake: microseconds of an allreduce of one element that
comes after a tenth of a second in which nothing happened, beside one in a loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

FIGURES = ("ranks", "mpi", "tensors", "gradients", "idle", "wake")
STEPS, TENSORS = 200, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--mpi-ranks", default="2,4,8,16")
    parser.add_argument("--tensors", default="1,10,100,1000,10000")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", default=list(FIGURES), help=", ".join(FIGURES))
    options = parser.parse_args()
    if options.as_rank:
        for figure in options.figures:
            as_rank(figure, options)
        return
    found: list[dict[str, Any]] = []
    for figure in options.figures:
        if figure == "ranks":
            for size in map(int, options.ranks.split(",")):
                report(found, {"figure": "ranks", **of_threads(size)})
        else:
            for size in options.mpi_ranks.split(",") if figure == "mpi" else ("2",):
                report(found, *under_hvdrun(figure, size, options))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


def report(found: list[dict[str, Any]], *records: dict[str, Any]) -> None:
    for one in records:
        found.append(one)
        print(json.dumps(one), flush=True)


def under_hvdrun(figure: str, size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "hvdlite.launch", "-np", size, sys.executable, __file__, "--as-rank", "--tensors",
               options.tensors, figure]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- ranks ------------------------------------------------------------------------------------------------------------


def of_threads(size: int) -> dict[str, Any]:
    """Ranks as threads: every one submits from a thread of its own."""
    from hvdlite.config import Config
    from hvdlite.control.local import LocalGroup
    from hvdlite.runtime import Runtime

    group = LocalGroup(size)
    runtimes = [Runtime.local(group, rank, Config()).start() for rank in range(size)]
    made: list[dict[str, Any]] = [{} for _ in runtimes]
    threads = [threading.Thread(target=lambda rank=rank: made[rank].update(steady(runtimes[rank]))) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runtime in runtimes:
        runtime.background.leave("done", failed=False)
    return {"ranks": size, **{key: statistics.median(one[key] for one in made) for key in made[0]}}


def steady(runtime: Any) -> dict[str, Any]:
    """Per cycle, in a loop of steps."""
    from hvdlite import submission
    from hvdlite.message import Collective
    from hvdlite.submission import Submission

    one = np.ones(1, np.float32)

    def step() -> None:
        handles = [submission.allreduce(
            Submission(Collective.ALLREDUCE, one, name=f"t{index}", runtime=runtime), in_place=False, average=None, op=None,
            prescale_factor=1.0, postscale_factor=1.0) for index in range(TENSORS)]
        for handle in handles:
            handle.wait()

    for _ in range(20):
        step()
    background, control = runtime.background, runtime._control
    before = (background.cpu_s(), background.num_cycles, control.num_collectives, control.num_bytes)
    started = time.monotonic()
    for _ in range(STEPS):
        step()
    wall_s = time.monotonic() - started
    cpu_s, cycles, collectives, num_bytes = (
        after - first for after, first in zip(
            (background.cpu_s(), background.num_cycles, control.num_collectives, control.num_bytes), before, strict=True))
    return {"cpu_us_per_cycle": round(1e6 * cpu_s / cycles, 1), "bytes_per_cycle": round(num_bytes / cycles, 1),
            "collectives_per_cycle": round(collectives / cycles, 3), "cycles_per_step": round(cycles / STEPS, 2),
            "wall_us_per_cycle": round(1e6 * wall_s / cycles, 1)}


# -- as a rank of MPI -------------------------------------------------------------------------------------------------


def as_rank(figure: str, options: argparse.Namespace) -> None:
    import hvdlite
    from hvdlite.runtime import default_runtime

    hvdlite.init()
    records: list[dict[str, Any]] = []
    if figure == "mpi":
        records.append(steady(default_runtime()))
    elif figure == "tensors":
        records += [of_tensors(count) for count in map(int, options.tensors.split(","))]
    elif figure == "gradients":
        records.append(of_gradients(10_000))
    elif figure == "idle":
        time.sleep(1)
        before = time.process_time()
        time.sleep(20)
        records.append({"core_percent": round((time.process_time() - before) / 20 * 100, 3)})
    else:
        records.append(after_silence())
    if hvdlite.rank() == 0:
        for one in records:
            print(json.dumps({"figure": figure, "ranks": hvdlite.size(), **one}), flush=True)


def of_tensors(count: int) -> dict[str, Any]:
    import hvdlite
    from hvdlite.runtime import default_runtime

    one, background, steps = np.ones(1, np.float32), default_runtime().background, max(5, min(100, 20_000 // count))

    def step() -> None:
        for handle in [hvdlite.allreduce_async(one, name=f"{count}.{index}") for index in range(count)]:
            handle.wait()

    for _ in range(3):
        step()
    cpu_s, cycles, started = background.cpu_s(), background.num_cycles, time.monotonic()
    for _ in range(steps):
        step()
    return {"tensors": count, "cpu_ms_per_step": round(1e3 * (background.cpu_s() - cpu_s) / steps, 3),
            "cycles_per_step": (background.num_cycles - cycles) / steps,
            "wall_ms_per_step": round(1e3 * (time.monotonic() - started) / steps, 3)}


def of_gradients(count: int) -> dict[str, Any]:
    import torch

    import hvdlite.torch as hvd
    from hvdlite.runtime import default_runtime

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
    for one in parameters:
        one.grad = torch.zeros(3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters), [(f"w{index}", one) for index, one in enumerate(parameters)])
    for _ in range(3):
        optimizer.synchronize()
    background = default_runtime().background
    before, started, steps = background.cpu_s(), time.monotonic(), 0
    while time.monotonic() - started < 5:
        optimizer.synchronize()
        steps += 1
        time.sleep(max(0.0, started + steps / 10 - time.monotonic()))
    return {"gradients": count, "steps_per_s": round(steps / 5, 1),
            "core_percent": round((background.cpu_s() - before) / 5 * 100, 2)}


def after_silence() -> dict[str, Any]:
    import hvdlite

    one = np.ones(1, np.float32)

    def timed_us(silence_s: float, count: int) -> float:
        taken = []
        for _ in range(count):
            time.sleep(silence_s)
            started = time.perf_counter()
            hvdlite.allreduce(one, name="wake")
            taken.append(1e6 * (time.perf_counter() - started))
        return round(statistics.median(taken), 1)

    timed_us(0, 300)
    return {"in_a_loop_us": timed_us(0, 1000), "after_silence_us": timed_us(0.1, 50)}


if __name__ == "__main__":
    main()
