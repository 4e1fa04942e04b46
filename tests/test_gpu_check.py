"""tools/gpu_check.py where there is no GPU: it says so; what its ranks do works on hosts; and it notices what goes wrong."""

import json
import subprocess
import sys

import pytest
from ranks import ROOT

SCRIPT = ROOT / "tools" / "gpu_check.py"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_check

    return gpu_check


def run(*arguments, timeout_s=180):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout_s,
                          stdin=subprocess.DEVNULL, cwd=ROOT)


def test_without_a_gpu_nothing_is_checked_and_that_is_said(gpu_check):
    if not gpu_check.why_not():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("gpu_check: nothing was checked: ") and "pip install hvdlite[gpu,torch]" in done.stderr


@pytest.mark.slow
def test_what_ranks_do_works_on_hosts():
    done = run("--on-hosts", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert [row["check"].split(",")[0] for row in rows] == ["collectives", "1-bit exchange", "training"]
    assert all(row["ok"] for row in rows)


@pytest.mark.parametrize("code, ok, says", [
    ("import time; time.sleep(60)", False, "no end after 0.5 s"),
    ("raise SystemExit('kernel failed')", False, "kernel failed"),
    ("import os; os._exit(9)", False, "exit code 9"),
    ("raise SystemExit('NCCL: Duplicate GPU detected')", None, "not possible here"),
])
def test_parts_that_fail_or_hang_become_rows(gpu_check, monkeypatch, code, ok, says):
    monkeypatch.setattr(gpu_check, "PART_S", 0.5 if "sleep" in code else 20)

    def start(text):
        return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start("import time; time.sleep(60)"), start(code)]
    (row,) = gpu_check.finish("a part", processes)
    assert row["check"] == "a part" and row["ok"] is ok and says in row["result"]
    assert all(one.poll() is not None for one in processes)


def test_the_exit_code_and_the_table_tell_of_a_failure(gpu_check, monkeypatch, capsys):
    rows = [dict(check="a", result="3 bytes differ", limit="0", ok=False), dict(check="b", result="-", limit="", ok=None)]
    monkeypatch.setattr(gpu_check, "why_not", lambda: "")
    monkeypatch.setattr(gpu_check, "everything", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 1
    out = capsys.readouterr().out
    assert "| a | 3 bytes differ | 0 | NO |" in out and "2 checks in 0 s, 1 failed, 1 not possible here" in out
    del rows[0]
    assert gpu_check.main() == 0
