"""Runs every file of tests/parallel under hvdrun, with each number of ranks it asks for.

A file says ``RANKS = (1, 2, 3)``; all its tests run on every rank, in the same order. ``-m`` goes
for them too.
"""

import ast
import sys

import pytest
from ranks import ROOT, hvdrun

FILES = sorted((ROOT / "tests" / "parallel").glob("test_*.py"))


def _ranks(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANKS":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path}: RANKS is missing")


@pytest.mark.parametrize("path, ranks", [(path, n) for path in FILES for n in _ranks(path)],
                         ids=lambda value: value.stem if hasattr(value, "stem") else f"np{value}")
def test_under_hvdrun(path, ranks, pytestconfig):
    markers = pytestconfig.getoption("-m")
    done = hvdrun(ranks, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", path, "-m", markers, timeout_s=240)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "no tests ran" not in done.stdout
