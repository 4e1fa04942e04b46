"""hvdrun on one host, as people use it: rows L1 to L25 of the launcher's table in the design, each in jobs of its own."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import pytest
from ranks import ROOT, hvdrun

PYTHON = sys.executable
HVDRUN = [PYTHON, "-m", "hvdlite.launch"]
RANK = "r = int(os.environ.get('PMIX_RANK', os.environ.get('PMI_RANK')))"


def _environment(**changes):
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **changes}


def _living(mark):
    """Living processes of a job, by a variable that its ranks have."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file, open(f"/proc/{pid}/stat") as stat:
                if f"MARK={mark}\0".encode() in file.read() and stat.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(pid))
        except OSError:
            continue
    return found


def _wait_until(condition, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def _heed_signals():
    """In the child: whoever started the tests, as nohup or a shell's background, may have had them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class _Job:
    """hvdrun in the background; its ranks write ``here`` once they are ready."""

    def __init__(self, mark, code, *options, ranks=2, **kwargs):
        self.mark = f"{mark}-{os.getpid()}"
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*HVDRUN, "-np", str(ranks), *options, PYTHON, "-c", f"import os, signal, sys, time; {RANK}\n{code}"],
            env=_environment(MARK=self.mark), stdin=kwargs.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE,
            stderr=self.errors, text=True, cwd=ROOT, start_new_session=True, preexec_fn=_heed_signals, **kwargs)
        for _ in range(ranks):
            assert "here" in self.process.stdout.readline(), self.said()

    def send(self, number):
        os.kill(self.process.pid, number)

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def end(self, timeout_s=20):
        out, _ = self.process.communicate(timeout=timeout_s)
        return out

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()
        self.errors.close()
        _wait_until(lambda: not _living(self.mark))


HERE = "os.write(1, b'here\\n')"

# -- L1, L2, L3: failures --------------------------------------------------------------------------------------------

#: How rank 1 fails, when ``t`` is written; the others sleep, unless they wait for it in a collective.
FAILURES = {
    "raise": ("raise RuntimeError('boom')", 1, "RuntimeError: boom"),
    "exit7": ("sys.exit(7)", 7, "exit code 7"),
    "sigsegv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "in_allreduce": ("raise RuntimeError('boom')", 1, "RuntimeError: boom"),
    "ignore_term": ("raise RuntimeError('boom')", 1, "RuntimeError: boom"),
}
FAIL = """
import os, signal, sys, time
mode, failure = sys.argv[1:]
if mode in ("in_allreduce", "raise_in_mpi"):
    import hvdlite as hvd
    hvd.init()
    hvd.allreduce(1.0, name="warm")
r = int(os.environ.get("PMIX_RANK", os.environ.get("PMI_RANK")))
if mode == "ignore_term" and r != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if r == 1:
    time.sleep(0.1 if mode != "ignore_term" else 0.3)
    os.write(1, b"failed %f\\n" % time.monotonic())
    exec(failure)
if mode == "in_allreduce":
    hvd.allreduce(1.0, name="x")
time.sleep(60)
"""
ROUNDS = int(os.environ.get("HVDLITE_FAILURE_ROUNDS", "1"))


def _fail(mode, grace_s, ranks=2):
    failure, code, says = FAILURES[mode]
    mark = f"L1-{mode}-{os.getpid()}"
    done = hvdrun(ranks, PYTHON, "-c", FAIL, mode, failure, options=["--grace", str(grace_s)], env=_environment(MARK=mark))
    ended_s = time.monotonic()
    failed_s = float(re.search(r"^failed (\S+)$", done.stdout, re.MULTILINE)[1])
    return done, ended_s - failed_s, code, says, _living(mark)


@pytest.mark.parametrize("mode", FAILURES)
def test_l1_l2_l3_a_failure_ends_all_in_time_with_its_code_and_cause(mode):
    for _ in range(ROUNDS):
        done, took_s, code, says, orphans = _fail(mode, 2)
        assert done.returncode == code, done.stderr
        # One second to unwind, two of grace, one for the ends themselves.
        assert took_s < 4 and not orphans, (took_s, orphans)
        assert re.search(r"rank 1 \(pid \d+\) failed first", done.stderr) and says in done.stderr, done.stderr
        assert "BAD TERMINATION" not in done.stdout + done.stderr  # the starter's own guess at what happened


def test_l1_a_rank_that_raises_after_mpi_was_initialised_by_others_does_not_hang_in_finalize():
    code = (f"import os, time; {RANK}\nfrom mpi4py import MPI\nif r == 1:\n    raise RuntimeError('boom')\n"
            "MPI.COMM_WORLD.Barrier()")
    started_s = time.monotonic()
    done = hvdrun(2, PYTHON, "-c", code, options=["--grace", "2"])
    assert done.returncode == 1 and time.monotonic() - started_s < 10
    assert "rank 1" in done.stderr and done.stderr.splitlines()[-1] == "RuntimeError: boom", done.stderr


def test_l3_the_traceback_of_the_first_is_last_and_others_are_one_line_each():
    code = f"""import os, time; {RANK}
def work():
    raise RuntimeError("boom" if r == 2 else "a later one")
if r in (1, 2):
    time.sleep(0.3 * (2 - r))
    work()
time.sleep(60)"""
    done = hvdrun(4, PYTHON, "-c", code, options=["--unwind", "1", "--grace", "1"])
    lines = done.stderr.splitlines()
    box = lines[next(index for index, line in enumerate(lines) if "the job failed" in line):]
    assert done.returncode == 1 and box[-1] == "RuntimeError: boom" and len(box) < 25
    assert '  File "<string>", line 3, in work' in box
    assert "rank 2 (pid" in box[1]
    assert sum("Rank 1 also failed by itself" in line and "RuntimeError: a later one" in line for line in box) == 1
    assert sum("Ranks 0, 3 were then ended by hvdrun" in line for line in box) == 1
    assert "hvdlite/launch" not in done.stderr and done.stderr.count("RuntimeError: boom") <= 3


def test_l3_a_crash_shows_the_line_of_python_that_led_there():
    code = f"import os, ctypes, time; {RANK}\nif r == 1: ctypes.string_at(0)\ntime.sleep(60)"
    done = hvdrun(2, PYTHON, "-c", code)
    assert done.returncode == 139 and "Fatal Python error: Segmentation fault" in done.stderr
    assert "SIGSEGV: native code touched memory" in done.stderr and "string_at" in done.stderr.split("the job failed")[1]


# -- L4, L5: ends and signals ----------------------------------------------------------------------------------------


def test_l4_nothing_is_left_after_kill_9_of_hvdrun_even_of_ranks_that_ignore_everything():
    code = f"""
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
import subprocess
child = subprocess.Popen(["sleep", "60"])
{HERE}
time.sleep(60)"""
    with _Job("L4", code) as job:
        assert len(_living(job.mark)) >= 4
        job.send(signal.SIGKILL)
        _wait_until(lambda: not _living(job.mark), 3)


def test_l4_nothing_is_left_when_a_guard_is_killed():
    code = f"import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n{HERE}\ntime.sleep(60)"
    with _Job("L4g", code, "--grace", "1") as job:
        words = {pid: open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0") for pid in _living(job.mark)}
        guards = [pid for pid, argv in words.items() if argv[3:] and argv[3].endswith(b"/guard.py")]
        assert len(guards) == 2
        os.kill(guards[0], signal.SIGKILL)
        job.end(15)
        # Hydra then kills the other guards as well; the kernel ends the ranks with them.
        assert job.process.returncode and re.search(r"guard was killed.*rank|rank \d.*its guard", job.said()), job.said()


def test_l4_nothing_is_left_when_the_terminal_is_closed():
    here, there = pty.openpty()
    mark = f"L4t-{os.getpid()}"
    code = "import os, time; os.write(1, b'here\\n'); time.sleep(60)"
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *HVDRUN, "-np", "2", "--prefix", "", PYTHON, "-c", code], stdin=there, stdout=there,
        stderr=there, env=_environment(MARK=mark), cwd=ROOT, preexec_fn=_heed_signals)
    os.close(there)
    seen = b""
    while seen.count(b"here") < 2:
        seen += os.read(here, 4096)
    os.close(here)
    _wait_until(lambda: not _living(mark), 5)
    process.wait(10)


def _without_mark(pattern):
    """Living processes by their command line, whatever became of their environment."""
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if pattern in _command_line(pid)]


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@pytest.mark.parametrize("how", ["sigterm", "fails", "hvdrun killed"])
def test_l4_nothing_is_left_of_groups_and_sessions_of_their_own(how):
    seconds = f"77.{os.getpid()}{len(how)}"
    own_session = f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)" if how != "hvdrun killed" else ""
    code = (f"import subprocess\nsubprocess.Popen(['timeout', '100', 'sleep', '{seconds}'])\n{own_session}\ntime.sleep(0.3)\n"
            f"{HERE}\nif r == 1 and {how == 'fails'}: sys.exit(3)\ntime.sleep(60)")
    with _Job("L4s", code, "--grace", "1") as job:
        if how != "fails":
            assert _without_mark(seconds)
            job.send(signal.SIGTERM if how == "sigterm" else signal.SIGKILL)
        job.end()
        assert job.process.returncode == {"sigterm": 143, "fails": 3, "hvdrun killed": -9}[how], job.said()
        _wait_until(lambda: not _without_mark(f"sleep {seconds}"), 3)


CHECKPOINT = f"""
def save(number, frame):
    os.write(1, b"saved\\n")
    os._exit(0)
signal.signal(signal.SIGINT, save)
{HERE}
time.sleep(60)"""


def test_l5_the_first_ctrl_c_reaches_the_ranks_which_may_save():
    with _Job("L5", CHECKPOINT) as job:
        job.send(signal.SIGINT)
        assert job.end().count("saved") == 2 and job.process.returncode == 130
        assert "SIGINT was passed on; the ranks have 5 s" in job.said()


def test_l5_the_second_ctrl_c_ends_them_now():
    with _Job("L5b", f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{HERE}\ntime.sleep(60)", "--grace", "30") as job:
        job.send(signal.SIGINT)
        _wait_until(lambda: "Ctrl-C again" in job.said())
        job.send(signal.SIGINT)
        started_s = time.monotonic()
        job.end()
        assert job.process.returncode == 130 and time.monotonic() - started_s < 2


def test_l5_ctrl_c_counts_after_a_failure_too_and_nothing_is_started_again():
    code = (f"for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n{HERE}\n"
            "if r == 1: time.sleep(0.3); sys.exit(7)\ntime.sleep(60)")
    with _Job("L5r", code, "--grace", "30", "--restarts", "3", "--unwind", "0.2") as job:
        time.sleep(1.5)
        started_s = time.monotonic()
        job.send(signal.SIGINT)
        _wait_until(lambda: "Ctrl-C again" in job.said())
        job.send(signal.SIGINT)
        job.end()
        assert job.process.returncode == 7 and time.monotonic() - started_s < 5
        assert "exit code 7" in job.said() and "starting again" not in job.said(), job.said()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_l5_sigterm_and_sighup_are_forwarded(number, code):
    with _Job("L5c", CHECKPOINT.replace("SIGINT", number.name)) as job:
        job.send(number)
        assert job.end().count("saved") == 2 and job.process.returncode == code


def test_l5_sigusr1_is_forwarded_and_the_job_goes_on():
    code = f"""
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
{HERE}
while not seen: time.sleep(0.02)
os.write(1, b"told\\n")"""
    with _Job("L5d", code) as job:
        job.send(signal.SIGUSR1)
        assert job.end().count("told") == 2 and job.process.returncode == 0


# -- L6, L7, L22: what arrives ---------------------------------------------------------------------------------------


def test_l6_the_directory_may_have_a_space_and_the_script_too(tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "my script.py").write_text("import os, sys; os.write(1, (os.getcwd() + '|' + sys.argv[1] + chr(10)).encode())")
    done = subprocess.run([*HVDRUN, "-np", "2", "my script.py", "x y"], cwd=folder, env=_environment(), capture_output=True,
                          text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stdout.splitlines() == [f"{folder}|x y"] * 2, done.stderr


def test_l7_secrets_are_passed_only_when_named_and_never_on_a_command_line():
    code = "import os; os.write(1, (str([os.environ.get(n) for n in ('MY_TOKEN', 'A_TOKEN', 'NEW')]) + chr(10)).encode())"
    environment = _environment(MY_TOKEN="canary", A_TOKEN="other")
    done = hvdrun(2, PYTHON, "-c", code, env=environment, options=["-x", "MY_TOKEN", "-x", "NEW=a b"])
    assert done.stdout.splitlines() == ["['canary', None, 'a b']"] * 2
    assert "do not get A_TOKEN" in done.stderr and "canary" not in done.stderr and "other" not in done.stderr.split("A_TOKEN")[1]
    done = hvdrun(2, PYTHON, "-c", code, env=environment, options=["--env-all"])
    assert done.stdout.splitlines() == ["['canary', 'other', None]"] * 2 and "A_TOKEN" not in done.stderr


def test_l22_settings_say_where_they_come_from(tmp_path):
    (tmp_path / "c.toml").write_text('np = 2\ngrace = 3\n[env]\nFROM_FILE = "a b"\n')
    base = [*HVDRUN, "--config", str(tmp_path / "c.toml")]
    environment = _environment(HVDLITE_NP="3")

    def run(*arguments, **changes):
        return subprocess.run([*base, *arguments], env={**environment, **changes}, capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, cwd=ROOT)

    told = {line.split()[0]: line for line in run("--explain", "-np", "4").stdout.splitlines() if line.split()}
    assert "4" in told["np"] and "command line" in told["np"] and "3" in told["grace"] and "c.toml" in told["grace"]
    lines = run("--explain", "env", A_TOKEN="x").stdout
    assert "A_TOKEN  (withheld" in lines and "FROM_FILE  (passed" in lines
    done = run("-np", "2", "sh", "-c", 'echo "$FROM_FILE"')
    assert done.stdout.splitlines() == ["a b"] * 2
    (tmp_path / "c.toml").write_text("npp = 2\n")
    done = run("true")
    assert done.returncode == 2 and "did you mean 'np'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments, says", [
    (["-np", "2", "-H", "localhost:1", "true"], "-np 2: more ranks than the 1 slots"), (["-H", "localhost:0", "true"], "0 slots"),
    (["-H", "a:1", "b:1", "true"], "separated by commas"), (["-H", "::1:2", "true"], "[::1]:2"),
    (["-np", "2", "-H", "localhost", "--hostfile", "x", "true"], "leave one of them out"),
    (["--hostfile", "/no/such/file", "true"], "cannot be read"), (["-np", "2", "--prefix", "{rnk}", "true"], "{rank}"),
    (["-np", "2", "--stdin", "2", "true"], "ranks 0 to 1"), (["-np", "2", "--min-np", "1", "true"], "--restarts"),
    (["-np", "2", "-H", "nosuch.invalid:2", "true"], "nosuch.invalid"),
])
def test_e3_what_cannot_be_is_exit_2_and_starts_nothing(arguments, says):
    started_s = time.monotonic()
    done = subprocess.run([*HVDRUN, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT, stdin=subprocess.DEVNULL,
                          env=_environment())
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert time.monotonic() - started_s < 12


def test_e3_a_bad_hostfile_is_told_with_file_line_and_text(tmp_path):
    (tmp_path / "hosts.txt").write_text("localhost slots=1\n\nh slots=two\n")
    done = subprocess.run([*HVDRUN, "--hostfile", "hosts.txt", "true"], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                          env=_environment(), stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and "hosts.txt:3: 'slots=two' is not a number" in done.stderr and "Traceback" not in done.stderr


# -- L10, L15, L19, L25: looking, starting ---------------------------------------------------------------------------


def test_l10_a_dry_run_starts_nothing_and_says_all(tmp_path):
    canary = tmp_path / "started"
    done = hvdrun(2, "touch", canary, options=["--dry-run", "--json", "-H", "nosuch.invalid:1,h2:1"])
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and not canary.exists()
    assert [(row["rank"], row["host"], row["local_rank"]) for row in facts["placement"]] == [
        (0, "nosuch.invalid", 0), (1, "h2", 0)]
    assert facts["command"][0] == "touch" and "mpi" in facts["starter"][0] + facts["mpi"]
    text = hvdrun(2, "true", options=["--dry-run"]).stdout
    # Not a single connection to the hosts is opened.
    assert not _connections(["-H", "127.0.0.1:1,127.0.0.2:1", "--dry-run", "true"])
    assert "rank 1: localhost, local rank 1 of 2" in text and text.endswith("nothing was started\n")


def _connections(arguments):
    """Calls of connect() to the network in a run of hvdrun, by Python's audit events."""
    code = ("import sys\nsys.addaudithook(lambda event, args: event == 'socket.connect' and print('CONNECT', args[1:]))\n"
            f"from hvdlite.launch.cli import main\nsys.argv = ['hvdrun', *{arguments!r}]\nsys.exit(main())")
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=_environment())
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("CONNECT")]


