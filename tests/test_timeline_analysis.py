"""What hvdtrace tells of a recording, held against jobs whose every time was chosen."""

import csv
import gzip
import json
import os
import random
import sqlite3
import time
from itertools import pairwise

import numpy as np
import pytest
from made_traces import MS, MadeJob, request

from hvdlite.fusion import compile_plan
from hvdlite.timeline import amounts, bandwidth, blame, cli, diff, doctor, fusion_use, intervals, recorder
from hvdlite.timeline.clock import ClockMap, Reading, best_reading
from hvdlite.timeline.export import lint, write_chrome_json
from hvdlite.timeline.imported import read_trace
from hvdlite.timeline.job import load_job
from hvdlite.timeline.phase import LANES, REASONS, Phase
from hvdlite.timeline.report import as_values, make_report, mean_parts
from hvdlite.timeline.report_html import as_html
from hvdlite.timeline.report_text import as_text
from hvdlite.timeline.ring import TimelineError, read_ring
from hvdlite.timeline.steps import PARTS, find_steps


def straggling(directory, *, steps=20, late=30 * MS, size=4, kind="compute", rank=2, **options):
    """Rank 2 comes 30 ms after the others in every step."""
    made = MadeJob(directory, size, **options)
    for _ in range(steps):
        more = [late if one == rank else 0 for one in range(size)]
        made.step([5 * MS + (0 if kind == "input" else one) for one in more], tail=MS,
                  reading=[MS + (one if kind == "input" else 0) for one in more], stopped=more if kind == "not running" else None)
    return made


def report_of(directory, **options):
    return make_report(load_job(directory, **options))


# Intervals and steps


def test_intervals_agree_with_sets_of_instants():
    rng = random.Random(1)
    for _ in range(200):
        sets = []
        for _ in range(2):
            starts = np.array([rng.randrange(60) for _ in range(rng.randrange(6))], np.int64)
            ends = starts + np.array([rng.randrange(12) for _ in starts], np.int64)
            sets.append((intervals.union(starts, ends), {t for a, b in zip(starts, ends, strict=True) for t in range(a, b)}))
        (one, ones), (two, twos) = sets
        both, rest = intervals.intersect(one, two), intervals.subtract(one, two)
        for made, instants in ((one, ones), (both, ones & twos), (rest, ones - twos)):
            assert {t for a, b in zip(*made, strict=True) for t in range(a, b)} == instants
            assert intervals.lengths_in(made, np.array([10]), np.array([33]))[0] == len(instants & set(range(10, 33)))


def test_t10_parts_of_steps_are_exact_and_sum_to_the_step(tmp_path):
    made = MadeJob(tmp_path, 2)
    made.step([3_000_001, 5_000_003], moving=2_000_007, negotiating=11, reading=[1_000_000, 500_009], tail=400_013)
    # 7 ms of the exchange of a second step run behind computing, 1 ms is waited for.
    begin = made.at
    made.plan += 1
    for rank in range(2):
        made.span(rank, Phase.QUEUE, "allreduce.x", begin + MS, begin + MS, operation=2)
        made.span(rank, Phase.BUCKET, "allreduce.x", begin + MS, begin + 9 * MS, 8, operation=2)
        made.span(rank, Phase.WAIT, "allreduce.x", begin + 8 * MS, begin + 9 * MS, operation=2)
        made.span(rank, Phase.STEP, "step 1", begin, begin + 10 * MS + 1, thread=1, count=1)
    steps = find_steps(load_job(tmp_path))
    first = {name: steps.parts[name][:, 0].tolist() for name in PARTS}
    came = [1_000_000 + 3_000_001, 500_009 + 5_000_003]
    assert first == {
        "input": [1_000_000, 500_009], "compute": [3_000_001 + 400_013, 5_000_003 + 400_013], "overlapped": [0, 0],
        "exposed": [2_000_007, 2_000_007], "idle": [max(came) - came[0] + 11, 11]}
    second = {name: steps.parts[name][0, 1] for name in PARTS}
    assert second == {"input": 0, "compute": 2 * MS + 1, "overlapped": 7 * MS, "exposed": MS, "idle": 0}
    assert (sum(steps.parts.values()) == steps.length).all() and steps.source == "marked"


def test_steps_without_marks_are_told_by_a_name_that_recurs_and_it_says_so(tmp_path):
    made = MadeJob(tmp_path, 2)
    for _ in range(6):
        made.step([MS, MS])
    for rank in range(2):
        for thread in (1,):
            made.rings[rank][thread].path.unlink()
    report = report_of(tmp_path)
    assert report.steps.num == 5 and "told by the recurrence of allreduce.grad" in as_text(report)


# T6, T7, T11: who made whom wait


