"""hvdrun end to end: bytes, exit codes, failures, signals, nothing left, light imports; and its pure parts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT, hvdrun

from hvdlite.launch.command import StartRequest, build_command, oversubscription_warning
from hvdlite.launch.mpi import Starter, StarterKind, parse_version

PYTHON = sys.executable


def _alive(job):
    """Living processes of a job, by the variable that hvdrun gives its ranks."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file, open(f"/proc/{pid}/stat") as stat:
                if f"MARK={job}".encode() in file.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(pid))
        except OSError:
            continue
    return found


def _wait_until(condition, timeout_s=15):
    """Poll until the condition holds; a deadline, not a guess at a duration."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_arguments_arrive_byte_for_byte():
    words = ["--msg", "a b", "--x=it's \"q\"", "", "*", "$HOME", "-np", "3", "--", "; echo hi", "back\\slash", "new\nline",
             "ümlaut", ":", os.fsdecode(b"\xff\xfe")]
    # One write, because ranks share the output and unbuffered Python writes the end of a line by itself.
    code = ("import sys, os, json; "
            "os.write(1, json.dumps([os.fsencode(a).decode('latin-1') for a in sys.argv[1:]]).encode() + b'\\n')")
    done = hvdrun(2, PYTHON, "-c", code, *words)
    assert done.returncode == 0, done.stderr
    expected = [os.fsencode(word).decode("latin-1") for word in words]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [expected] * 2


def test_environment_arrives_byte_for_byte():
    odd = {b"SP": b"a b", b"NL": b"a\nb", b"Q": b'"x"', b"E": b"", b"U": "ü".encode(), b"FOO.BAR": b"1",
           b"BASH_FUNC_f%%": b"() { echo 1\n}", b"RAW": b"\xff"}
    code = ("import os, json; e = os.environb; "
            "os.write(1, json.dumps({k.decode('latin-1'): v.decode('latin-1') for k, v in e.items()}).encode() + b'\\n')")
    done = hvdrun(2, PYTHON, "-c", code, env={**os.environb, **odd}, options=["--cycle-time-ms", "2.5"])
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    for one in seen:
        for name, value in odd.items():
            assert one[name.decode("latin-1")] == value.decode("latin-1")
        assert one["HVDLITE_CYCLE_TIME"] == "2.5" and one["HVDLITE_LAUNCHED_BY"] == "hvdrun" and one["PYTHONUNBUFFERED"] == "1"
    ranks = {one.get("PMI_RANK", one.get("PMIX_RANK")) for one in seen}
    assert ranks == {"0", "1"}


def _rank_code(body):
    return f"import os, sys, time; r = int(os.environ.get('PMI_RANK', os.environ.get('PMIX_RANK'))); {body}"


@pytest.mark.parametrize("body, code, says", [
    ("sys.exit(7 if r == 1 else 0)", 7, "rank 1 .* exit code 7"),
    ("os.kill(os.getpid(), 9) if r == 1 else time.sleep(60)", 137, "rank 1 .* SIGKILL"),
    ("sys.exit(5) if r == 0 else (time.sleep(0.5), sys.exit(6))", 5, "rank 0 .* exit code 5"),
])
def test_the_first_failing_rank_gives_the_exit_code(body, code, says):
    started = time.monotonic()
    done = hvdrun(2, PYTHON, "-c", _rank_code(body))
    assert done.returncode == code
    assert time.monotonic() - started < 15
    import re

    assert re.search(says, done.stderr), done.stderr


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace():
    body = "signal = __import__('signal').signal(15, 1); sys.exit(3) if r == 0 else time.sleep(60)"
    started = time.monotonic()
    done = hvdrun(2, PYTHON, "-c", _rank_code(body), options=["--unwind", "0.2", "--grace", "1"])
    assert done.returncode == 3 and time.monotonic() - started < 10


@pytest.mark.parametrize("code, says", [
    ("1/0 if h.rank() == 1 else [h.allreduce(1.0, name='x') for _ in range(9)]",
     "rank 1 failed: ZeroDivisionError: division by zero"),
    ("[h.allreduce(1.0, name='x') for _ in range(5 if h.rank() == 1 else 9)]", "rank 1 left"),
    ("sys.exit(7) if h.rank() == 1 else [h.allreduce(1.0, name='x') for _ in range(9)]", "rank 1 left"),
])
def test_a_rank_that_raises_or_leaves_ends_the_job_with_the_cause(code, says):
    started = time.monotonic()
    done = hvdrun(3, PYTHON, "-c", f"import sys, hvdlite as h; h.init(); h.barrier(); {code}")
    assert done.returncode == (7 if "exit(7)" in code else 1)
    assert says in done.stderr
    assert time.monotonic() - started < 20


def test_wrong_use_is_exit_2_without_a_traceback():
    for arguments, says in [
        (["-np", "0", "true"], "'0' is not a whole number"), (["-np", "x", "true"], "'x'"), (["true"], "-np"),
        (["-np", "2"], "command is missing"), (["-np", "2", "--cache-capacity", "x", "true"], "--cache-capacity"),
        (["-np", "2", "--no-such-flag", "true"], "--no-such-flag"),
    ]:
        done = subprocess.run(
            [PYTHON, "-m", "hvdlite.launch", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_command_that_cannot_run():
    done = hvdrun(2, "no-such-program-here")
    assert done.returncode == 127 and "no-such-program-here" in done.stderr
    done = hvdrun(2, ROOT / "README.md")
    assert done.returncode == 126 and "README.md" in done.stderr


def test_standard_input_of_a_surrounding_loop_is_left_alone():
    loop = f"printf 'a\\nb\\n' | while read x; do {PYTHON} -m hvdlite.launch -np 2 true; echo $x; done"
    done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["a", "b"]


def test_a_peer_that_left_is_survived_to_the_end_of_the_script():
    code = """
