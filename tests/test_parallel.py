"""Runs tests/parallel under hvdrun: one job for each number of ranks that files ask for.

A file says ``RANKS = (1, 2, 3)``; all its tests run on every rank, in the same order. With
``ALONE = True`` it gets jobs of its own: what it sets or measures does not stand others beside it.
``-m`` goes for them too.
"""

import ast
import sys

import pytest
from ranks import ROOT, hvdrun


def _jobs():
    """The files of each job, by its name."""
    jobs = {}
    for path in sorted((ROOT / "tests" / "parallel").glob("test_*.py")):
        said = {
            ast.unparse(node.targets[0]): node.value for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)}
        assert "RANKS" in said, f"{path}: RANKS is missing"
        for ranks in ast.literal_eval(said["RANKS"]):
            jobs.setdefault((path.stem if "ALONE" in said else "together", ranks), []).append(path)
    return {f"{name}-np{ranks}": (ranks, paths) for (name, ranks), paths in sorted(jobs.items())}


JOBS = _jobs()


@pytest.mark.parametrize("name", JOBS)
def test_under_hvdrun(name, pytestconfig):
    ranks, paths = JOBS[name]
    options = ["-x", "-v", "--durations=8", "-p", "no:cacheprovider", "-m", pytestconfig.getoption("-m")]
    done = hvdrun(ranks, sys.executable, "-m", "pytest", *options, *paths, timeout_s=120 + 60 * len(paths))
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "no tests ran" not in done.stdout