@pytest.mark.parametrize("kind", ["compute", "input", "not running"])
def test_t6_the_straggler_is_named_with_its_cost_and_kind(tmp_path, kind):
    straggling(tmp_path, kind=kind)
    report = report_of(tmp_path)
    (found,) = report.blame.stragglers
    assert (found.rank, found.kind) == (2, kind) and found.cost_ns == pytest.approx(30 * MS, abs=1)
    assert found.share == pytest.approx(1)
    assert f"rank 2 costs 30.0 ms a step, 100 % of all waiting for ranks: {kind}" in as_text(report)
    matrix = report.blame.matrix[report.steps.counted].mean(axis=0)
    assert matrix[[0, 1, 3], 2] == pytest.approx(30 * MS, abs=1) and matrix.sum() == pytest.approx(90 * MS, abs=3)


def test_t6_moments_of_waiting_are_shared_by_those_who_are_awaited():
    shares = blame.share_out(np.array([0]), np.array([100]), np.array([[0, 10, 40, 200]]))
    # 10 by three, 30 by two, 60 by one.
    assert shares[0] == pytest.approx([0, 10 / 3, 10 / 3 + 15, 10 / 3 + 15 + 60]) and shares.sum() == pytest.approx(100)
    alone = blame.share_out(np.array([50]), np.array([100]), np.array([[0, 0, 0]]))
    assert not alone.any()


def test_t6_jitter_alone_names_nobody(tmp_path):
    alarms = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        directory = tmp_path / str(seed)
        made = MadeJob(directory, 4, capacity=1024)
        for _ in range(30):
            made.step([int(5 * MS + rng.exponential(3 * MS)) for _ in range(4)])
        alarms += bool(report_of(directory).blame.stragglers)
    assert alarms <= 1


def test_t6_a_slow_link_is_told_from_a_late_rank(tmp_path):
    made = straggling(tmp_path, rank=1)
    for rank, rate in enumerate((6e6, 50e6, 50e6, 6e6)):  # rank 3's two ends
        made.span(rank, Phase.LINK, "link", 0, int(1e9 * (1 << 20) / rate), 1 << 20, thread=2, operation=(rank - 1) % 4)
    report = report_of(tmp_path)
    assert {(one.rank, one.kind) for one in report.blame.stragglers} == {(1, "compute"), (3, "slow link")}
    slow = next(one for one in report.blame.stragglers if one.rank == 3)
    assert slow.cost_ns == pytest.approx(2 * MS * (1 - 6 / 50), rel=1e-3)
    assert any("link of" in one.what for one in report.advice)


def test_t7_the_tensor_that_is_waited_for_comes_first_with_its_last_rank(tmp_path):
    made = MadeJob(tmp_path, 3)
    for _ in range(8):
        for tensor in range(10):
            late = [0, 20 * MS if tensor == 7 else 0, 0]
            made.step([MS + one for one in late], name=f"t{tensor}")
    first, second, *_ = blame.tensor_waits(made_job := load_job(tmp_path), blame.find_arrivals(made_job))
    assert (first.name, first.last_rank, first.last_share) == ("allreduce.t7", 1, 1.0)
    assert first.added_ns == first.spread_ns == 20 * MS and second.added_ns == 0


def test_t11_the_critical_path_goes_through_the_straggler_and_predicts_its_gain(tmp_path):
    straggling(tmp_path / "slow")
    straggling(tmp_path / "even", late=0)
    slow, even = report_of(tmp_path / "slow"), report_of(tmp_path / "even")
    assert slow.path.passes[2] >= 0.95
    assert sum(slow.path.by_kind.values()) == slow.path.segments[-1].end_ns - slow.path.segments[0].start_ns
    assert all(one.end_ns == two.start_ns for one, two in zip(slow.path.segments, slow.path.segments[1:], strict=False))
    lengths = [mean_parts(one)[0]["step"] for one in (slow, even)]
    assert slow.advice[0].gain == pytest.approx(1 - lengths[1] / lengths[0], rel=0.1)
    assert "rank 2" in slow.advice[0].what and not even.blame.stragglers


# T8, T9: fusion and bandwidth


def test_t8_buckets_say_why_they_were_closed():
    def reasons(requests, threshold):
        return [bucket.reason for bucket in compile_plan(enumerate(requests), threshold).buckets]

    small = [request(f"t{i}", (4096,)) for i in range(64)]
    assert reasons(small, 4 * 16384) == ["full"] * 16
    assert reasons(small[:3], 4 * 16384) == ["end"]
    mixed = [request(f"t{i}", (100,), "float16" if i % 2 else "float32") for i in range(6)]
    assert reasons(mixed, 1 << 20) == ["dtype", "dtype"]
    assert reasons([request("big", (1 << 20,)), small[0]], 1 << 20) == ["large", "end"]
    group = request("g", (10,))._replace(dtypes=("float32",) * 2, shapes=((10,), (20,)))
    assert reasons([group, small[0]], 1 << 20) == ["group", "end"]
    assert {"full", "large", "group", "end", "dtype"} < set(REASONS)


