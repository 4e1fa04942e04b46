"""One job for all tests of a file."""

import pytest

import hvdlite


@pytest.fixture(autouse=True, scope="session")
def job():
    hvdlite.init()
    yield
    hvdlite.shutdown()


@pytest.fixture(autouse=True)
def works_afterwards():
    yield
    assert hvdlite.allreduce(1.0, op=hvdlite.Sum, name="after") == hvdlite.size()


@pytest.fixture
def restart(monkeypatch):
    """Start the runtime anew with other settings, on all ranks; the former ones come back after the test."""

    def start(**settings):
        hvdlite.shutdown()
        for name, value in settings.items():
            monkeypatch.setenv(f"HVDLITE_{name}", str(value))
        hvdlite.init()

    yield start
    monkeypatch.undo()
    hvdlite.shutdown()
    hvdlite.init()
