"""Compare launchers: what becomes of a failing, killed or interrupted job under hvdrun, mpiexec and torchrun, on this host.

Every launcher runs the same two-rank script; a row says how often the launcher did what people need, over the rounds.

    python tools/compare_launchers.py [--rounds 5] [--launchers hvdrun,mpiexec,torchrun] [--only raise,kill9] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: A failing job should have ended by then: seconds to unwind, and of grace, and one more. Chosen as hvdrun is told below.
GRACE_S = 2.0
NUM_RANKS = 2

#: What each rank runs: ``sys.argv[1]`` says how rank 1 fails; the others sleep or wait for it in a collective.
SCRIPT = r"""
import json, os, signal, sys, time
mode = sys.argv[1]
rank = int(next(os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK") if n in os.environ))
def say(text):
    os.write(1, (text + "\n").encode())
def saved(number, frame):
    say("saved")
    os._exit(0)
if mode == "in_allreduce":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        reduce = lambda: dist.all_reduce(torch.ones(4))
    else:
        import numpy
        from mpi4py import MPI
        reduce = lambda: MPI.COMM_WORLD.Allreduce(numpy.ones(4), numpy.empty(4))
    reduce()
if mode == "ignore_term" and rank != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "interrupt":
    signal.signal(signal.SIGINT, saved)
if mode == "usr1":
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    say("ready")
    while not seen:
        time.sleep(0.02)
    say("told")
    sys.exit(0)
if mode == "lines":
    for index in range(20000):
        sys.stdout.write("%d %d %s\n" % (rank, index, "x" * 180))
    sys.exit(0)
if mode == "arguments":
    say(json.dumps(sys.argv[2:]))
    sys.exit(0)
if mode in ("kill9", "interrupt"):
    say("ready")
    time.sleep(60)
if rank == 1:
    time.sleep(0.3)
    say("failed %f" % time.monotonic())
    if mode == "exit7":
        sys.exit(7)
    if mode in ("sigsegv", "sigkill"):
        os.kill(os.getpid(), getattr(signal, mode.upper()))
    raise RuntimeError("boom")
if mode == "in_allreduce":
    reduce()
time.sleep(60)
"""

#: mode -> the exit code a caller needs, and what must be told of rank 1.
FAILURES = {
    "raise": (1, r"boom"), "exit7": (7, r"exit ?code\W+7"), "sigsegv": (139, r"SIGSEGV|signal 11|Segmentation"),
    "sigkill": (137, r"SIGKILL|signal 9|Killed"), "in_allreduce": (1, r"boom"), "ignore_term": (1, r"boom"),
}
ARGUMENTS = ["a b", "it's", "$HOME", "*", "", "é", "x\ny", "--x=a b"]


@dataclass
class Row:
    """One launcher's result in one check: how many rounds were right, in words what was seen."""

    check: str
    launcher: str
    rounds: int = 0
    right: int = 0
    seen: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


#: One round of a check: how the launcher is called, the script, seconds that a job may take, and what is noted.
Check = Callable[[Callable[..., list[str]], str, float, Row], None]


class Job:
    """A launcher with its two ranks, all marked by an environment variable so that none is overlooked."""

    def __init__(self, argv: list[str], **kwargs: Any) -> None:
        self.mark = f"compare-{os.getpid()}-{time.monotonic_ns()}"
        self._out = tempfile.TemporaryFile("w+", errors="replace")
        self._err = tempfile.TemporaryFile("w+", errors="replace")
        environment = {**os.environ, "COMPARE_MARK": self.mark, "PYTHONPATH": str(ROOT)}
        kwargs.setdefault("stdin", subprocess.DEVNULL)
        self.process = subprocess.Popen(
            argv, stdout=self._out, stderr=self._err, env=environment, start_new_session=True, **kwargs)

    def text(self, stream: int = 1) -> str:
        """What it has written so far."""
        file = self._out if stream == 1 else self._err
        return os.pread(file.fileno(), 1 << 26, 0).decode("utf-8", "replace")

    def await_text(self, word: str, count: int, limit_s: float) -> bool:
        """Wait until ``word`` was written so often."""
        deadline_s = time.monotonic() + limit_s
        while self.text().count(word) < count and time.monotonic() < deadline_s and self.process.poll() is None:
            time.sleep(0.02)
        return self.text().count(word) >= count

    def await_end(self, limit_s: float) -> int | None:
        """The launcher's exit code as a shell has it; None: it still runs."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def living(self) -> list[int]:
        """Processes of this job that live, the launcher's own included."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                if f"COMPARE_MARK={self.mark}\0".encode() in environment and state != "Z":
                    found.append(int(pid))
        return found

    def clear(self) -> None:
        """End all that is left."""
        while pids := self.living():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        self._out.close()
        self._err.close()


@contextlib.contextmanager
def running(argv: list[str], **kwargs: Any) -> Iterator[Job]:
    """A job that leaves nothing behind."""
    job = Job(argv, **kwargs)
    try:
        yield job
    finally:
        job.clear()


def launchers(names: list[str]) -> dict[str, Callable[..., list[str]]]:
    """How each launcher is told to start two ranks. Raises: SystemExit for one that is not installed."""
    python = sys.executable
    beside = os.pathsep.join((os.path.dirname(python), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=beside)
    options: list[str] = []
    if mpiexec and "Open MPI" in subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout:
        options = ["--allow-run-as-root", "--oversubscribe"]
    known: dict[str, Callable[..., list[str]]] = {
        "hvdrun": lambda *words: [python, "-m", "hvdlite.launch", "-np", str(NUM_RANKS), "--grace", f"{GRACE_S:g}", *words],
        "mpiexec": lambda *words: [str(mpiexec), *options, "-n", str(NUM_RANKS), *words],
        "torchrun": lambda *words: [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                    str(NUM_RANKS), "--no-python", *words],
    }
    for name in names:
        if name not in known:
            raise SystemExit(f"compare_launchers: {name!r} is no launcher of {', '.join(known)}")
    if "mpiexec" in names and mpiexec is None:
        raise SystemExit("compare_launchers: there is no mpiexec beside this Python: pip install mpich, or leave it out")
    return {name: known[name] for name in names}


def failure(mode: str, command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """One round of a failing rank: all must end in time, with its code, its rank and reason told, and nothing left."""
    code, says = FAILURES[mode]
    with running(command(sys.executable, script, mode)) as job:
        job.await_text("failed", 1, 60)
        started = re.search(r"failed (\d+\.\d+)", job.text())
        ended = job.await_end(limit_s)
        took_s = time.monotonic() - float(started[1]) if started else float("nan")
        time.sleep(0.2)
        left = len([pid for pid in job.living() if pid != job.process.pid])
        told = "\n".join((job.text() + job.text(2)).splitlines()[-60:])
        named = re.search(r"rank\W+1\b|\[1\]|\brank 1\b", told) is not None and re.search(says, told, re.IGNORECASE) is not None
        in_time = ended is not None and took_s <= 1 + GRACE_S + 1
        row.right += ended == code and in_time and not left and named
        row.values.append(took_s)
        row.seen.append(f"{'still running' if ended is None else f'code {ended}'} after {took_s:.1f} s, {left} left, "
                        f"cause {'told' if named else 'not told'}")


def kill9(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """The launcher is killed: 3 s later no rank may live."""
    with running(command(sys.executable, script, "kill9")) as job:
        job.await_text("ready", NUM_RANKS, 60)
        job.process.kill()
        job.process.wait()
        time.sleep(3)
        left = len(job.living())
        row.right += not left
        row.seen.append(f"{left} processes live")


def signalled(mode: str, number: signal.Signals, word: str, right_code: int) -> Check:
    """A signal to the launcher: every rank writes ``word``, and the exit code is as it should be."""

    def check(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
        with running(command(sys.executable, script, mode)) as job:
            job.await_text("ready", NUM_RANKS, 60)
            job.process.send_signal(number)
            code = job.await_end(limit_s)
            count = job.text().count(word)
            row.right += count == NUM_RANKS and code == right_code
            row.seen.append(f"{count} of {NUM_RANKS} {word}, code {code}")

    return check


def stdin(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """A shell loop that reads lines goes round for each, though it starts a job each time."""
    loop = 'while read x; do "$@" >/dev/null 2>&1; echo "line $x"; done'
    with running(["bash", "-c", f"printf 'a\\nb\\n' | {{ {loop}; }}", "bash", *command("true")]) as job:
        job.await_end(60)
        lines = re.findall("line (.)", job.text())
        row.right += lines == ["a", "b"]
        row.seen.append(f"{len(lines)} of 2 lines")


def arguments(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """Arguments arrive byte by byte."""
    with running(command(sys.executable, script, "arguments", *ARGUMENTS)) as job:
        job.await_end(60)
        found = [line for line in job.text().splitlines() if line.startswith("[")]
        row.right += found == [json.dumps(ARGUMENTS)] * NUM_RANKS
        row.seen.append("exact" if found == [json.dumps(ARGUMENTS)] * NUM_RANKS else f"changed: {found[:1]}")


def lines(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """40 000 lines of two ranks through a pipe: none is broken, mixed or lost."""
    with running(command(sys.executable, script, "lines")) as job:
        job.await_end(60)
        whole = sum(bool(re.fullmatch(r"[01] \d+ x{180}", line)) for line in job.text().splitlines())
        row.right += whole == 40000
        row.seen.append(f"{whole} of 40000 whole")


def start(command: Callable[..., list[str]], script: str, limit_s: float, row: Row) -> None:
    """How long a job of nothing takes."""
    started_s = time.monotonic()
    with running(command("true")) as job:
        job.await_end(60)
        row.values.append(time.monotonic() - started_s)
        row.right += job.process.returncode == 0


CHECKS: dict[str, tuple[str, Check]] = {
    "kill9": ("launcher killed (-9): no rank left after 3 s", kill9),
    "interrupt": ("Ctrl-C: both ranks save, code 130", signalled("interrupt", signal.SIGINT, "saved", 130)),
    # As schedulers send before preemption.
    "usr1": ("SIGUSR1 reaches the ranks, which go on", signalled("usr1", signal.SIGUSR1, "told", 0)),
    "stdin": ("a shell's `while read` loop is not eaten", stdin),
    "arguments": ("arguments exact (spaces, quotes, newline, empty)", arguments),
    "lines": ("40 000 lines: none broken or lost", lines),
    "start": ("`true` on two ranks, seconds", start),
}
TITLES = {
    "raise": "rank 1 raises", "exit7": "rank 1 exits with 7", "sigsegv": "rank 1 gets SIGSEGV", "sigkill": "rank 1 gets SIGKILL",
    "in_allreduce": "rank 1 raises, its peer waits in an allreduce", "ignore_term": "rank 1 raises, its peer ignores SIGTERM",
    **{name: title for name, (title, _) in CHECKS.items()},
}


def measure(names: list[str], checks: list[str], rounds: int, limit_s: float) -> list[Row]:
    """Run every check under every launcher in turn."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="compare-launchers-") as directory:
        script = os.path.join(directory, "job.py")
        Path(script).write_text(SCRIPT)
        commands = launchers(names)
        for check in checks:
            of = {name: Row(check, name) for name in names}
            for _ in range(rounds):
                for name, command in commands.items():
                    row = of[name]
                    row.rounds += 1
                    if check in FAILURES:
                        failure(check, command, script, limit_s, row)
                    else:
                        CHECKS[check][1](command, script, limit_s, row)
            rows += of.values()
            print(f"{TITLES[check]}: " + "; ".join(f"{name} {cell(of[name])}" for name in names), file=sys.stderr, flush=True)
    return rows


def cell(row: Row) -> str:
    """A table's cell."""
    if row.check == "start":
        return f"{statistics.median(row.values):.2f}"
    told = sorted(set(row.seen), key=row.seen.count, reverse=True)
    # Of failures the slowest tells the most.
    worst = row.seen[row.values.index(max(row.values))] if row.values else told[0]
    return f"{row.right}/{row.rounds} ({worst})"


def table(rows: list[Row], names: list[str]) -> str:
    """All as Markdown."""
    of: dict[str, dict[str, Row]] = {}
    for row in rows:
        of.setdefault(row.check, {})[row.launcher] = row
    head = ["| check | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return "\n".join([*head, *(f"| {TITLES[check]} | " + " | ".join(cell(cells[name]) for name in names) + " |"
                               for check, cells in of.items())])


def main() -> int:
    """Measure and print; exit 1 where hvdrun was not right in every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launchers", default="hvdrun,mpiexec,torchrun", help="comma-separated")
    parser.add_argument("--only", default="", help=f"comma-separated, of {','.join(TITLES)}")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds after which a job that has not ended counts as hung")
    parser.add_argument("--json", metavar="FILE", help="every round, as JSON")
    options = parser.parse_args()
    checks = [name for name in options.only.split(",") if name] or list(TITLES)
    if unknown := sorted(set(checks) - set(TITLES)):
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(TITLES)}")
    names = options.launchers.split(",")
    rows = measure(names, checks, options.rounds, options.limit)
    print(table(rows, names))
    if options.json:
        Path(options.json).write_text(json.dumps([row.__dict__ for row in rows], indent=1))
    return int(any(row.right < row.rounds for row in rows if row.launcher == "hvdrun"))


if __name__ == "__main__":
    sys.exit(main())