def test_t8_what_if_replays_the_planner(tmp_path):
    made = MadeJob(tmp_path, 2, threshold=4 * 16384)
    for _ in range(5):
        made.step([MS, MS], num_bytes=1 << 20)
        made.step([MS, MS], num_bytes=1 << 14, moving=MS // 2, name="small", reason="full")
    job = load_job(tmp_path)
    plans = [[request(f"t{i}", (4096,)) for i in range(64)]]
    assert len(fusion_use.count_operations(plans, 4 * 16384)) == 16 and len(fusion_use.count_operations(plans, 16 * 16384)) == 4
    gradients = [request("o.0", (4096,), names=("a",)), request("o.1", (4096,), names=("b",))]
    assert fusion_use.count_operations([gradients], 1 << 20) == [32768]  # an optimizer's buckets are cut anew
    tried = fusion_use.what_if(job, [one for one in map(bandwidth.fit, bandwidth.find_transfers(job)) if one])
    assert {one.setting for one in tried} == {"fusion_threshold_bytes", "cycle_time_ms"}
    now = next(one for one in tried if one.value == 4 * 16384)
    assert now.operations == 10 and now.seconds == pytest.approx(12.5e-3, rel=0.01)
    use = fusion_use.fusion_use(job)
    assert use.reasons == {"large": 5, "full": 5} and use.operations == 10


def test_t8_buckets_of_a_step_that_went_one_by_one_are_cut_anew_together():
    buckets = [request(f"o.{number}", (4096,), names=(f"w{number}",)) for number in range(12)]
    free = request("loss", (1,))
    plans = []
    for step in range(3):
        order = [*buckets[1:], buckets[0]] if step == 1 else buckets  # whichever is complete first
        plans += [(100 * step + place, [one] if place else [one, free], 1000 * step + place) for place, one in enumerate(order)]
    made = fusion_use.in_rounds(plans)
    assert [own for _, own, _ in made if own != [free]] == [buckets] * 3 and sum(own == [free] for _, own, _ in made) == 3
    sizes = fusion_use.count_operations([own for _, own, _ in made], 4 * 16384)
    assert sorted(sizes) == [4] * 3 + [65536] * 9
    assert fusion_use.in_rounds([]) == []


def test_t9_bandwidth_and_its_fit_are_exact(tmp_path):
    made = MadeJob(tmp_path, 4)
    for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22):
        for _ in range(3):
            made.step([MS] * 4, num_bytes=size, moving=100_000 + size)  # 100 us and 1 GB/s
    (transfers,) = bandwidth.find_transfers(load_job(tmp_path))
    fit = bandwidth.fit(transfers)
    assert (fit.alpha_s, fit.beta) == (pytest.approx(100e-6, rel=1e-6), pytest.approx(1e9, rel=1e-6))
    row = bandwidth.by_size(transfers)[-1]
    assert row.algbw == pytest.approx((1 << 22) / (100e-6 + (1 << 22) / 1e9)) and row.busbw == pytest.approx(1.5 * row.algbw)


def test_t9_a_single_size_is_fitted_with_the_slope_of_the_measured_link(tmp_path):
    made = MadeJob(tmp_path, 2)
    for _ in range(6):
        made.step([MS, MS], num_bytes=1 << 20, moving=2 * MS)
    assert report_of(tmp_path).fits == []
    for rank in range(2):
        made.span(rank, Phase.LINK, "link", 0, 1 << 20, 1 << 20, thread=2, operation=1 - rank)  # 1 GB/s
    report = report_of(tmp_path)
    (fit,) = report.fits
    assert (fit.beta, fit.busbw, fit.num_sizes) == (pytest.approx(1e9), pytest.approx(1e9), 1)
    assert fit.seconds(1 << 20) == pytest.approx(2e-3) and fit.alpha_s == pytest.approx(2e-3 - (1 << 20) / 1e9)
    assert report.what_if and "there is one size only" in " ".join(as_text(report).split())


def test_t9_one_rank_has_no_busbw(tmp_path):
    made = MadeJob(tmp_path, 1)
    for _ in range(6):
        made.step([MS])
    report = report_of(tmp_path)
    assert report.sizes[0].busbw == 0 and "n/a" in as_text(report) and "one rank" in report.blame.verdict


# T3: clocks


def test_t3_the_shortest_ping_counts():
    assert best_reading([(0, 500, 510, 100), (1000, 1520, 1522, 1040), (2000, 2600, 2610, 2300)]) == Reading(1521, 1020, 19.0)


