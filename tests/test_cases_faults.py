"""Public bug reports as tests: ranks that die, leave, fork or stall, each in a job of its own.

Each test names the reports that seeded it and what went wrong there; its name starts with the case's letter and number.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from ranks import ROOT, hvdrun

PYTHON = sys.executable

#: How a job's code begins. ``tell`` prints values as a line of JSON.
START = """
import json, os, signal, subprocess, sys, threading, time
import numpy as np
import hvdlite as hvd
def tell(*values):
    os.write(1, (json.dumps(values) + "\\n").encode())
hvd.init()
r = hvd.rank()
"""


def told(done):
    """The values that the ranks told, in the order of the lines."""
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


ENDS = {
    "raises": """
if r == 1 and i == 5:
    tell("end", r, time.monotonic())
    raise RuntimeError("boom")
""",
    "returns": """
if r == 1 and i == 5:
    tell("end", r, time.monotonic())
    sys.exit(0)
""",
    "raises while another sleeps": """
if r == 0 and i == 5:
    time.sleep(300)
if r == 1 and i == 5:
    tell("end", r, time.monotonic())
    raise RuntimeError("boom")
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_d1_a_rank_raises_or_returns_early(end):
    """horovod/horovod#642, #575, #534, rwth-i6/returnn#314: the other ranks waited for ever."""
    code = START + """
tell("pid", r, os.getpid())
for i in range(10):
    exec(sys.argv[1])
    try:
        hvd.allreduce(float(i), name="x")
    except hvd.HorovodInternalError as error:
        tell("error", r, time.monotonic(), str(error))
        raise
"""
    done = hvdrun(3, PYTHON, "-c", code, ENDS[end], timeout_s=60)
    ended_s, lines = time.monotonic(), told(done)
    (failed_s,) = [line[2] for line in lines if line[0] == "end"]
    errors = {line[1]: line[2:] for line in lines if line[0] == "error"}
    assert errors.keys() == ({2} if "sleeps" in end else {0, 2})
    for at_s, text in errors.values():
        assert at_s - failed_s < 10 and "rank 1" in text
    if "raises" in end:
        assert all("RuntimeError: boom" in text for _, text in errors.values())
        assert [line for line in done.stderr.splitlines() if line == "RuntimeError: boom"] == ["RuntimeError: boom"]
    assert done.returncode not in (0, -signal.SIGKILL) and ended_s - failed_s < 20
    pids = [line[2] for line in lines if line[0] == "pid"]
    assert len(pids) == 3 and not any(map(is_alive, pids))


#: What rank 2 does in the sixth round.
KILL_ITSELF_IN_AN_ALLREDUCE = """
from hvdlite.dataplane.mpi import MpiPlane
allreduce_piece = MpiPlane._allreduce_piece
def second_piece(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def first_piece(*arguments):
    allreduce_piece(*arguments)
    MpiPlane._allreduce_piece = second_piece
MpiPlane._allreduce_piece = first_piece
"""


