"""Handle's callbacks: each runs once, whoever comes first."""

import threading

import pytest

from hvdlite.errors import TransportError
from hvdlite.handle import Handle
from hvdlite.message import Key


def new():
    return Handle(Key(0, "allreduce", "x"))


def end_well(handle):
    handle.complete(7)


def end_badly(handle):
    handle.fail(TransportError("broken"))


@pytest.mark.parametrize("end", [end_well, end_badly])
def test_callbacks_run_once_in_order_when_the_operation_ends(end):
    handle, seen = new(), []
    for number in range(3):
        handle.add_done_callback(lambda one, number=number: seen.append((number, one.done())))
    assert seen == []
    end(handle)
    assert seen == [(0, True), (1, True), (2, True)]


def test_a_callback_added_afterwards_runs_at_once_and_may_ask_for_the_result():
    handle, seen = new(), []
    end_well(handle)
    handle.add_done_callback(lambda one: seen.append(one.wait()))
    assert seen == [7]


def test_a_failing_callback_is_logged_and_harms_nobody(caplog):
    handle, seen = new(), []
    handle.add_done_callback(lambda _: 1 / 0)
    handle.add_done_callback(seen.append)
    end_well(handle)
    assert seen == [handle] and handle.wait() == 7
    assert "ZeroDivisionError" in caplog.text and "'x'" in caplog.text


def test_ending_and_adding_at_the_same_time_loses_and_repeats_nothing():
    for _ in range(300):
        handle, seen, together = new(), [], threading.Barrier(2)

        def end(handle=handle, together=together):
            together.wait()
            end_well(handle)

        thread = threading.Thread(target=end)
        thread.start()
        together.wait()
        for number in range(20):
            handle.add_done_callback(lambda _, number=number, seen=seen: seen.append(number))
        thread.join()
        assert sorted(seen) == list(range(20))