@pytest.mark.parametrize("drift", [0.0, 200e-6, -200e-6])
@pytest.mark.parametrize("offset", [1000 * 10**9, -250 * 10**9])
def test_t3_ranks_with_other_clocks_merge_within_the_printed_error(tmp_path, offset, drift):
    made = straggling(tmp_path, clocks={1: lambda at: at + offset + drift * at}, size=3)
    rng = np.random.default_rng(0)
    for at in range(10 * MS, made.at, made.at // 7):
        made.reading(1, at, 20_000, int(rng.integers(-15_000, 15_000)))
    job = load_job(tmp_path)
    true = job.ranks[0].of(Phase.BUCKET)["end_ns"]
    seen = job.ranks[1].of(Phase.BUCKET)["end_ns"]
    assert np.abs(seen - true).max() <= job.ranks[1].error_ns < 100_000
    assert job.ranks[1].clock.drift == pytest.approx(-drift, abs=40e-6 if not drift else 50e-6)
    report = make_report(job)
    assert report.violations == 0 and report.blame.stragglers[0].cost_ns == pytest.approx(30 * MS, rel=0.01)
    assert "merged within +-" in as_text(report)


def test_t3_one_reading_leaves_the_drift_open_and_the_error_says_so():
    one = ClockMap([Reading(0, 50, 10.0)])
    assert one.to_zero(np.array([0, 10**9])).tolist() == [50, 10**9 + 50]
    assert one.error_ns(np.array([0, 10**9])).tolist() == [10.0, 50_010.0]
    two = ClockMap([Reading(0, 0, 10.0), Reading(10**9, 10**9 + 1000, 10.0)])
    assert two.to_zero(np.array([5 * 10**8, 2 * 10**9])).tolist() == [5 * 10**8 + 500, 2 * 10**9 + 2000]


def test_t3_clocks_that_were_never_compared_are_refused(tmp_path, capsys):
    straggling(tmp_path, clocks={1: lambda at: at + 10**12}, size=2, rank=1)
    assert cli.main(["report", str(tmp_path)]) == 4
    assert "rank 1" in (told := capsys.readouterr().err) and "never compared" in told and "--allow-unsynced" in told
    load_job(tmp_path, allow_unsynced=True)


def test_t3_an_operation_that_ends_before_its_last_rank_came_is_loud(tmp_path, capsys):
    made = straggling(tmp_path, size=2, rank=1)
    made.plan += 1
    for rank in range(2):
        made.span(rank, Phase.QUEUE, "allreduce.x", made.at + rank * 5 * MS, made.at + rank * 5 * MS, operation=99)
        made.span(rank, Phase.BUCKET, "allreduce.x", made.at, made.at + MS, 8, operation=99)
    assert cli.main(["report", str(tmp_path)]) == 4
    assert "do not trust times" in capsys.readouterr().out


# T4, T5, T16: export


def test_t5_lanes_flows_and_counters(tmp_path):
    straggling(tmp_path, steps=3, size=3)
    count = write_chrome_json(tmp_path, tmp_path / "out.json")
    trace = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    events = trace["traceEvents"]
    assert lint(events) == [] and count == sum(event["ph"] == "X" for event in events)
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    for lane in ("wait", "negotiate", "operation", "communicate", "step", "compute", "bucket"):
        assert lane in LANES and {(pid, lane) for pid in (1, 2, 3)} <= names
    flows = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event["ph"])
    assert len(flows) == 3 and all(sorted(kinds) == ["f", "s", "t"] for kinds in flows.values())
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"bytes in flight", "queue depth", "busbw (GB/s)"}
    last = [event for event in events if event["ph"] == "C" and event["name"] == "bytes in flight" and event["pid"] == 1][-1]
    assert last["args"]["bytes"] == 0 and trace["otherData"]["epoch_unix_ns"] > 1e18


def test_t4_the_lint_sees_what_viewers_stumble_over():
    def span(ts, dur, tid=1):
        return {"ph": "X", "pid": 1, "tid": tid, "name": "a", "ts": ts, "dur": dur}

    assert lint([span(0, 10), span(2, 3), span(10, 5)]) == []
    assert "ends after" in lint([span(0, 10), span(5, 10)])[0]
    assert "whole numbers" in lint([{**span(0, 1), "pid": "1"}])[0]
    assert "no span" in "".join(lint([span(0, 1), *({"ph": kind, "pid": 1, "tid": 1, "id": 1, "ts": ts} for kind, ts in
                                                    (("s", 0.5), ("f", 7)))]))


def test_t4_calls_in_flight_together_never_overlap_in_a_lane(tmp_path):
    made = MadeJob(tmp_path, 1)
    for i in range(20):
        made.span(0, Phase.NEGOTIATE_ALLREDUCE, f"t{i}", 100 * i, 100 * i + 1000 - 7 * i)
    assert write_chrome_json(tmp_path, tmp_path / "out.json") == 20
    assert lint(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) == []


def test_t16_cut_by_steps_ranks_and_size_says_what_is_left_out(tmp_path, capsys):
    straggling(tmp_path, steps=300)
    output = tmp_path / "cut.json.gz"
    assert cli.main(["cut", str(tmp_path), "--output", str(output), "--steps", "100:103", "--ranks", "0,2"]) == 0
    assert "were left out" in capsys.readouterr().err
    events = json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {1, 3}
    assert {event["args"].get("count", 0) for event in events if event["name"] == "STEP"} == {100, 101, 102}
    # Old steps are found below a limit of the size too.
    assert cli.main(["cut", str(tmp_path), "--output", str(output), "--steps", "1:3", "--max-mb", "0.02"]) == 0
    assert "STEP" in {event["name"] for event in json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]}
    whole, small = tmp_path / "whole.json", tmp_path / "small.json"
    assert cli.main(["export", str(tmp_path), "--output", str(whole)]) == 0
    assert cli.main(["cut", str(tmp_path), "--output", str(small), "--max-mb", "0.5"]) == 0
    assert whole.stat().st_size > 2e6 and 0.2e6 < small.stat().st_size < 0.5e6
    left = json.loads(small.read_text())["traceEvents"]
    assert max(event["args"].get("count", 0) for event in left if event["name"] == "STEP") == 299
    for wrong in (["--steps", "900:901"], ["--ranks", "7"]):
        assert cli.main(["cut", str(tmp_path), "--output", str(small), *wrong]) == 4


