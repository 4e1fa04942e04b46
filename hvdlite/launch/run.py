"""run: call a function on several ranks from Python, as hvdrun runs a program.

The life of a call::

    run() -- starts --> run_supervisor.py -- as hvdrun --> the MPI's starter, guards, ranks (task.py)
      |                                                                            |
      `----- private directory: the function and its arguments, results, failures -+

*Threads*: from any thread, also in a notebook; the caller only waits, nothing of it is forked.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from hvdlite.errors import InvalidRequestError, JobFailedError, format_ranks
from hvdlite.launch import run_supervisor, task
from hvdlite.launch.command import StartRequest, build_command, oversubscription_warning
from hvdlite.launch.environment import for_this_host_only, job_environment, without_outer_job
from hvdlite.launch.failure import Failure
from hvdlite.launch.job import Job, OutputOptions
from hvdlite.launch.mpi import find_mpi, find_starter
from hvdlite.launch.outcome import Outcome, describe_code
from hvdlite.launch.supervisor import private_directory


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 1, *,
    env: Mapping[str, str] | None = None, unwind_s: float = 1.0, grace_s: float = 5.0,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new processes of this machine; return the results in rank order.

    ``fn`` may be any function, also a lambda or one of a notebook; it calls ``init()`` itself. It gets a copy of what
    it refers to, with the paths to import from, the environment and the current directory of the caller; ``env`` adds
    to the environment. What it prints goes where this process prints. Ctrl-C ends the job.
    *Units*: the other ranks have ``unwind_s`` seconds to end by themselves after a failure, and from there ``grace_s``
    until they are killed.
    Raises: the exception of the rank that failed first; its ``__cause__`` names the rank and holds its traceback.
    JobFailedError where that cannot be raised here: it cannot be pickled, or the rank was killed or called exit.
    InvalidRequestError for what cannot be called or pickled; UnavailableError without an MPI.
    """
    if isinstance(np, bool) or not hasattr(np, "__index__") or np < 1:
        raise InvalidRequestError(f"run: np {np!r} is not a whole number >= 1: say how many ranks to start")
    call = _pickled_call(fn, args, kwargs)
    starter = find_starter(find_mpi())
    with (
        _supervisor() as (process, answer),
        tempfile.TemporaryDirectory(prefix="hvdrun-call-", ignore_cleanup_errors=True) as call_directory,  # mode 0700
        private_directory() as socket_directory,
    ):
        with open(os.path.join(call_directory, "call"), "wb") as file:
            file.write(call)
        request = StartRequest(
            starter=starter, num_ranks=int(np), num_cpus=len(os.sched_getaffinity(0)), is_root=os.geteuid() == 0,
            directory=socket_directory)
        if warning := oversubscription_warning(request):
            logging.getLogger("hvdlite").warning("run: %s", warning)
        job = Job(
            num_ranks=int(np), argv=tuple(map(os.fsencode, (sys.executable, os.path.abspath(task.__file__), call_directory))),
            environment=_environment(env or {}), directory=os.getcwdb(), unwind_s=unwind_s, grace_s=grace_s, binds=True,
            sets_threads="OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in (env or {}),
            output=OutputOptions(holds_tracebacks=False))
        order = pickle.dumps((job, build_command(request, for_this_host_only(job.environment)), socket_directory, call_directory))
        return _results(_outcome(process, order, answer), call_directory, int(np))


def _pickled_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    import cloudpickle  # the standard library pickles neither lambdas nor functions of __main__

    if not callable(fn):
        raise InvalidRequestError(f"run: a {type(fn).__name__} cannot be called: pass a function")
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as reason:
        raise InvalidRequestError(
            f"run: the function, what it refers to, or an argument cannot be pickled: {reason}: "
            "make it within the function") from reason
    return pickle.dumps((sys.path, sys.argv)) + bytes(call)


def _environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    added = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    return job_environment({**without_outer_job(os.environb), **added}, {}, os.urandom(8).hex())


@contextmanager
def _supervisor() -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """The process that runs the job, and the stream of its answer. It cleans up should this process not come to it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answer:
        with open(write_fd, "wb"):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(run_supervisor.__file__), str(os.getpid()), str(write_fd)],
                stdin=subprocess.PIPE, pass_fds=(write_fd,),
                # Ctrl-C raises in the main thread only: waiting there, it is passed on in order; else it must arrive by itself.
                start_new_session=threading.current_thread() is threading.main_thread())
        assert process.stdin is not None
        try:
            yield process, answer
        finally:
            try:
                process.stdin.close()  # all is read and removed
            except BrokenPipeError:
                pass
            process.wait()


def _outcome(process: subprocess.Popen[bytes], order: bytes, answer: BinaryIO) -> Outcome:
    """Let the job run and wait for its end. An exception meanwhile, as of Ctrl-C, ends the job first."""
    assert process.stdin is not None
    try:
        try:
            process.stdin.write(order)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed: the answer will be empty
        data = answer.read()
    except BaseException as reason:
        _end(process, answer, signal.SIGINT if isinstance(reason, KeyboardInterrupt) else signal.SIGTERM)
        raise
    if not data:
        raise JobFailedError(
            f"run: the process that watched over the ranks ended ({describe_code(process.wait())}), and so did they: "
            "see what it wrote above")
    outcome: Outcome = pickle.loads(data)
    return outcome


def _end(process: subprocess.Popen[bytes], answer: BinaryIO, number: int) -> None:
    """End the job and wait; it takes ``grace_s`` at most. Another Ctrl-C kills the ranks at once."""
    while True:
        process.send_signal(number)
        try:
            answer.read()
            return
        except KeyboardInterrupt:
            continue


def _results(outcome: Outcome, directory: str, num_ranks: int) -> list[Any]:
    if outcome.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.error or outcome.interrupted_by:
        raise JobFailedError(outcome.describe())
    failures = {rank: pickle.loads(data) for rank, data in _read(directory, "failure", num_ranks).items()}
    failure = _first_failure(outcome, failures)
    if failure is not None:
        raise failure.exception()
    if outcome.exit_code:
        raise JobFailedError(outcome.describe())
    results = _read(directory, "result", num_ranks)
    if missing := [rank for rank in range(num_ranks) if rank not in results]:
        raise JobFailedError(
            f"run: {format_ranks(missing)} ended without a result, by os._exit(0) perhaps: let the function return")
    return [_unpickled(rank, results[rank]) for rank in range(num_ranks)]


def _first_failure(outcome: Outcome, failures: Mapping[int, Failure]) -> Failure | None:
    """The exception that came first, unless a rank that left none, a killed one, ended before."""
    times_ns = {end.rank: end.ended_ns for end in outcome.ends.values() if end.failed_by_itself}
    times_ns.update((rank, failure.raised_ns) for rank, failure in failures.items() if not failure.is_victim)
    if not times_ns:
        times_ns = {rank: failure.raised_ns for rank, failure in failures.items()}
    return failures.get(min(times_ns, key=lambda rank: times_ns[rank], default=-1))


def _read(directory: str, kind: str, num_ranks: int) -> dict[int, bytes]:
    found = {}
    for rank in range(num_ranks):
        path = os.path.join(directory, f"{kind}.{rank}")
        if os.path.exists(path):
            with open(path, "rb") as file:
                found[rank] = file.read()
    return found


def _unpickled(rank: int, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as reason:
        raise JobFailedError(
            f"run: the result of rank {rank} cannot be unpickled here: {type(reason).__name__}: {reason}: "
            "return plain data") from reason