def test_a_rank_may_itself_be_hvdrun():
    done = hvdrun(2, *HVDRUN, "-np", "2", PYTHON, "-c", "import hvdlite as h; h.init(); print('size', h.size(), flush=True)")
    assert done.returncode == 0 and done.stdout.splitlines() == ["size 2"] * 4, done.stderr


def test_l9_a_local_job_within_an_allocation_starts_here():
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODELIST": "n[1-2]", "SLURM_NNODES": "2",
                  "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NUM_NODES": "2"}
    done = hvdrun(2, "sh", "-c", 'echo "$SLURM_JOB_ID"', options=["-H", "localhost:2"], env=_environment(**allocation))
    assert done.returncode == 0 and done.stdout.splitlines() == ["7"] * 2, done.stderr


def test_check_build_says_what_there_is():
    done = subprocess.run([*HVDRUN, "--check-build"], capture_output=True, text=True, timeout=60, cwd=ROOT, env=_environment())
    assert done.returncode == 0 and re.search(r"MPICH|Open MPI", done.stdout) and "hvdlite" in done.stdout


def test_l15_root_and_more_ranks_than_processors_are_a_warning():
    one = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(["taskset", "-c", one, *HVDRUN, "-np", "3", "true"], capture_output=True, text=True, timeout=60,
                          cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stderr.count("warning") == 1 and "3 ranks on 1 allowed processor:" in done.stderr


def test_l15_without_any_starter_the_error_names_the_ways_out():
    done = subprocess.run([*HVDRUN, "-np", "2", "--starter", "/no/such/mpiexec", "true"], capture_output=True, text=True,
                          timeout=60, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and "/no/such/mpiexec" in done.stderr and "Traceback" not in done.stderr


THREADS = "import os; os.write(1, (os.environ['OMP_NUM_THREADS'] + ' ' + str(len(os.sched_getaffinity(0))) + chr(10)).encode())"


@pytest.mark.parametrize("arguments", [[], ["--launcher", "mpi"]])
def test_l15_without_a_path_what_mpi4py_is_bound_to_is_found_or_explained(tmp_path, arguments):
    done = subprocess.run([*HVDRUN, "-np", "2", *arguments, PYTHON, "-c", "print('here', flush=True)"], capture_output=True,
                          text=True, timeout=60, cwd=ROOT, env=_environment(PATH=str(tmp_path)), stdin=subprocess.DEVNULL)
    if done.returncode:
        assert done.returncode == 2 and "pip install" in done.stderr and "--starter" in done.stderr, done.stderr
    else:
        assert done.stdout.split() == ["here"] * 2
    assert "Traceback" not in done.stderr


def test_l19_threads_follow_the_allowed_processors_unless_the_user_said():
    environment = {name: value for name, value in _environment().items() if name != "OMP_NUM_THREADS"}

    def run(prefix, ranks, **changes):
        done = subprocess.run([*prefix, *HVDRUN, "-np", str(ranks), PYTHON, "-c", THREADS], env={**environment, **changes},
                              capture_output=True, text=True, timeout=60, cwd=ROOT, stdin=subprocess.DEVNULL)
        return done.stdout.splitlines()

    cpus = len(os.sched_getaffinity(0))
    one = str(min(os.sched_getaffinity(0)))
    assert run(["taskset", "-c", one], 2) == ["1 1"] * 2
    assert run([], 1) == [f"{cpus} {cpus}"]
    assert run([], 1, OMP_NUM_THREADS="5") == [f"5 {cpus}"]


def test_l25_modules_scripts_and_programs(tmp_path):
    (tmp_path / "mod.py").write_text("import sys; print(sys.argv[1:], flush=True)")
    for command in (["-m", "mod", "--", "--x", "1"], ["-m", "mod", "--x", "1"], ["mod.py", "--x", "1"],
                    ["--", "mod.py", "--x", "1"]):
        done = subprocess.run([*HVDRUN, "-np", "1", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                              env=_environment(), stdin=subprocess.DEVNULL)
        assert done.stdout == "['--x', '1']\n", (command, done.stderr)


# -- L14: the control connection -------------------------------------------------------------------------------------


def _sockets():
    return {name: os.path.join(tempfile.gettempdir(), name) for name in os.listdir(tempfile.gettempdir())
            if name.startswith("hvdrun-") and os.path.exists(os.path.join(tempfile.gettempdir(), name, "socket"))}


def _frame(kind, payload):
    return struct.pack("!IB", len(payload) + 1, ord(kind)) + payload


def _hello(**changes):
    hello = {"kind": "hello", "rank": "0", "pid": 1, "nonce": "n", "cpus": [], "now_ns": 0, **changes}
    return _frame("J", json.dumps(hello).encode())


@pytest.mark.parametrize("greeting", [
    _hello(), _hello(proof="0" * 64), _frame("J", b"garbage"), struct.pack("!IB", 1 << 30, ord("J")), _frame("J", b" " * 5000),
    _frame("P", b"\x80\x04\x95"), b"GET / HTTP/1.1\r\n\r\n", b""],
    ids=["no proof", "wrong proof", "no JSON", "a gigabyte announced", "5000 bytes", "unknown kind", "HTTP", "nothing"])
def test_l14_strangers_are_refused_and_told_and_the_job_goes_on(greeting):
    before = _sockets()
    with _Job("L14", f"{HERE}\nsys.stdin.close()\ntime.sleep(1.0)") as job:
        (path,) = [path for name, path in _sockets().items() if name not in before
                   and open(os.path.join(path, "owner")).read().split()[0] == str(job.process.pid)]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(os.path.join(path, "socket"))
            challenge = stranger.recv(4096)
            assert b'"challenge"' in challenge and b"argv" not in challenge
            with contextlib.suppress(OSError):
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
            try:
                assert stranger.recv(4096) == b"", "a stranger was told something"
            except ConnectionResetError:
                pass
        job.end()
        assert job.process.returncode == 0 and "refused" in job.said() and "token" in job.said(), job.said()


def test_l14_the_directory_is_the_user_s_only_and_no_port_is_open():
    before = _sockets()
    with _Job("L14p", f"{HERE}\ntime.sleep(60)") as job:
        (path,) = [path for name, path in _sockets().items() if name not in before
                   and open(os.path.join(path, "owner")).read().split()[0] == str(job.process.pid)]
        assert os.stat(path).st_mode & 0o777 == 0o700 and os.stat(os.path.join(path, "token")).st_mode & 0o777 == 0o600
        inodes = set()
        for descriptor in os.listdir(f"/proc/{job.process.pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{job.process.pid}/fd/{descriptor}")))
        tables = [line.split() for name in ("tcp", "tcp6")
                  for line in open(f"/proc/{job.process.pid}/net/{name}").readlines()[1:]]
        assert inodes and not [row for row in tables if row[9] in inodes]
    assert not os.path.exists(path)


@pytest.mark.slow
def test_l14_jobs_side_by_side_do_not_disturb_each_other():
    code = f"import os, hvdlite as h; h.init(); {RANK}; assert h.allreduce(float(r), op=h.Sum) == 1"
    jobs = [subprocess.Popen([*HVDRUN, "-np", "2", PYTHON, "-c", code], cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL) for _ in range(8)]
    assert [job.wait(120) for job in jobs] == [0] * 8


# -- L16, L17: output, input -----------------------------------------------------------------------------------------


def test_l16_many_lines_of_all_ranks_are_whole_complete_and_in_order():
    num_ranks, num_lines = 4, 50_000
    code = (f"import os, sys; {RANK}\nfor i in range({num_lines}): sys.stdout.write('%d %d %s\\n' % (r, i, 'x' * 190))")
    done = hvdrun(num_ranks, PYTHON, "-c", code, env=_environment(PYTHONUNBUFFERED=""), timeout_s=120)
    seen = {rank: [] for rank in range(num_ranks)}
    for line in done.stdout.splitlines():
        rank, index, filling = line.split(" ")
        assert filling == "x" * 190
        seen[int(rank)].append(int(index))
    assert seen == {rank: list(range(num_lines)) for rank in range(num_ranks)}, done.stderr


def test_l16_bytes_that_are_no_text_pass_and_prefixes_tell_the_rank(tmp_path):
    code = f"import os; {RANK}\nos.write(1, b'\\xff\\xfe\\n')\nos.write(2, b'%d\\n' % r)"
    done = subprocess.run([*HVDRUN, "-np", "2", "--prefix", "<{rank}> ", "--output-dir", str(tmp_path / "o"), PYTHON, "-c", code],
                          capture_output=True, timeout=60, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL)
    assert done.stdout == b"<0-1> \xff\xfe\n" or sorted(done.stdout.splitlines()) == [b"<0> \xff\xfe", b"<1> \xff\xfe"]
    assert sorted(done.stderr.splitlines()) == [b"<0> 0", b"<1> 1"]
    assert (tmp_path / "o/rank.1/stdout").read_bytes() == b"\xff\xfe\n" and (tmp_path / "o/rank.1/stderr").read_bytes() == b"1\n"


def test_l16_a_first_line_comes_at_once_and_a_reader_that_stops_costs_no_memory():
    code = "import os, sys\nprint('here')\nfor _ in range(400): os.write(1, b'x' * 99999 + b'\\n')"
    process = subprocess.Popen([*HVDRUN, "-np", "2", PYTHON, "-c", code], cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout.readline() == b"here\n"
        time.sleep(1.0)  # unread, while 80 MB wait to be written
        with open(f"/proc/{process.pid}/status") as status:
            peak_kb = int(re.search(r"VmHWM:\s+(\d+)", status.read())[1])
        assert peak_kb < 100_000
        rest = process.stdout.read()
        assert rest.count(b"x" * 99999 + b"\n") == 800 and process.wait(20) == 0
    finally:
        process.kill()
        process.stdout.close()


def test_l16_a_reader_that_leaves_does_not_end_the_job(tmp_path):
    mark = tmp_path / "done"
    code = (f"import os, time; {RANK}\nfor i in range(50): os.write(1, b'line\\n'); time.sleep(0.005)\n"
            f"open({str(mark)!r} + str(r), 'w')")
    line = f"{PYTHON} -m hvdlite.launch -np 2 {PYTHON} -c \"$CODE\" | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=_environment(CODE=code), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "line\n" and len(list(tmp_path.iterdir())) == 2


def test_l16_files_that_cannot_be_written_are_told_and_cost_no_job(tmp_path):
    done = hvdrun(2, "true", options=["--output-dir", "/proc/x"])
    assert done.returncode == 2 and "--output-dir /proc/x" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "rank.0").mkdir()
    os.symlink("/dev/full", tmp_path / "rank.0/stdout")
    done = hvdrun(2, PYTHON, "-c", "print('a', flush=True)", options=["--output-dir", tmp_path])
    assert done.returncode == 0 and done.stdout == "a\na\n" and done.stderr.count("the files end here") == 1, done.stderr


def test_l17_a_rank_that_reads_nothing_costs_no_memory():
    feed = subprocess.Popen(["head", "-c", "200000000", "/dev/zero"], stdout=subprocess.PIPE)
    try:
        with _Job("L17", f"{HERE}\ntime.sleep(2)\nsys.stdin.close()", "--stdin", "0", stdin=feed.stdout) as job:
            time.sleep(1.0)
            for pid in _living(job.mark):
                with open(f"/proc/{pid}/status") as status:
                    assert int(re.search(r"VmHWM:\s+(\d+)", status.read())[1]) < 100_000
            job.end()
            assert job.process.returncode == 0
    finally:
        feed.kill()
        feed.wait()
        feed.stdout.close()


def test_closed_standard_descriptors_are_nobody_else_s():
    line = f'{PYTHON} -m hvdlite.launch -np 2 --stdin 0 {PYTHON} -c "import sys; sys.exit(len(sys.stdin.read()))" <&- 2>&-'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout == ""


def test_l17_stdin_reaches_the_rank_that_was_named():
    code = f"import os, sys; {RANK}\nos.write(1, b'%d %r\\n' % (r, sys.stdin.read()))".replace("%r", "%a")
    for option, expected in (("0", {"0": "'a\\nb\\n'", "1": "''"}), ("all", {"0": "'a\\nb\\n'", "1": "'a\\nb\\n'"})):
        done = subprocess.run([*HVDRUN, "-np", "2", "--stdin", option, PYTHON, "-c", code], cwd=ROOT, env=_environment(),
                              input="a\nb\n", capture_output=True, text=True, timeout=60)
        assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == expected, done.stderr


# -- L18: hangs ------------------------------------------------------------------------------------------------------

HANG = """
import ctypes, os, sys, time, threading
import hvdlite as hvd
hvd.init()
mode, r = sys.argv[1], hvd.rank()
hvd.allreduce(1.0, name="warm")
if mode == "sleep" and r == 1:
    time.sleep(60)  # sleeps
elif mode == "skip_tensor" and r == 1:
    hvd.allreduce(1.0, name="grad8")
elif mode == "deadlock_lock" and r == 1:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # locks
elif mode == "native" and r == 1:
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)  # native code that keeps the interpreter's lock
elif mode == "wrong_order":
    first, then = ("grad7", "grad8") if r == 0 else ("grad8", "grad7")
    hvd.allreduce(1.0, name=first)
    hvd.allreduce(1.0, name=then)
hvd.allreduce(1.0, name="grad7")
"""


@pytest.mark.parametrize("mode, says", [
    ("sleep", r"rank 1: is at hang\.py:8 .*sleeps"), ("skip_tensor", r"rank 1: wait in allreduce 'grad8' at hang\.py:10"),
    ("deadlock_lock", r"rank 1: is at hang\.py:14 .*locks"), ("native", r"rank 1: is at hang\.py:18 .*native code")])
def test_l18_a_hang_is_told_with_rank_tensor_and_line_and_ended(tmp_path, mode, says):
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    started_s = time.monotonic()
    done = hvdrun(2, PYTHON, script, mode, options=["--hang-timeout", "2", "--grace", "1"])
    assert done.returncode == 124 and time.monotonic() - started_s < 20, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert "rank 0: wait in allreduce 'grad7' at hang.py:23" in done.stderr
    assert re.search(r"grad7'?: submitted \d+ s ago by rank 0; waits for rank 1", done.stderr), done.stderr


def test_l18_two_orders_are_told_with_both_tensors_and_lines(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    done = hvdrun(2, PYTHON, script, "wrong_order", options=["--hang-timeout", "2", "--grace", "1"])
    assert done.returncode == 124, done.stderr
    for rank, name in enumerate(("grad7", "grad8")):
        assert f"rank {rank}: wait in allreduce '{name}' at hang.py:21" in done.stderr, done.stderr
        assert re.search(rf"{name}'?: submitted \d+ s ago by rank {rank}; waits for rank {1 - rank}", done.stderr), done.stderr


@pytest.mark.parametrize("failure, says", [
    ("hvd.allreduce([1.0] * (1 + r), name='grad7')", r"grad7'.*rank 0 has \(1,\).*rank 1 has \(2,\)"),
    ("if r == 0: hvd.allreduce(1.0, name='grad7')", r"grad7'.*rank 1")], ids=["wrong_shape", "early_exit0"])
def test_l18_what_need_not_hang_ends_at_once_with_rank_and_tensor(tmp_path, failure, says):
    script = tmp_path / "wrong.py"
    script.write_text(f"import hvdlite as hvd\nhvd.init()\nr = hvd.rank()\nhvd.allreduce(1.0, name='warm')\n{failure}\n")
    started_s = time.monotonic()
    done = hvdrun(2, PYTHON, script, options=["--hang-timeout", "30"])
    assert time.monotonic() - started_s < 15 and done.returncode == 1, done.stderr
    assert re.search(says, done.stderr) and "wrong.py\", line 5" in done.stderr, done.stderr


def test_l18_a_rank_that_is_slow_to_begin_is_no_hang():
    code = f"import os, time; {RANK}\nif r == 1: time.sleep(3)\nprint('here', flush=True)"
    done = hvdrun(2, PYTHON, "-c", code, options=["--hang-timeout", "1"])
    assert done.returncode == 0 and done.stdout.split() == ["here"] * 2, done.stderr


def test_l18_sigquit_shows_the_stacks_and_the_job_goes_on():
    code = f"def work():\n    {HERE}\n    time.sleep(2.5)\nwork()"
    with _Job("L18q", code) as job:
        time.sleep(0.2)
        job.send(signal.SIGQUIT)
        job.end()
        assert job.process.returncode == 0 and "ranks 0-1: is at <string>:4 (work)" in job.said(), job.said()


def test_l18_sigquit_spares_what_has_become_another_program():
    with _Job("L18e", f"{HERE}\nos.execvp('sleep', ['sleep', '2'])") as job:
        time.sleep(0.3)
        job.send(signal.SIGQUIT)
        job.end()
        assert job.process.returncode == 0 and "is in no Python that answers: sleep" in job.said(), job.said()


def test_l18_a_busy_job_is_no_hang():
    code = "import time, hvdlite as h; h.init()\nfor i in range(55): time.sleep(0.1); h.allreduce(1.0, name='x')"
    done = hvdrun(2, PYTHON, "-c", code, options=["--hang-timeout", "4"])
    assert done.returncode == 0, done.stderr


# -- restarts, L23, L24 ----------------------------------------------------------------------------------------------


def test_restarts_begin_again_with_a_reason_and_say_which_attempt_it_is():
    code = f"import os, sys; {RANK}\nn = os.environ.get('HVDLITE_RESTART', '0')\nos.write(1, n.encode() + b'\\n')\n" \
           "sys.exit(7 if n != '2' and r == 1 else 0)"
    done = hvdrun(2, PYTHON, "-c", code, options=["--restarts", "3"])
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["0", "0", "1", "1", "2", "2"], done.stderr
    assert "starting again (1 of 3)" in done.stderr and "starting again (2 of 3)" in done.stderr and "exit code 7" in done.stderr
    done = hvdrun(2, PYTHON, "-c", "raise SystemExit(5)", options=["--restarts", "1"])
    assert done.returncode == 5 and "attempt 1: rank" in done.stderr


def test_l23_the_launcher_is_light_and_adds_under_half_a_second():
    def taken_s(argv):
        started_s = time.monotonic()
        subprocess.run(argv, check=True, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.monotonic() - started_s

    facts = json.loads(hvdrun(2, "true", options=["--dry-run", "--json"]).stdout)
    count = facts["starter"].index("-n")
    bare = [*facts["starter"][:count + 2], "true"]
    # In starts of Python beside it, because machines differ by three times in these: it takes 16 to 20. Where half a second was
    # asked for, 25 are 0.3 to 0.45 s.
    allowed_s = 25 * min(taken_s([PYTHON, "-I", "-c", ""]) for _ in range(10))
    # The best of several, because other programs may have the processors meanwhile.
    assert any(taken_s([*HVDRUN, "-np", "2", "true"]) - taken_s(bare) < allowed_s for _ in range(10))


def test_l24_shared_memory_is_known_from_init_on_though_the_rank_is_a_shell():
    code = ("import hvdlite as h, os, signal; h.init(); h.barrier(); os.write(1, os.environ['HVDLITE_JOB'].encode() + b'\\n'); "
            "os.kill(os.getpid(), signal.SIGKILL)")
    before = set(os.listdir("/dev/shm"))
    done = hvdrun(2, "bash", "-c", f'{PYTHON} -c "{code}"; exit $?', options=["--grace", "1"])
    assert done.returncode == 137, done.stderr
    assert hvdrun(1, "true").returncode == 0
    (job_id,) = set(done.stdout.split())
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith((f"hvdlite-{job_id}", "sm_segment"))]
    assert not left


@pytest.mark.slow
def test_l24_shared_memory_of_a_killed_job_is_swept_by_the_next():
    code = "import os, time, hvdlite as h; h.init(); h.barrier(); os.write(1, b'here\\n'); time.sleep(60)"
    with _Job("L24", code) as job:
        (job_id,) = {word.removeprefix(b"HVDLITE_JOB=").decode() for pid in _living(job.mark)
                     for word in open(f"/proc/{pid}/environ", "rb").read().split(b"\0") if word.startswith(b"HVDLITE_JOB=")}

        def its_claims():
            return {name for name in os.listdir("/dev/shm") if name.startswith(f"hvdlite-{job_id}")}

        _wait_until(its_claims, 5)
        claims = its_claims()
        segments = {line.strip() for name in claims for line in open(f"/dev/shm/{name}")}
        for pid in [job.process.pid, *_living(job.mark)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait(10)
        _wait_until(lambda: not _living(job.mark))
    assert hvdrun(1, "true").returncode == 0
    left = set(os.listdir("/dev/shm"))
    assert claims and segments and not left & claims and not left & segments