# T12: diff


def test_t12_two_alike_runs_differ_in_nothing_and_a_slower_one_is_caught(tmp_path, capsys):
    def run(name, seed, slower=0):
        rng = np.random.default_rng(seed)
        made = MadeJob(tmp_path / name, 2, capacity=1024)
        for _ in range(60):
            base = int(10 * MS + rng.normal(0, 0.5 * MS))
            made.step([base + slower, base + slower])
        return str(tmp_path / name)

    reports = [report_of(run(f"a{seed}", seed)) for seed in range(21)]
    alarms = sum(any(one.is_significant for one in diff.compare(*pair)) for pair in pairwise(reports))
    assert alarms <= 1
    slower = run("slower", 99, slower=1_200_000)
    assert cli.main(["diff", str(tmp_path / "a0"), str(tmp_path / "a1"), "--fail-if", "step>+5%"]) == 0
    assert cli.main(["diff", str(tmp_path / "a0"), slower, "--fail-if", "step>+5%", "--fail-if", "exposed>+5%"]) == 1
    told = capsys.readouterr()
    changed = {line.split()[0] for line in told.out.splitlines() if line.endswith("changed")}
    assert changed == {"step", "compute"} and "step>+5% holds" in told.err and "exposed" not in told.err
    for wrong in ("step", "speed>+5%", "step<+5%"):
        assert cli.main(["diff", slower, slower, "--fail-if", wrong]) == 4


# T13: reports


