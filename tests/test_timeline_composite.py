"""Composite records: what is written as one is read as the records that it stands for, by every reader."""

import json
import random

import numpy as np
import pytest

from hvdlite.timeline.composite import AWAITED, EXCHANGE_SHIFT, PACKED, singles
from hvdlite.timeline.live import LiveTimeline
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import HEADER_BYTES, MAGIC, RECORD, RingTimeline
from hvdlite.timeline.ring import TimelineError, read_ring

OPERATIONS = [Phase.ALLREDUCE, Phase.ALLGATHER, Phase.BROADCAST, Phase.ALLTOALL, Phase.REDUCESCATTER, Phase.BARRIER]


def ring(tmp_path, capacity=4096):
    return RingTimeline(str(tmp_path), 0, 1, HEADER_BYTES + capacity * RECORD.size)


def operation(start=1000, *, seen=10, agreed=25, end=100, waited=None, later=0, whole=Phase.ALLREDUCE, number=7):
    detail = whole | (0 if waited is None else AWAITED)
    third = (waited or 0) | later << 32
    return (Phase.WHOLE_OPERATION, "x", start, start + end, seen | agreed << 32, detail, 3, third, number, 5, 2)


def bucket(start=1000, *, num_bytes=64, first=1, packed=0, combined=0, end=100, reason=4, exchange=Phase.MPI_ALLREDUCE):
    detail = reason | exchange << EXCHANGE_SHIFT | (PACKED if packed else 0)
    return (Phase.WHOLE_BUCKET, "b", start, start + end, num_bytes | first << 32, detail, 6, packed | combined << 32, 7, 5, 2)


def read_back(timeline):
    read = read_ring(timeline.path)
    return [(one["phase"], read.names[one["name"]], one["start_ns"], one["end_ns"], one["num_bytes"], one["detail"], one["count"],
             one["value"], one["operation"], one["plan"], one["process_set"]) for one in read.records]


def test_an_operation_and_a_bucket_worked_by_hand(tmp_path):
    timeline = ring(tmp_path)
    timeline.write([operation(waited=40, later=1), bucket(packed=20, combined=70), bucket()])
    rest = (5, 2)
    assert read_back(timeline) == [
        (Phase.QUEUE, "x", 1000, 1010, 0, 0, 0, 0, 6, *rest),
        (Phase.NEGOTIATE_ALLREDUCE, "x", 1010, 1025, 0, 0, 0, 0, 6, *rest),
        (Phase.ALLREDUCE, "x", 1000, 1100, 0, 0, 3, 0, 7, *rest),
        (Phase.WAIT, "x", 1060, 1100, 0, 0, 0, 0, 7, *rest),
        (Phase.MEMCPY_IN_FUSION_BUFFER, "b", 1001, 1020, 64, 0, 0, 0, 7, *rest),
        (Phase.MPI_ALLREDUCE, "b", 1020, 1070, 64, 0, 0, 0, 7, *rest),
        (Phase.MEMCPY_OUT_FUSION_BUFFER, "b", 1070, 1100, 64, 0, 0, 0, 7, *rest),
        (Phase.BUCKET, "b", 1000, 1100, 64, 4, 6, 0, 7, *rest),
        (Phase.MPI_ALLREDUCE, "b", 1001, 1100, 64, 0, 0, 0, 7, *rest),
        (Phase.BUCKET, "b", 1000, 1100, 64, 4, 6, 0, 7, *rest)]


def test_what_is_read_is_what_the_single_records_would_be_up_to_the_limits_of_each_field(tmp_path):
    rng, most = random.Random(3), 2**32 - 1
    written = []
    for _ in range(500):
        times = sorted(rng.choice([0, 1, rng.randrange(most), most]) for _ in range(4))
        start = rng.randrange(1, 2**62)
        written.append(rng.choice([
            operation(start, seen=times[0], agreed=times[1], end=times[3], waited=rng.choice([None, 0, times[2]]),
                      later=rng.choice([0, 1, 900]), whole=rng.choice(OPERATIONS), number=rng.choice([1000, most])),
            bucket(start, num_bytes=rng.choice([0, most]), first=times[0], packed=rng.choice([0, times[1]]), combined=times[2],
                   end=times[3], reason=rng.randrange(12), exchange=rng.choice([Phase.MPI_ALLREDUCE, Phase.NCCL_REDUCESCATTER])),
            (Phase.SUBMIT, "s", start, start, 2**40, 1, 2, 0.5, 3, 4, 5)]))
    timeline = ring(tmp_path)
    timeline.write(written)
    expected = [single for record in written for single in singles(record)]
    assert read_back(timeline) == expected and len(expected) > 2 * len(written)


def test_a_torn_one_is_lost_as_a_whole_and_a_full_ring_counts_what_it_holds(tmp_path):
    timeline = ring(tmp_path, capacity=8)
    timeline.write([operation(1000 * number, waited=1) for number in range(1, 12)])
    read = read_ring(timeline.path)
    assert len(read.records) == 4 * 8 and (read.lost, read.torn, read.cut) == (3, 0, 0)
    timeline._words[(HEADER_BYTES + 5 * RECORD.size) >> 3] = 0
    read = read_ring(timeline.path)
    assert len(read.records) == 4 * 7 and read.torn == 1


def test_the_newest_are_so_many_as_read_and_what_is_wanted_is_told_of_the_parts(tmp_path):
    timeline = ring(tmp_path)
    timeline.write([operation(1000 * number, waited=1) for number in range(1, 101)])
    read = read_ring(timeline.path, newest=40)
    assert len(read.records) == 40 and read.cut == 360 and read.records["start_ns"][0] == 91_000
    waits = read_ring(timeline.path, wanted=lambda found: found["phase"] == Phase.WAIT)
    assert len(waits.records) == 100 and (waits.records["end_ns"] - waits.records["start_ns"] == 1).all()


def test_rings_of_the_version_before_are_read_and_those_of_others_refused(tmp_path):
    timeline = ring(tmp_path)
    timeline.span(Phase.QUEUE, "t", 1, 2)
    header = json.loads(timeline._memory[:HEADER_BYTES])
    assert header["magic"] == MAGIC == "hvdlite ring 3"
    for magic in ("hvdlite ring 2", "hvdlite ring 4"):
        timeline._memory[:HEADER_BYTES] = json.dumps({**header, "magic": magic}).encode().ljust(HEADER_BYTES)
        if magic.endswith("2"):
            assert len(read_ring(timeline.path).records) == 1
        else:
            with pytest.raises(TimelineError, match="no ring file"):
                read_ring(timeline.path)


def test_the_live_file_has_the_parts(tmp_path):
    live = LiveTimeline(str(tmp_path / "live.json"))
    live.write([operation(waited=40), bucket(packed=20, combined=70)])
    live.close()
    spans = [one["name"] for one in json.loads((tmp_path / "live.json").read_text()) if one["ph"] == "X"]
    assert spans == ["QUEUE", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE",
                     "MEMCPY_OUT_FUSION_BUFFER"]


def test_nothing_to_take_apart_is_nothing():
    from hvdlite.timeline.expand import expand
    from hvdlite.timeline.ring import DTYPE

    assert len(expand(np.zeros(0, DTYPE))) == 0
