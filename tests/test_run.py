"""hvdlite.run end to end: results, failures of every kind, Ctrl-C, other threads, nothing left."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from ranks import ROOT

import hvdlite
from hvdlite.launch.failure import Failure, JobFailedError, RemoteTraceback
from hvdlite.launch.run import run

PYTHON = sys.executable


class Odd(Exception):
    """Is pickled, and cannot be made from what that gives."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def ranked(action=lambda rank: None):
    """On each rank: init, the action, then a barrier that all must reach."""
    hvdlite.init()
    result = action(hvdlite.rank())
    hvdlite.barrier()
    return result


def total(offset, scale=1):
    hvdlite.init()
    return hvdlite.rank(), float(hvdlite.allreduce(scale * float(hvdlite.rank() + offset), op=hvdlite.Sum))


def test_results_are_in_rank_order():
    assert run(total, (1,), {"scale": 2}, np=3) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def test_lambdas_closures_and_large_arguments():
    base, large = 40, os.urandom(20_000_000)
    got = run(lambda data: (os.getpid(), base + 2, len(data), data[-9:]), (large,), np=2)
    assert [one[1:] for one in got] == [(42, len(large), large[-9:])] * 2
    assert len({os.getpid(), got[0][0], got[1][0]}) == 3
    assert run(lambda: None) == [None]


