"""Shared by all tests: tests/parallel runs under hvdrun only, through test_parallel.py. CI knows no skip but for GPUs."""

import os

import pytest

collect_ignore = [] if os.environ.get("HVDLITE_LAUNCHER") else ["parallel"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("HVDLITE_CI") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI allows for GPUs only: {report.longrepr}"
    return report