import numpy as np, hvdlite as h
h.init()
if h.rank() == 0:
    try:
        h.allreduce(np.ones(1))
    except h.HorovodInternalError as error:
        print(error)
    h.shutdown()
    print("end of script")
"""
    done = hvdrun(2, PYTHON, "-c", code, timeout_s=30)
    assert done.returncode == 0 and "rank 1 left" in done.stdout and done.stdout.endswith("end of script\n"), done.stderr


def _start(mark, code, *options):
    argv = [PYTHON, "-m", "hvdlite.launch", "-np", "2", *options, PYTHON, "-c", code]
    process = subprocess.Popen(
        argv, env={**os.environ, "MARK": mark}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, start_new_session=True,
        # A background job of a shell ignores it, and so would hvdrun.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for _ in range(2):
        assert "here" in process.stdout.readline()
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_everything(number, code):
    mark = f"signal-{os.getpid()}-{number}"
    process = _start(mark, "import os, time; os.write(1, b'here\\n'); time.sleep(60)")
    os.kill(process.pid, number)
    assert process.wait(20) == code
    _wait_until(lambda: not _alive(mark))


def test_kill_9_of_hvdrun_leaves_nothing():
    mark = f"kill-{os.getpid()}"
    process = _start(mark, "import os, time; os.write(1, b'here\\n'); time.sleep(60)")
    assert len(_alive(mark)) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    _wait_until(lambda: not _alive(mark))


def test_no_secret_on_any_command_line():
    mark = f"secret-{os.getpid()}"
    process = _start(mark, "import os, time; os.write(1, b'here\\n'); time.sleep(60)")
    try:
        lines = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                lines.append(open(f"/proc/{pid}/cmdline", "rb").read())
            except OSError:
                continue
        assert not any(mark.encode() in line for line in lines)
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)


def test_a_starter_of_another_mpi_is_named():
    # MPI is finalised nevertheless: its shared memory would stay else. What is registered first runs last.
    code = ("import atexit, sys\natexit.register(lambda: print('finalised:', sys.modules['mpi4py'].MPI.Is_finalized()))\n"
            "import hvdlite; hvdlite.init()")
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}
    done = subprocess.run([PYTHON, "-c", code], env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and "started 2 ranks, but" in done.stderr and "another MPI" in done.stderr
    assert done.stdout == "finalised: True\n"


def test_without_a_launcher_it_is_one_rank_and_no_mpi():
    code = ("import sys, hvdlite as h; h.init(); print(h.rank(), h.size(), h.allreduce(2.0), h.local_size()); "
            "assert 'mpi4py' not in sys.modules")
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["0", "1", "2.0", "1"], done.stderr


def test_init_again_after_shutdown_and_use_outside():
    code = """
import hvdlite as h
for call in (h.rank, h.size, lambda: h.allreduce(1.0)):
    try: call()
    except ValueError as error: assert isinstance(error, h.HorovodInternalError) and 'init' in str(error)
    else: raise SystemExit('no error before init')
assert not h.is_initialized()
for _ in range(3):
    h.init(); h.init()
    assert h.allreduce(1.0, op=h.Sum, name='x') == h.size()
    h.shutdown(); h.shutdown()
    assert not h.is_initialized()
try: h.allreduce(1.0)
except ValueError: pass
else: raise SystemExit('no error after shutdown')
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
    done = hvdrun(2, PYTHON, "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_gets_an_error_and_disturbs_nothing():
    code = """
import os, hvdlite as h
h.init(); h.barrier()
pid = os.fork()
if pid == 0:
    try: h.allreduce(1.0)
    except ValueError as error: assert 'forked' in str(error)
    else: os._exit(3)
    h.shutdown()
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert h.allreduce(1.0, op=h.Sum) == h.size()
"""
    done = hvdrun(2, PYTHON, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_launcher_imports_the_standard_library_only():
    code = ("import sys, hvdlite.launch.cli; foreign = [m for m in sys.modules if m.split('.')[0] in "
            "('numpy', 'mpi4py', 'torch', 'numba')]; assert not foreign, foreign")
    subprocess.run([PYTHON, "-c", code], check=True, timeout=60, cwd=ROOT)


def _request(kind, **changes):
    values = dict(starter=Starter(kind, "/x/mpiexec", (5,)), num_ranks=4, num_cpus=2, is_root=True, directory="/d", python="/p")
    return StartRequest(**{**values, **changes})


def test_commands_for_each_starter():
    hydra = build_command(_request(StarterKind.HYDRA)).argv
    assert hydra[:3] == ("/x/mpiexec", "-n", "4") and "--allow-run-as-root" not in hydra and hydra[-1] == "/d"
    prrte = build_command(_request(StarterKind.PRRTE))
    assert "--allow-run-as-root" in prrte.argv and "slot:OVERSUBSCRIBE" in prrte.argv
    assert prrte.environment == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert "--allow-run-as-root" not in build_command(_request(StarterKind.ORTE, is_root=False)).argv
    assert "share" in oversubscription_warning(_request(StarterKind.HYDRA))
    assert not oversubscription_warning(_request(StarterKind.HYDRA, num_ranks=2))


@pytest.mark.parametrize("text, kind", [
    ("mpirun (Open MPI) 4.1.6\n", StarterKind.ORTE), ("something else 1.0\n", None),
])
def test_versions_are_read(text, kind):
    starter = parse_version("/x", text)
    assert (starter.kind if starter else None) == kind