def test_t13_terminal_html_json_and_csv(tmp_path, capsys):
    straggling(tmp_path / "job")
    files = [tmp_path / name for name in ("r.html", "r.json", "r.csv")]
    assert cli.main(["report", str(tmp_path / "job"), "--width", "60", "--html", str(files[0]), "--json", str(files[1]), "--csv",
                     str(files[2])]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "What to change" in text
    tables = ("setting", "operation", "MPI", "suffers", "rank")
    assert max(len(line) for line in text.splitlines() if not line.startswith(tables)) <= 60
    page = files[0].read_text()
    assert len(page) < 2e6 and "http" not in page.replace("http-equiv", "") and "<svg" in page and "prefers-color-scheme" in page
    values = json.loads(files[1].read_text())
    assert values["format"] == "hvdlite report 1" and values["stragglers"][0]["rank"] == 2
    row = values["per_step"][0]
    assert sum(row[f"{name}_ms"] for name in PARTS) == pytest.approx(row["step_ms"], rel=1e-9)
    rows = list(csv.reader(files[2].open()))
    assert rows[0][:3] == ["step", "rank", "step_ms"] and len(rows) == 1 + 20 * 4


def test_t13_names_cannot_break_the_page(tmp_path):
    made = MadeJob(tmp_path, 2)
    for _ in range(5):
        made.step([MS, 2 * MS], name='<script>alert("1")</script>&\ud800')
    page = as_html(report_of(tmp_path))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    page.encode()


# T14: doctor


def dead(tmp_path, pending, *, size=3, order=("a", "b", "c"), shapes=None):
    """Two good steps, then each rank submits ``pending[rank]``, and all are gone."""
    made = MadeJob(tmp_path, size)
    for _ in range(2):
        for name in order:
            made.step([MS] * size, name=name, num_bytes=400)
    for rank, names in enumerate(pending):
        for number, name in enumerate(names):
            shape = (shapes or {}).get(rank, (100,))
            made.rings[rank][0].describe(f"allreduce.{name}", request(name, shape))
            made.span(rank, Phase.SUBMIT, f"allreduce.{name}", made.at + number * MS, made.at + number * MS, 400)
    return "\n".join(doctor.examine(tmp_path)[0])


def test_t14_a_rank_that_does_not_come_is_told_with_what_it_should_have_done_next(tmp_path):
    told = dead(tmp_path, [["a", "b"], ["a", "b"], ["a"]])
    assert "IN FLIGHT allreduce.a: submitted by ranks 0-2" in told
    assert "WAITING ranks 0-1 for rank 2: allreduce.b" in told


def test_t14_a_silent_rank(tmp_path):
    told = dead(tmp_path, [["a"], ["a"], []])
    assert "WAITING ranks 0-1 for rank 2: allreduce.a" in told and "next it should have submitted allreduce.a" in told


def test_t14_a_skipped_tensor_and_a_different_order(tmp_path):
    skipped = dead(tmp_path / "skip", [["a"], ["a"], ["b"]])
    assert "rank 2 submitted allreduce.b last" in skipped and "it has passed over allreduce.a" in skipped
    assert "DIFFERENT ORDER" in skipped


def test_t14_a_mismatch_names_the_shapes(tmp_path):
    told = dead(tmp_path, [["a"], ["a"], ["a"]], shapes={2: (101,)})
    assert "MISMATCH allreduce 'a': shapes differ: ranks 0-1: [[100]]; rank 2: [[101]]" in told


def test_t14_a_rank_that_left_early_and_a_missing_one(tmp_path):
    made = MadeJob(tmp_path, 3, ranks=(0, 1))
    made.step([MS] * 3)
    made.span(1, Phase.END, "NotInitializedError: rank 1 left (its process finished)", made.at, made.at)
    made.span(0, Phase.SUBMIT, "allreduce.grad", made.at, made.at, 4)
    told, is_well = doctor.examine(tmp_path)
    assert not is_well and "rank 2 left no ring" in told[0]
    assert any("rank 1 had left" in line for line in told) and any("rank 0 ends without a farewell" in line for line in told)


# T15: imports


def horovod_events():
    names = ['layer"1"', "back\\slash", "plain"]
    lines = ["[", '{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1700000000000000}},']
    for pid, name in enumerate(names, 1):
        lines.append(f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{name}"}}}},')
        lines += [f'{{"ph": "X", "name": "ALLREDUCE", "ts": {10 * pid}, "dur": 5, "pid": {pid}}},'] * 2
    return lines


def test_t15_a_horovod_timeline_is_repaired_and_the_loss_stated(tmp_path):
    path = tmp_path / "horovod.json"
    lines = horovod_events()
    path.write_text("\n".join(lines) + '\n{"ph": "X", "name": "ALLRE')
    trace = read_trace(path)
    assert trace.kind == "Horovod timeline" and trace.is_cut and trace.lost == 1 and trace.epoch_ns == 1_700_000_000 * 10**9
    labels = [event["args"].get("name") for event in trace.events if event["ph"] == "M"]
    assert labels[1:] == ['layer"1"', "back\\slash", "plain"] and sum(event["ph"] == "X" for event in trace.events) == 6
    assert "1 piece(s) could not be read" in str(trace) and "its end is missing" in str(trace)
    assert cli.main(["import", str(path), "--output", str(tmp_path / "out.json")]) == 0
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["otherData"]["lost_pieces"] == 1 and lint(out["traceEvents"]) == []


def test_t15_other_files_are_refused(tmp_path, capsys):
    for content in ("", "[", "{}", "hello", '{"a": [1, 2]}'):
        (tmp_path / "x.json").write_text(content)
        assert cli.main(["import", str(tmp_path / "x.json"), "--output", str(tmp_path / "o")]) == 4
        assert "no trace event" in capsys.readouterr().err
        assert not (tmp_path / "o").exists()


# T17: honesty


def test_t17_nothing_is_an_empty_success(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    made = MadeJob(tmp_path / "steps", 1)
    made.span(0, Phase.STEP, "step 0", 0, 5, thread=1, count=0)
    MadeJob(tmp_path / "nothing", 2)
    straggling(tmp_path / "missing", ranks=(0, 1, 3), steps=5)
    for name, word in (("empty", "no ring file"), ("none", "no such directory"), ("nothing", "no record"),
                       ("steps", "0 collectives found"), ("missing", "no ring of rank 2")):
        assert cli.main(["report", str(tmp_path / name)]) == 4
        assert word in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "missing"), "--allow-missing"]) == 0
    assert "no ring of rank 2" in capsys.readouterr().out


def test_t17_lost_records_and_two_jobs_in_one_directory_are_told(tmp_path, capsys):
    straggling(tmp_path / "lost", capacity=60)
    assert "oldest records were overwritten" in as_text(report_of(tmp_path / "lost"))
    straggling(tmp_path / "two", size=4, steps=3)
    straggling(tmp_path / "two", size=3, steps=3)
    assert cli.main(["report", str(tmp_path / "two")]) == 4
    assert "rings of two jobs" in capsys.readouterr().err
    (tmp_path / "two" / "ring-00000-main.hvdring").write_text('{"a": 1}')
    with pytest.raises(TimelineError, match="no ring file of hvdlite"):
        load_job(tmp_path / "two")


def test_values_are_plain(tmp_path):
    straggling(tmp_path)
    json.dumps(as_values(report_of(tmp_path)), allow_nan=False)


def test_t15_a_reading_of_the_time_of_day_that_is_interrupted_does_not_count(monkeypatch):
    """5 ms pass in six of seven readings, before or after the time of day is read."""
    now, number = [10**9], [0]

    def monotonic_ns():
        number[0] += 1
        now[0] += 100 if number[0] in (7, 8) or number[0] % 2 else 5_000_000
        return now[0]

    monkeypatch.setattr(recorder.time, "monotonic_ns", monotonic_ns)
    monkeypatch.setattr(recorder.time, "time_ns", lambda: now[0] + 10**18)
    found = recorder.time_of_day()
    assert abs(found.realtime_ns - 10**18 - found.monotonic_ns) <= found.realtime_error_ns == 50