@pytest.mark.parametrize("in_round_5, number, code, says", [
    pytest.param("sys.exit(7)", None, 7, r"rank 2 \(pid \d+\) failed first, .*: exit code 7", marks=pytest.mark.slow),
    (KILL_ITSELF_IN_AN_ALLREDUCE, None, 137, r"rank 2 \(pid \d+\) failed first, .*: killed by SIGKILL"),
    ("", signal.SIGINT, 130, "ended by SIGINT"),
    pytest.param("", signal.SIGTERM, 143, "ended by SIGTERM", marks=pytest.mark.slow),
], ids=["exit", "kill", "ctrl_c", "terminate"])
def test_d2_killed_and_interrupted(in_round_5, number, code, says, tmp_path):
    """horovod/horovod#1994, #3060, #2656, #3886: ranks stayed behind, the exit code was 0, the timeline was broken."""
    program = START + """
child = subprocess.Popen(["sleep", "1000"])
tell("pids", os.getpid(), child.pid)
array = np.ones(10_000_000 // 8)
for i in range(1_000_000):
    if r == 2 and i == 5:
        exec(sys.argv[1])
    hvd.allreduce(array, name="x")
    if i == 10:
        tell("steady")
"""
    timeline = tmp_path / "timeline.json"
    process = subprocess.Popen(
        [PYTHON, "-m", "hvdlite.launch", "-np", "3", "--timeline-filename", timeline, PYTHON, "-c", program, in_round_5],
        # Smaller pieces than the array, so that there is a middle.
        env={**os.environ, "HVDLITE_MAX_MPI_COUNT": "500000"}, cwd=ROOT, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A background job of a shell ignores it, and so would hvdrun.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    lines = [json.loads(process.stdout.readline()) for _ in range(3 if number is None else 6)]
    started_s = time.monotonic()
    if number is not None:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code and re.search(says, stderr), stderr
    assert time.monotonic() - started_s < 15
    pids = [pid for line in lines if line[0] == "pids" for pid in line[1:]]
    assert len(pids) == 6 and not any(map(is_alive, pids))
    assert "ALLREDUCE" in {event["name"] for event in json.loads(timeline.read_text())}


#: Ten layers; at step 3 a hook in the middle of backward raises.
BACKWARD = """
import os, sys, time, torch, hvdlite.torch as hvd
def run(rounds, fails_on=()):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(10)]
    net = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), named_parameters=net.named_parameters())
    def fail(gradient):
        raise RuntimeError("boom")
    for i in rounds:
        torch.manual_seed(10 * i + hvd.rank())
        middle = net[:5](torch.randn(3, 4))
        if i == 3 and hvd.rank() in fails_on:
            middle.register_hook(fail)
        loss = net[5:](middle).square().mean()
        try:
            loss.backward()
        except RuntimeError:
            assert [one.weight.grad is not None for one in layers] == [False] * 5 + [True] * 5
            if len(fails_on) == 1:
                raise
            optimizer.synchronize()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.weight.detach().flatten() for one in layers])
"""


def test_d3_an_error_in_the_middle_of_backward():
    """rwth-i6/returnn#314, horovod/horovod#1421: one rank waited for ever; what had been submitted stood in the way."""
    code = BACKWARD + """
from hvdlite.runtime import default_runtime
for threshold_bytes in (1 << 22, 100, 0):
    os.environ["HVDLITE_FUSION_THRESHOLD"] = str(threshold_bytes)
    hvd.shutdown()
    hvd.init()
    failed, left_out = run(range(1, 5), fails_on=[0, 1]), run([1, 2, 4])
    assert torch.equal(failed, left_out), threshold_bytes
    assert (hvd.allgather(failed[None]) == failed).all()
    assert not default_runtime().background._pending
started_s = time.monotonic()
try:
    run(range(1, 5), fails_on=[1])
except hvd.HorovodInternalError as error:
    print("after", time.monotonic() - started_s, "s:", error)
    raise
"""
    done = hvdrun(2, PYTHON, "-c", code, timeout_s=90)
    told_after_s = re.search("^after (.*) s: rank 1 failed: RuntimeError: boom$", done.stdout, re.MULTILINE)
    assert told_after_s and float(told_after_s[1]) < 10, done.stderr
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line == "RuntimeError: boom"] == ["RuntimeError: boom"]


