"""Shared by all tests: tests/parallel runs under hvdrun only, through test_parallel.py. CI knows no skip but for GPUs."""

import os

import pytest

collect_ignore = [] if os.environ.get("HVDLITE_LAUNCHED_BY") else ["parallel"]


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    """No test finds, or leaves, what was measured on this machine."""
    os.environ["HVDLITE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("HVDLITE_CI") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI allows for GPUs only: {report.longrepr}"
    return report
