"""The benchmarks run, and what they count is right; their times are for people."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


def lines_of(tool, *arguments):
    done = subprocess.run([sys.executable, TOOLS / tool, *arguments], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_cycle_costs_as_many_bytes_and_collectives_for_many_ranks_as_for_few():
    few, many = map(json.loads, lines_of("bench_control.py", "--ranks", "2,12", "ranks"))
    assert (few["ranks"], many["ranks"]) == (2, 12)
    assert few["bytes_per_cycle"] == many["bytes_per_cycle"] == 24
    assert few["collectives_per_cycle"] == many["collectives_per_cycle"] == 1
    assert many["cpu_us_per_cycle"] < 6 * few["cpu_us_per_cycle"]  # measured: 1.2 times; a cost for each other rank: 11


def test_a_step_beside_others(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "step.json"
    lines = lines_of("bench_step.py", "--rows", "scalar,small", "--scale", "0.02", "--json", str(file))
    rows = {one["row"]: one["seconds"] for one in json.loads(file.read_text())}
    assert set(rows["scalar"]) == {"mpi", "ddp", "hvdlite"} and set(rows["small"]) == {"mpi", "ddp", "hvdlite", "hvdlite-new"}
    assert all(0 < second < 10 for row in rows.values() for seconds in row.values() for second in seconds)
    assert sum("/ ddp" in line for line in lines) == 5


def test_launchers_compared(tmp_path):
    file = tmp_path / "launchers.json"
    lines = lines_of("compare_launchers.py", "--rounds", "1", "--launchers", "hvdrun,mpiexec", "--only",
                     "exit7,stdin,arguments,start", "--limit", "8", "--json", str(file))
    of = {(row["check"], row["launcher"]): row for row in json.loads(file.read_text())}
    assert all(of[check, "hvdrun"]["right"] == 1 for check in ("exit7", "stdin", "arguments", "start")), of
    assert of["arguments", "mpiexec"]["seen"] == ["exact"]
    assert lines[0] == "| check | hvdrun | mpiexec |" and len(lines) == 6
