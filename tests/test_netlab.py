"""tools/netlab: two hosts on one machine, and nothing left of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import ROOT

NETLAB = ROOT / "tools" / "netlab"
HVDRUN = [sys.executable, "-m", "hvdlite.launch"]


def _can_make_networks():
    try:
        made = subprocess.run(["ip", "netns", "add", "netlab-try"], capture_output=True)
        subprocess.run(["ip", "netns", "delete", "netlab-try"], capture_output=True)
    except OSError:
        return False
    return made.returncode == 0 and os.geteuid() == 0


pytestmark = [pytest.mark.netns, pytest.mark.skipif(not _can_make_networks(), reason="needs root and iproute2")]


def _run(*command, hosts=2, rate="200mbit", options=()):
    done = subprocess.run(
        [NETLAB, "run", "--hosts", str(hosts), "--rate", rate, *options, "--", *map(str, command)],
        capture_output=True, text=True, timeout=120, cwd=ROOT, stdin=subprocess.DEVNULL)
    return done


def _left():
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in (links + spaces).splitlines() if line.startswith("nl")]


def test_ranks_on_two_hosts_exchange_at_the_rate_of_the_link(ranks_over_netlab):
    code = """
import json, time, numpy as np, hvdlite as h
h.init()
x = np.ones(1_250_000, np.float32)
h.allreduce_(x, op=h.Sum, name="x")
h.barrier()
started = time.perf_counter()
h.allreduce_(x, op=h.Sum, name="x")
if h.rank() == 0:
    print(json.dumps([time.perf_counter() - started, x[0].item(), h.size(), h.local_size(), h.cross_size()]))
"""
    done = _run(*HVDRUN, "-np", 4, sys.executable, "-c", code, options=["--ranks-per-host", "2"])
    assert done.returncode == 0, done.stderr
    seconds, value, size, local_size, cross_size = json.loads(done.stdout.splitlines()[-1])
    assert (value, size, local_size, cross_size) == (16, 4, 2, 2)
    assert 5e6 * 8 / 200e6 * 0.8 < seconds < 4, f"{seconds} s for 5 MB at 200 Mbit/s"
    assert not _left()


def test_the_command_s_code_and_words_pass_through():
    code = "import sys, socket; print(sys.argv[1:], socket.gethostname()); sys.exit(7)"
    done = _run(sys.executable, "-c", code, "a b", "*", hosts=1)
    assert done.returncode == 7 and done.stdout == "['a b', '*'] h1\n" and not _left()


def test_a_killed_netlab_is_cleaned_up_by_the_next():
    process = subprocess.Popen([NETLAB, "run", "--hosts", "2", "--rate", "200mbit", "--", "sleep", "60"], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while b"of what was asked" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert _left()
    done = subprocess.run([NETLAB, "clean"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "left behind" in done.stderr and not _left()


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_removes_everything(number, code):
    process = subprocess.Popen(
        [NETLAB, "run", "--hosts", "1", "--rate", "200mbit", "--", "sh", "-c", "echo here; sleep 60"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.readline() == b"here\n"
    process.send_signal(number)
    assert process.wait(30) == code and not _left()


@pytest.mark.parametrize("arguments, says", [
    (["run", "--", "true"], None), (["run", "--hosts", "0", "--", "true"], "--hosts 0"),
    (["run", "--rate", "fast", "--", "true"], "fast"),
    (["run"], "command is missing"), (["run", "--slow-host", "9=1mbit", "--", "true"], "--slow-host 9=1mbit")])
def test_what_cannot_be_is_refused(arguments, says):
    done = subprocess.run([NETLAB, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) if says is None else (done.returncode == 2 and says in done.stderr), done.stderr
    assert not _left()


def test_a_link_that_is_too_slow_stops_it():
    done = _run("true", rate="900gbit")
    assert done.returncode == 2 and "of its rate" in done.stderr and not _left()
