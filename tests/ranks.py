"""Ranks as threads of the test's process, and jobs under hvdrun."""

import subprocess
import sys
import threading
from pathlib import Path

from hvdlite import submission
from hvdlite.config import Config
from hvdlite.control.local import LocalGroup
from hvdlite.message import Collective
from hvdlite.runtime import Runtime
from hvdlite.submission import Submission

ROOT = Path(__file__).resolve().parent.parent


class Rank:
    """What a test does on one rank: the collectives on its own Runtime."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.rank, self.size = runtime.topology.rank, runtime.topology.size

    def allreduce_async(
        self, tensor, name=None, op=None, in_place=False, is_group=False, average=None, prescale=1.0, postscale=1.0,
        process_set=None,
    ):
        call = Submission(
            Collective.ALLREDUCE, tensor, is_group=is_group, name=name, process_set=process_set, runtime=self.runtime)
        return submission.allreduce(
            call, in_place=in_place, average=average, op=op, prescale_factor=prescale, postscale_factor=postscale)

    def allgather_async(self, tensor, name=None, process_set=None):
        return submission.allgather(
            Submission(Collective.ALLGATHER, tensor, name=name, process_set=process_set, runtime=self.runtime))

    def broadcast_async(self, tensor, root_rank, name=None, process_set=None):
        call = Submission(Collective.BROADCAST, tensor, name=name, process_set=process_set, runtime=self.runtime)
        return submission.broadcast(call, in_place=False, root_rank=root_rank)

    def allreduce(self, *args, **kwargs):
        return self.allreduce_async(*args, **kwargs).wait(timeout_s=20)


def run_ranks(size, function, config=None, timeout_s=60, hosts=(), gpus=None):
    """Run ``function(Rank)`` on ``size`` threads; return results in rank order, raise the first exception.

    ``hosts``: which host each rank plays to be on. ``gpus``: a function of the rank that makes its Gpus.
    """
    group = LocalGroup(size)
    runtimes = [
        Runtime.local(group, rank, config or Config(heartbeat_ms=5), hosts=hosts, gpus=gpus and gpus(rank)).start()
        for rank in range(size)]
    results, failures = [None] * size, []

    def body(rank):
        try:
            results[rank] = function(Rank(runtimes[rank]))
        except BaseException as error:
            failures.append((rank, error))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for runtime in runtimes:
        runtime.background.leave("the test is over", failed=False)
    ended = [runtime.background.join(10) for runtime in runtimes]
    if failures:
        raise failures[0][1]
    assert not hanging, f"ranks {hanging} hang"
    assert all(ended), f"background threads did not end: {ended}"
    return results


def hvdrun(ranks, *command, options=(), timeout_s=120, env=None):
    """Run a command under hvdrun; return the CompletedProcess with text output."""
    argv = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *options, *map(str, command)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, env=env, cwd=ROOT)
