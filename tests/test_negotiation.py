"""Negotiation, slots and fusion as pure functions: agreement, wording of disagreement, order, eviction."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite import fusion
from hvdlite.fusion import compile_plan, plan_gradient_buckets
from hvdlite.message import Key, ReduceOp, Report, Request
from hvdlite.negotiation import describe_mismatch, negotiate
from hvdlite.response_cache import SlotTable, bits

SETS = {0: (0, 1, 2)}


def request(name, shape=(4,), collective="allreduce", dtype="float32", **changes):
    return Request(Key(0, collective, name), (dtype,), (shape,), **changes)


def report(*requests, waited_s=0.0):
    return Report(tuple(requests), (waited_s,) * len(requests))


def step(table, *reports):
    agreement = negotiate(table, reports, SETS)
    table.apply(agreement)
    return agreement


def test_ready_only_when_every_rank_has_it():
    table = SlotTable(8)
    first = step(table, report(request("a"), request("b")), report(request("b")), report(request("b"), request("a")))
    assert [table.key_of(slot).name for slot in first.ready] == ["b"]
    assert table.matches(request("a")) is not None
    second = step(table, report(request("a")), report(request("a")), report(request("a")))
    assert [table.key_of(slot).name for slot in second.ready] == ["a"]
    assert second.assigned == ()


def test_disagreement_fails_with_ranks_and_values_once_all_have_submitted():
    table = SlotTable(8)
    early = step(table, report(request("w", (10, 4))), report(request("w", (10, 5))), report())
    assert early.errors == () and early.ready == () and table.requests == [None]
    late = step(table, report(request("w", (10, 4))), report(request("w", (10, 5))), report(request("w", (10, 4))))
    assert late.errors == ((Key(0, "allreduce", "w"),
        "allreduce 'w': shapes differ: ranks 0, 2 have (10, 4), rank 1 has (10, 5); submit the same shape on every rank"),)
    assert len(table) == 0


@pytest.mark.parametrize("change, says", [
    ({"dtype": "int64"}, "dtypes differ"), ({"shape": (2, 2)}, "shapes differ"), ({"op": 3}, "rank 1 has Min"),
    ({"root_rank": 1}, "root ranks differ"), ({"prescale": 2.0}, "prescale factors differ"),
    ({"postscale": 2.0}, "postscale factors differ"), ({"device": "cuda"}, "devices differ"),
    ({"compressor": "onebit"}, "compressors differ"),
])
def test_every_field_has_its_words(change, says):
    message = describe_mismatch(Key(0, "allreduce", "t"), {0: request("t"), 1: request("t", **change)})
    assert message.startswith("allreduce 't': ") and says in message and "rank 0" in message and "rank 1" in message


def test_one_name_for_two_collectives_is_an_error_only_when_it_lasts():
    table = SlotTable(8)
    ours, theirs = request("x"), request("x", collective="allgather")
    assert step(table, report(ours), report(theirs), report(ours)).errors == ()
    lasting = step(table, *(report(one, waited_s=1.0) for one in (ours, theirs, ours)))
    assert len(lasting.errors) == 2
    assert "ranks 0, 2 called allreduce; rank 1 called allgather" in lasting.errors[0][1]


def test_a_changed_request_takes_its_slot_over_when_all_change():
    table = SlotTable(8)
    step(table, *[report(request("a", (3,)))] * 3)
    changed = step(table, *[report(request("a", (5,)))] * 3)
    assert len(changed.ready) == 1 and table.matches(request("a", (5,))) == 0 and table.matches(request("a", (3,))) is None


def test_eviction_spares_what_is_pending_and_takes_the_least_recent():
    table = SlotTable(2)
    step(table, *[report(request("a"), request("b"))] * 3)
    table.touch([1, 0])
    step(table, report(request("b"), request("c")), report(), report())
    assert {key.name for key in table._keys if key} == {"b", "c"}
    assert list(bits(0b1101)) == [0, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6))
def test_tables_of_all_ranks_stay_equal(seed, capacity):
    generator = random.Random(seed)
    tables = [SlotTable(capacity) for _ in range(3)]
    for _ in range(30):
        reports = [report(*[request(name, (generator.choice([1, 2]),)) for name in generator.sample("abcdefgh", 4)])
                   for _ in range(3)]
        agreement = negotiate(tables[0], reports, SETS)
        for table in tables:
            table.apply(agreement)
            table.touch(agreement.ready)
        assert tables[0].requests == tables[1].requests == tables[2].requests
        assert tables[0]._keys == tables[2]._keys and tables[0]._recency == tables[2]._recency
        pending = {one.key for given in reports for one in given.requests}
        assert len(tables[0]) <= capacity + len(pending)
        assert all(tables[0].requests[slot] is not None for slot in agreement.ready)


def test_plans_are_compiled_once_until_a_slot_changes():
    table = SlotTable(8)
    step(table, *[report(request("a"), request("b"))] * 3)
    plan = table.plan(0b11, lambda requests: compile_plan(requests, 1 << 20))
    assert table.plan(0b11, lambda requests: compile_plan(requests, 1 << 20)) is plan and table.compilations == 1
    step(table, *[report(request("a", (9,)))] * 3)
    assert table.plan(0b11, lambda requests: compile_plan(requests, 1 << 20)) is not plan


def _plan(*requests, threshold=1 << 20):
    return compile_plan(list(enumerate(requests)), threshold)


def test_equal_kinds_fuse_and_others_do_not():
    plan = _plan(request("a"), request("b", dtype="float64"), request("c"), request("d", op=ReduceOp.Max))
    assert [[segment.slot for segment in bucket.segments] for bucket in plan.buckets] == [[0, 2], [1], [3]]
    assert [bucket.finishes for bucket in plan.buckets] == [(0, 2), (1,), (3,)]


def test_large_tensors_are_not_packed_and_the_threshold_is_kept():
    big = (fusion.DIRECT_BYTES // 4,)
    plan = _plan(request("a"), request("big", big), request("b"))
    assert [[segment.slot for segment in bucket.segments] for bucket in plan.buckets] == [[0, 2], [1]]
    plan = _plan(*[request(str(i), (16,)) for i in range(10)], threshold=256)
    assert all(bucket.num_bytes <= 256 for bucket in plan.buckets) and len(plan.buckets) == 3
    assert all(len(bucket.segments) == 1 for bucket in _plan(request("a"), request("b"), threshold=0).buckets)


def test_groups_do_not_mix_with_others():
    group = Request(Key(0, "allreduce", "g"), ("float32",) * 2, ((4,), (4,)))
    plan = _plan(request("a"), group, request("b"))
    assert [[segment.slot for segment in bucket.segments] for bucket in plan.buckets] == [[0, 2], [1, 1]]


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 8192))
def test_gradient_buckets_hold_each_gradient_once_in_reverse_order(sizes, threshold):
    buckets = plan_gradient_buckets(sizes, threshold)
    assert [index for bucket in buckets for index in bucket] == list(reversed(range(len(sizes))))
    assert all(len(bucket) == 1 or sum(sizes[index] for index in bucket) <= threshold for bucket in buckets)