def test_t15_a_time_of_day_that_is_set_while_the_job_runs_moves_what_comes_later_and_is_in_the_error(tmp_path):
    made = MadeJob(tmp_path, 1)
    made.step([5 * MS])
    header = read_ring(made.rings[0][0].path).header
    off = header["realtime_ns"] - header["monotonic_ns"]
    late = header["monotonic_ns"] + 10**9
    made.rings[0][2].span(Phase.TIME_OF_DAY, "time of day", late, late + off + 7 * MS, value=40)
    job = load_job(tmp_path)
    first, second = job.from_time_of_day(np.array([header["realtime_ns"], late + off + 7 * MS]))
    assert second - first == pytest.approx(10**9, abs=2e5)
    assert job.time_of_day_error_ns == pytest.approx(7 * MS, abs=1e5)
    assert job.from_time_of_day(np.array([job.epoch_ns]))[0] == pytest.approx(0, abs=2)


# Large rings, and those that lost what was old


def test_steps_whose_exchange_is_lost_or_left_out_are_not_told_as_if_they_had_computed_only(tmp_path, capsys):
    """The marks' ring holds all steps, that of the background thread the last ones."""
    made = MadeJob(tmp_path, 2, capacity=64)
    for rank in range(2):
        made.rings[rank][1] = recorder.RingTimeline(str(tmp_path), rank, 2, 1 << 18, "main")
    for _ in range(40):
        made.step([5 * MS, 5 * MS], moving=3 * MS)
    report = report_of(tmp_path)
    assert report.steps.num == 8 and report.steps.numbers[-1] == 39  # 7 records a step, and some that may be torn apart
    assert (report.steps.parts["exposed"] == 3 * MS).all() and (report.steps.length == 8 * MS).all()
    assert len(load_job(tmp_path).ranks[0].of(Phase.STEP)) == 40
    # The same where the reader leaves old ones out, and there is a word about it.
    few = report_of(tmp_path, newest=30)
    assert 2 <= few.steps.num <= 4 and (few.steps.parts["exposed"] == 3 * MS).all()
    assert cli.main(["report", str(tmp_path)]) == 0 and "oldest records were overwritten" in capsys.readouterr().out


