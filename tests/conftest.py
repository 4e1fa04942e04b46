"""Shared by all tests: tests/parallel runs under hvdrun only, through test_parallel.py. CI knows no skip but for GPUs."""

import os
import signal
import subprocess
import sys

import pytest

collect_ignore = [] if os.environ.get("HVDLITE_LAUNCHED_BY") else ["parallel"]


# A shell ignores these for what it starts in the background, and children would inherit that.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    """No test finds, or leaves, what was measured on this machine."""
    os.environ["HVDLITE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def ranks_over_netlab():
    """For tests that start ranks on netlab's hosts."""
    code = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    vendor = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()
    if vendor != "MPICH":
        pytest.skip("netlab starts ranks through MPICH's Hydra")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("HVDLITE_CI") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI allows for GPUs only: {report.longrepr}"
    return report
