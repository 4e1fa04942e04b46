"""hvdrun over ssh: jobs on several hosts, which are network namespaces with an ssh server each."""

import json
import os
import re
import signal
import sys
import time

import pytest
from ranks import ROOT
from standin_hosts import Hosts, can_make_hosts

PYTHON = sys.executable
pytestmark = [pytest.mark.netns, pytest.mark.sshd]
#: Both stand-in hosts are this machine: MPI must not find that out.
ONE_MACHINE = ("-x", "UCX_TLS=tcp,self", "-x", "UCX_NET_DEVICES=eth0", "-x", "MPIR_CVAR_NOLOCAL=1")


@pytest.fixture(scope="module")
def hosts():
    if not can_make_hosts():
        pytest.skip("needs root, ip netns and sshd")
    os.environ["PYTHONPATH"] = str(ROOT)
    with Hosts(3) as made:
        yield made


def lines(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


def test_l6_bytes_arrive_on_another_host_and_no_command_line_shows_them(hosts, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    code = ("import json, os, socket, sys, subprocess\n"
            "seen = subprocess.run(['ps', 'axww', '-o', 'args'], capture_output=True, text=True).stdout\n"
            "print(json.dumps([socket.gethostname(), sys.argv[1:], os.environ['A'], os.environ['S'], os.getcwd(),"
            " 'canary' + '42' in seen]), flush=True)")
    words = ["a b", "", "'q\"", "l\n2", "ü", "$HOME", "*"]
    done = hosts.hvdrun("-H", "h1:1,h2:2", "-x", "A=1\n 2", "-x", "S", PYTHON, "-c", code, *words, cwd=folder,
                        env={**os.environ, "S": "canary42"})
    assert done.returncode == 0, done.stderr
    found = sorted(lines(done))
    assert [one[0] for one in found] == ["h1", "h2", "h2"]
    assert all(one[1:] == [words, "1\n 2", "canary42", str(folder), False] for one in found)


def test_collectives_cross_hosts(hosts):
    code = ("import json, numpy as np, hvdlite as hvd\nhvd.init()\n"
            "print(json.dumps([hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(),"
            " hvd.allreduce(np.full(100_000, hvd.rank() + 1.0), op=hvd.Sum)[-1]]), flush=True)\nhvd.shutdown()")
    done = hosts.hvdrun("-H", "h1:1,h2:1,h3:1", *ONE_MACHINE, PYTHON, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(lines(done)) == [[rank, 0, 1, 3, 6.0] for rank in range(3)]


def test_l2_a_failure_on_another_host_ends_all_and_is_told_last(hosts):
    code = ("import sys, time, socket\nif socket.gethostname() == 'h2': time.sleep(1); raise RuntimeError('boom')\n"
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)")
    started_s = time.monotonic()
    done = hosts.hvdrun("-H", "h1:1,h2:1,h3:1", "--grace", "2", PYTHON, "-c", code)
    assert time.monotonic() - started_s < 1 + 1 + 2 + 1 + 4 and done.returncode == 1
    assert "rank 1" in done.stderr and "h2" in done.stderr
    assert "RuntimeError: boom" in done.stderr.strip().splitlines()[-1]
    assert not hosts.left_over()


def test_l4_a_killed_hvdrun_leaves_nothing_on_other_hosts(hosts):
    code = "import time; print('[]', flush=True); time.sleep(300)"
    process = hosts.popen(*hosts.hvdrun_argv("-H", "h1:1,h2:1,h3:1", PYTHON, "-c", code))
    for _ in range(3):
        assert process.stdout.readline() == "[]\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    deadline_s = time.monotonic() + 15
    while (left := hosts.left_over()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not left


def test_l4_a_host_that_is_lost_ends_the_job_and_is_named(hosts):
    code = "import time; print('[]', flush=True); time.sleep(300)"
    process = hosts.popen(*hosts.hvdrun_argv("-H", "h1:1,h2:1,h3:1", "--grace", "2", PYTHON, "-c", code))
    for _ in range(3):
        assert process.stdout.readline() == "[]\n"
    hosts.cut(3)
    try:
        _, told = process.communicate(timeout=40)
        assert process.returncode != 0 and re.search(r"lost host h3 .*rank 2", told), told
    finally:
        hosts.cut(3, False)
    deadline_s = time.monotonic() + 20
    while (left := hosts.left_over()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not left


def test_l12_every_wait_has_a_name_and_an_end(hosts):
    hosts.pause_server(2)
    try:
        started_s = time.monotonic()
        done = hosts.hvdrun("-H", "h1:1,h2:1", "--start-timeout", "3", PYTHON, "-c", "pass")
        assert done.returncode == 3 and time.monotonic() - started_s < 10
        assert re.search(r"waiting for h2: .*ssh.* gave up after 3 s", done.stderr), done.stderr
    finally:
        hosts.pause_server(2, False)
    assert not hosts.left_over()


def test_l11_the_doctor_finds_the_blocked_pair_and_the_slow_link(hosts):
    hosts.block(2, 3)
    hosts.shape(1, "50mbit")
    try:
        done = hosts.hvdrun("doctor", "-H", "h1,h2,h3")
    finally:
        hosts.block(2, 3, blocked=False)
        hosts.unshape(1)
    assert done.returncode == 1 and "BLOCKED" in done.stdout, done.stdout + done.stderr
    assert re.search(r"h2.*h3|h3.*h2", done.stdout) and re.search(r"\b[5-7]\.\d MB/s", done.stdout)
    healthy = hosts.hvdrun("doctor", "-H", "h1,h2,h3")
    assert "BLOCKED" not in healthy.stdout