def test_t16_a_report_of_some_steps_is_that_of_these_alone(tmp_path, capsys):
    made = straggling(tmp_path, steps=60, clocks={1: lambda at: at + 10**12})
    for at in range(MS, made.at, made.at // 5):
        made.reading(1, at, 1000)
    assert cli.main(["report", str(tmp_path), "--steps", "20:30", "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert sorted({row["step"] for row in values["per_step"]}) == list(range(20, 30))
    assert values["fusion"]["operations"] == 10 and values["stragglers"][0]["cost_ns"] == pytest.approx(30 * MS, abs=10)
    for rank in load_job(tmp_path, steps=(20, 30)).ranks:
        assert len(rank.of(Phase.STEP)) == len(rank.of(Phase.BUCKET)) == 10 and rank.cut > 300
    for command in (["report", str(tmp_path)], ["diff", str(tmp_path), str(tmp_path)]):
        assert cli.main([*command, "--steps", "900:901"]) == 4
        assert "--steps 900:901" in capsys.readouterr().err


@pytest.mark.parametrize("start", [0, (1 << 31) // 64 - 5, (1 << 32) // 64 - 5, 5 * (1 << 30) // 64 - 100])
def test_t16_rings_beyond_2_and_4_gb(tmp_path, monkeypatch, start):
    """Of 5 GB, most of it a hole: records around the places where 32-bit numbers end, and around the ring's end."""
    monkeypatch.setattr(recorder.os, "posix_fallocate", lambda file, at, size: os.truncate(file, size))
    ring = recorder.RingTimeline(str(tmp_path), 0, 1, 5 << 30)
    ring._count = start
    for number in range(start, start + 200):
        ring.span(Phase.QUEUE, f"t{number % 7}", number, number + 1)
    began = time.monotonic()
    read = read_ring(ring.path)
    assert read.records["start_ns"].tolist() == list(range(start, start + 200)) and read.torn == 0
    assert read.lost == max(0, start + 200 - ring._capacity)
    assert read_ring(ring.path, newest=30).records["start_ns"].tolist() == list(range(start + 170, start + 200))
    middle = read_ring(ring.path, wanted=lambda found: (found["start_ns"] >= start + 50) & (found["start_ns"] < start + 60))
    assert middle.records["start_ns"].tolist() == list(range(start + 50, start + 60)) and middle.cut == 190
    assert time.monotonic() - began < 10  # holes are passed over
    ring.close()
    assert len(read_ring(ring.path).records) == 200


def test_t16_a_report_of_very_many_records_takes_the_newest_and_says_so(tmp_path, capsys, monkeypatch):
    straggling(tmp_path, steps=60)
    monkeypatch.setattr(cli, "_MOST_RECORDS", 400)
    assert cli.main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "older records were left out" in told and "4 ranks, 13 steps" in told


def test_sizes_and_rates_have_the_unit_that_suits_them():
    told = [str(amounts.size(one)) for one in (0, 8, 999, 1000, 16384, 262144, 999_900, 4 << 20, 3e9, 2e12)]
    assert told == ["0 B", "8 B", "999 B", "1 kB", "16.4 kB", "262 kB", "1 MB", "4.19 MB", "3 GB", "2 TB"]
    assert amounts.rate(12_345_678) == "12.3 MB/s"


def test_a_call_made_once_neither_leads_the_waits_nor_counts_as_a_change(tmp_path):
    def run(name, start):
        made = MadeJob(tmp_path / name, 2)
        made.step([MS, MS + start], name="once")
        for _ in range(20):
            made.step([MS, 11 * MS], name="often")
        return report_of(tmp_path / name)

    one, two = run("one", 150 * MS), run("two", 10 * MS)
    assert [wait.name for wait in one.tensors] == ["allreduce.often", "allreduce.once"]
    changes = {change.name: change for change in diff.compare(one, two)}
    assert "wait for allreduce.once" not in changes
    assert changes["wait for allreduce.often"].before_ms == pytest.approx(10 * 20 / 21)  # per step


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_advice_to_overlap_fits_who_has_wrapped_the_optimizer_already(tmp_path, names):
    made = MadeJob(tmp_path, 2)
    for _ in range(6):
        made.step([MS, MS], moving=5 * MS, name="o")
    for rank in range(2):
        made.rings[rank][0].describe("allreduce.o", request("o", (10,), names=names))
    (advice,) = [one.what for one in report_of(tmp_path).advice if "overlaps" in one.what]
    assert ("HVDLITE_FUSION_THRESHOLD" in advice) == bool(names) and ("wrap the optimizer" in advice) == (not names)


def test_t15_sql_answers_what_no_report_does(tmp_path, capsys):
    straggling(tmp_path / "job", steps=12)

    def ask(*arguments):
        rc = cli.main(["sql", str(tmp_path / "job"), *arguments])
        told = capsys.readouterr()
        return rc, list(csv.reader(told.out.splitlines())), told.err

    assert ask("select count(*), max(dur_ns) from spans where phase = 'MPI_ALLREDUCE'")[1][1] == ["48", str(2 * MS)]
    rc, rows, _ = ask("select rank, sum(idle_ns), sum(caused_ns) from steps group by rank order by rank")
    assert rc == 0 and rows[0] == ["rank", "sum(idle_ns)", "sum(caused_ns)"]
    assert [row[1] for row in rows[1:]] == [str(12 * 30 * MS)] * 2 + ["0", str(12 * 30 * MS)]
    assert [row[2] for row in rows[1:]] == ["0", "0", str(12 * 30 * MS), "0"]
    assert ask("select distinct reason from spans where reason is not null")[1][1:] == [["large"]]
    assert ask("--steps", "3:5", "select count(distinct step) from steps")[1][1] == ["2"]
    rc, _, told = ask("select x from nowhere")
    assert rc == 4 and "no such table: nowhere" in told and "create table spans" in told
    kept = str(tmp_path / "kept.db")
    assert ask("--output", kept, "select 1")[0] == 0
    assert sqlite3.connect(kept).execute("select count(*) from ranks").fetchone() == (4,)
    assert ask("--output", kept, "select 1")[0] == 4  # never over what is there
    assert "create table steps" in "".join("".join(row) for row in ask(".schema")[1])


def test_t15_a_trace_of_viztracer_lies_at_its_time_of_day_beside_the_ranks(tmp_path, capsys):
    viztracer = pytest.importorskip("viztracer", reason="pip install hvdlite[test]")
    tracer = viztracer.VizTracer(output_file=str(tmp_path / "v.json"), verbose=0)
    tracer.start()
    at_ns = time.time_ns()
    tracer.log_instant("marked")
    tracer.stop()
    tracer.save()
    made = straggling(tmp_path / "job", steps=5)
    for rings in made.rings.values():
        for ring in rings:
            ring.close()
    job = load_job(tmp_path / "job")
    both = ["--output", str(tmp_path / "o.json"), "--with", str(tmp_path / "v.json")]
    assert cli.main(["export", str(tmp_path / "job"), *both]) == 0
    assert "viztracer trace" in capsys.readouterr().err
    events = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    (marked,) = [event for event in events if event["name"] == "marked"]
    assert marked["ts"] == pytest.approx(int(job.from_time_of_day(np.array([at_ns]))[0]) / 1e3, abs=2000)
    assert any(event["ph"] == "M" and event["args"].get("name", "").startswith("viztracer: ") for event in events)