def test_what_the_caller_has_is_there(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "ü")
    (tmp_path / "only_here.py").write_text("value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import only_here

        print("printed by a rank")
        return os.getcwd(), os.environ["MINE"], os.environ["ADDED"], only_here.value

    assert run(look, env={"ADDED": "1"}, np=2) == [(str(tmp_path), "ü", "1", 7)] * 2
    assert "ADDED" not in os.environ
    assert capfd.readouterr().out.count("printed by a rank") == 2


def fail_on(rank_to_fail, make):
    def action(rank):
        if rank == rank_to_fail:
            raise make()

    return action


def test_a_ranks_exception_is_raised_with_its_traceback_and_its_rank(capfd):
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        run(ranked, (lambda rank: 1 // (1 - rank),), np=3)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback) and str(cause).startswith("rank 1 raised:\n\nTraceback")
    assert "in ranked" in str(cause) and "task.py" not in str(cause).split("in ranked")[0]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by rank 1"]
    assert "rank 1 failed: ZeroDivisionError" in capfd.readouterr().err  # the peers heard it as under hvdrun


@pytest.mark.parametrize("make, says", [
    (lambda: Odd(1, 2), "rank 0 raised Odd: 1 and 2"),
    (lambda: ValueError(threading.Lock()), "rank 0 raised ValueError: <unlocked"),
    (lambda: SystemExit(7), "rank 0 raised SystemExit: 7"),
    (lambda: SystemExit(0), "rank 0 raised SystemExit: 0"),
    (KeyboardInterrupt, "rank 0 raised KeyboardInterrupt"),
])
def test_exceptions_that_cannot_be_raised_here(make, says):
    with pytest.raises(RuntimeError, match=says) as caught:
        run(ranked, (fail_on(0, make),), np=2)
    assert isinstance(caught.value, JobFailedError) and "Traceback" in str(caught.value.__cause__)


def test_a_killed_rank_is_told_as_hvdrun_tells_it():
    with pytest.raises(RuntimeError, match=r"rank 1 .* failed first.*SIGKILL") as caught:
        run(ranked, (lambda rank: rank == 1 and os.kill(os.getpid(), signal.SIGKILL),), np=2)
    assert isinstance(caught.value, hvdlite.HvdliteError)


def test_a_rank_that_leaves_without_a_result():
    with pytest.raises(JobFailedError, match="rank 0 ended without a result"):
        run(lambda: os._exit(0) if "0" in (os.environ.get("PMI_RANK"), os.environ.get("PMIX_RANK")) else None, np=2)


def test_the_first_of_two_failures_counts():
    def action(rank):
        if rank == 1:
            time.sleep(1)
        raise ValueError(f"of rank {rank}")

    with pytest.raises(ValueError, match="of rank 0"):
        run(lambda: action(int(os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")))), np=2, unwind_s=3)


def test_results_that_cannot_travel():
    with pytest.raises(ValueError, match=r"result of rank 0, a lock, cannot be pickled"):
        run(ranked, (lambda rank: threading.Lock() if rank == 0 else None,), np=2)


def test_wrong_use_is_refused_before_anything_starts():
    for call, says in [
        (lambda: run(7), "cannot be called"), (lambda: run(len, (threading.Lock(),)), "cannot be pickled"),
        (lambda: run(len, np=0), "np 0"), (lambda: run(len, np="2"), "np '2'"), (lambda: run(len, np=True), "np True"),
    ]:
        with pytest.raises(hvdlite.InvalidRequestError, match=says):
            call()


def test_from_another_thread():
    got = []

    def body():
        got.append(run(total, (1,), np=2))
        try:
            run(ranked, (fail_on(1, lambda: KeyError("x")),), np=2)
        except KeyError as error:
            got.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(60)
    assert got[0] == [(0, 3.0), (1, 3.0)] and isinstance(got[1], KeyError)


SCRIPT = """
import os, signal, sys, threading, time
from hvdlite.launch.run import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background of a shell

class Mine(Exception):
    pass

class Point:
    def __init__(self, x):
        self.x = x

def wait():
    os.write(1, b"here\\n")
    time.sleep(60)

def points(rank_of=lambda: int(os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")))):
    return Point(rank_of())

def fail():
    raise Mine("my own", 3)

"""


def _script(body, **settings):
    return subprocess.Popen(
        [PYTHON, "-c", SCRIPT + body], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, start_new_session=True, **settings)


def test_what_main_defines_travels_both_ways():
    process = _script("""
assert [isinstance(p, Point) and p.x for p in run(points, np=2)] == [0, 1]
try: run(fail)
except Mine as error: assert error.args == ("my own", 3)
print("well")
""")
    out, err = process.communicate(timeout=60)
    assert out == "well\n", err


def _left(mark):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file, open(f"/proc/{pid}/stat") as stat:
                if f"MARK={mark}".encode() in file.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("where, number, ends", [
    ("run(wait, np=2)", signal.SIGINT, "caught"),
    ("thread = threading.Thread(target=lambda: run(wait, np=2)); thread.start(); thread.join()", signal.SIGINT, "caught"),
    ("run(wait, np=2)", signal.SIGTERM, ""),
    ("run(wait, np=2)", signal.SIGKILL, ""),
], ids=["ctrl-c", "ctrl-c, other thread", "SIGTERM", "SIGKILL"])
def test_the_callers_end_is_the_jobs(where, number, ends, tmp_path):
    mark = f"run-{os.getpid()}-{tmp_path.name}"
    body = f"try:\n    {where}\nexcept KeyboardInterrupt:\n    print('caught', flush=True)"
    process = _script(body, env={**os.environ, "MARK": mark, "TMPDIR": str(tmp_path)})
    for _ in range(2):
        assert "here" in process.stdout.readline()
    # A terminal's Ctrl-C goes to the whole group; other signals to one process.
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert out.strip() == ends, err
    deadline = time.monotonic() + 15
    while (_left(mark) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _left(mark) and not list(tmp_path.iterdir())


def test_the_supervising_process_is_killed(tmp_path):
    process = _script("run(wait, np=2)", env={**os.environ, "MARK": f"killed-{os.getpid()}", "TMPDIR": str(tmp_path)})
    for _ in range(2):
        assert "here" in process.stdout.readline()
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        (supervisor,) = file.read().split()
    os.kill(int(supervisor), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert "JobFailedError" in err and "SIGKILL" in err
    deadline = time.monotonic() + 15
    while (_left(f"killed-{os.getpid()}") or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _left(f"killed-{os.getpid()}") and not list(tmp_path.iterdir())


def test_importing_it_is_light():
    code = ("import sys, hvdlite.launch.run; foreign = [m for m in sys.modules if m.split('.')[0] in "
            "('numpy', 'mpi4py', 'torch', 'numba', 'cloudpickle')]; assert not foreign, foreign")
    subprocess.run([PYTHON, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_a_failure_survives_what_its_exception_does_not():
    try:
        raise Odd(1, 2)
    except Odd as error:
        failure = pickle.loads(pickle.dumps(Failure.of(3, error)))
    assert (failure.kind, failure.message, failure.pickled) == ("Odd", "1 and 2", b"")
    assert "rank 3 raised Odd" in str(failure.exception())
