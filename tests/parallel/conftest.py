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