@pytest.mark.parametrize("imports_mpi", ["before", "after"])
def test_d4_forgotten_init_and_shutdown(imports_mpi):
    """horovod/horovod#532, #1675, #667, #2020: operations hung instead of failing, a second init broke."""
    code = f"""
import numpy as np
import hvdlite as hvd
if {imports_mpi == "before"}:
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
def refuses(*calls):
    for call in calls:
        try:
            call()
        except ValueError as error:
            assert "init()" in str(error), error
        else:
            raise SystemExit("no error")
refuses(hvd.rank, hvd.size, lambda: hvd.allreduce(1.0))
assert hvd.is_initialized() is False
for _ in range(3):
    hvd.init()
    hvd.init()
    assert hvd.is_initialized() and hvd.allreduce(1.0, name="x", op=hvd.Sum) == 2
    hvd.shutdown()
    hvd.shutdown()
    refuses(hvd.rank, lambda: hvd.allreduce(1.0, name="x"))
    assert not hvd.is_initialized()
hvd.init()
handle = hvd.allreduce_async(1.0, name="alone") if hvd.rank() == 0 else None
hvd.shutdown()
if handle:
    try:
        handle.wait(20)
    except hvd.HorovodInternalError as error:
        assert "'alone'" in str(error)
    else:
        raise SystemExit("no error")
hvd.init()
assert hvd.allreduce(1.0, name="alone", op=hvd.Sum) == 2
hvd.shutdown()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
assert MPI.COMM_WORLD.allreduce(1) == 2 and not MPI.Is_finalized()
"""
    done = hvdrun(2, PYTHON, "-c", code, timeout_s=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("context", [
    "fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)])
def test_d5_data_loader_workers(context, tmp_path):
    """horovod/horovod#1215, #2898, pytorch/pytorch#13787: workers inherited MPI, threads and exit handlers, and hung."""
    program = tmp_path / "program.py"
    program.write_text("""
import sys
import torch
import hvdlite.torch as hvd
if __name__ == "__main__":
    hvd.init()
    loader = torch.utils.data.DataLoader(
        range(64), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[1])
    for epoch in range(2):
        total = sum(hvd.allreduce(batch.sum(), op=hvd.Sum, name="batch").item() for batch in loader)
        assert total == 2 * sum(range(64)), (epoch, total)
""")
    done = hvdrun(2, PYTHON, program, context, timeout_s=100)
    assert done.returncode == 0, done.stderr


def test_d5_forked_processes():
    """horovod/horovod#2255, pytorch/pytorch#4934: a child ended its parent's job, or hung."""
    code = START + """
def in_child(body):
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert time.monotonic() - started_s < 5
    assert hvd.allreduce(1.0, op=hvd.Sum, name="parents") == 2
def submit():
    try:
        hvd.allreduce(1.0, name="child")
    except ValueError as error:
        assert "forked process" in str(error)
    else:
        os._exit(3)
hvd.barrier()
in_child(lambda: None)
in_child(submit)
in_child(hvd.shutdown)
"""
    done = hvdrun(2, PYTHON, "-c", code, timeout_s=60)
    assert done.returncode == 0, done.stderr


STALLS = """
import logging
from pathlib import Path
directory, shutdown_s, ticks = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "ticks"
for _ in range(5):
    for name in "ab":
        hvd.allreduce(1.0, name=name)

class Tell(logging.Handler):
    def emit(self, record):
        tell("warning", r, time.monotonic(), record.getMessage())
        with open(directory / "warnings", "a") as file:
            file.write("x")
logging.getLogger("hvdlite").addHandler(Tell())

def wait_for(what, number):
    deadline_s = time.monotonic() + 20
    while not (directory / what).exists() or len((directory / what).read_text()) < number:
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)

def tick():
    try:
        while True:
            assert hvd.allreduce(1.0, name="tick", op=hvd.Sum) == 3
    except hvd.HorovodInternalError:
        pass

thread = threading.Thread(target=tick)
if ticks:
    thread.start()
if r == 2:
    wait_for("errors" if shutdown_s else "warnings", 2)
tell("start", r, time.monotonic())
try:
    tell("sum", r, time.monotonic(), float(hvd.allreduce(1.0, name="a", op=hvd.Sum)))
except hvd.HorovodInternalError as error:
    tell("error", r, time.monotonic(), str(error))
    with open(directory / "errors", "a") as file:
        file.write("x")
if ticks:
    thread.join(10)
    assert not thread.is_alive()
"""


@pytest.mark.parametrize("shutdown_s, ticks", [
    pytest.param(4, "no ticks", marks=pytest.mark.slow), (4, "ticks"), pytest.param(0, "no ticks", marks=pytest.mark.slow)])
def test_d6_stalls(shutdown_s, ticks, tmp_path):
    """horovod/horovod#920, #902, #1550, #2315: no report of what was cached, or while another thread stayed busy."""
    done = hvdrun(3, PYTHON, "-c", START + STALLS, tmp_path, shutdown_s, ticks, timeout_s=60, options=[
        "--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", str(shutdown_s)])
    lines = told(done)
    (started_s,) = [line[2] for line in lines if line[:2] == ["start", 0]]
    warnings = [line[1:] for line in lines if line[0] == "warning" and "did not submit" in line[3]]
    times_s = [at_s for _, at_s, _ in warnings]
    assert times_s[0] - started_s < 3 and all(later - earlier > 0.9 for earlier, later in pairwise(times_s))
    for rank, _, text in warnings:
        assert rank == 0 and "rank 2 did not submit allreduce 'a'" in text
        assert not re.search(r"'b'|'tick'|rank [01]", text)
    if shutdown_s:
        errors = {line[1]: line[2:] for line in lines if line[0] == "error"}
        assert errors.keys() == {0, 1, 2}
        for rank in (0, 1):
            at_s, text = errors[rank]
            assert 4 <= at_s - started_s < 8 and "rank 2 did not submit allreduce 'a'" in text
    else:
        assert done.returncode == 0 and [line[3] for line in lines if line[0] == "sum"] == [3.0] * 3, done.stderr
        assert len(warnings) >= 2
