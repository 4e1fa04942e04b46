"""hvdrun's parts, without a job: hosts, allocations, settings, output, channel, hang reports, leftovers. Names begin with rows of
the launcher's table in the design."""

import json
import os
import select
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.errors import ConfigError
from hvdlite.launch import cli, options, sweep
from hvdlite.launch.allocation import find_allocation
from hvdlite.launch.binding import format_cpus, gpu_of, num_threads, parse_cpus, share
from hvdlite.launch.channel import MAX_HELLO_BYTES, Channel, is_proof, proof
from hvdlite.launch.environment import Passing, is_secret, rank_environment
from hvdlite.launch.hang import HangWatch, RankState, describe_hang
from hvdlite.launch.hosts import Host, format_hosts, parse_hostfile, parse_hosts, place
from hvdlite.launch.job import OutputOptions
from hvdlite.launch.oom import num_oom_kills
from hvdlite.launch.outcome import Outcome, RankEnd
from hvdlite.launch.output import Output, check_prefix
from hvdlite.launch.tracebacks import StderrTail

# -- L8: hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, expected", [
    ("h", [Host("h")]), ("h:2", [Host("h", 2)]), ("h1:2,h2:3", [Host("h1", 2), Host("h2", 3)]),
    ("user@h2:2", [Host("h2", 2, "user")]), ("[fd00::1]:2", [Host("fd00::1", 2)]), ("[::1]", [Host("::1")]),
    ("me@[fd00::1]:1", [Host("fd00::1", 1, "me")]), ("10.0.0.7:4", [Host("10.0.0.7", 4)]),
    ("my-host.example.org:3", [Host("my-host.example.org", 3)]), (" h1:1 , h2:1 ", [Host("h1", 1), Host("h2", 1)]),
    ("n[01-03,7]:2", [Host("n01", 2), Host("n02", 2), Host("n03", 2), Host("n7", 2)]),
    ("n[9-11]", [Host("n9"), Host("n10"), Host("n11")]),
    ("r[1-2]n[1-2]:1", [Host(f"r{r}n{n}", 1) for r in (1, 2) for n in (1, 2)]),
    ("u@n[1-2].lan:1", [Host("n1.lan", 1, "u"), Host("n2.lan", 1, "u")]), ("h:1,h:2", [Host("h", 3)]), ("h,h", [Host("h", 2)]),
    ("a_b:1", [Host("a_b", 1)]),
])
def test_l8_hosts_are_read(text, expected):
    assert parse_hosts(text) == expected


@pytest.mark.parametrize("text, says", [
    ("", "names no host"), (",", "names no host"), ("h:", "''"), ("h:two", "'two' is no number"), ("h:-1", "'-1'"),
    ("h:0", "0 slots hold no rank"), ("h:2:3", "without brackets"), ("::1:2", "write [::1]:2"),
    ("[::1]:x", "'x'"), ("h 1:2", "'h 1'"),
    ("n[1-]:2", "no range"), ("n[3-1]", "smaller number first"), ("n[1-9999999]", "too long"), ("@h", "user name"),
    ("a b@h", "user name"),
    ("h;rm:2", "no host name"), ("-oProxyCommand=x", "no host name"), ("h1:1,,h2", "no host name"),
    ("[::1", "'[::1'"), ("n[]", "no range"),
])
def test_l8_what_is_no_host_is_told(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text)
    assert str(caught.value).startswith("-H: ") and says in str(caught.value)


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True) | st.just("fd00::7") | st.just("10.1.2.3")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.builds(Host, _NAMES, st.none() | st.integers(1, 999), st.just("") | st.just("someone")),
                min_size=1, max_size=6, unique_by=lambda host: (host.name, host.user)))
def test_l8_hosts_survive_being_written_and_read(hosts):
    assert parse_hosts(format_hosts(hosts)) == hosts


def test_l8_hostfiles_of_open_mpi_mpich_and_deepspeed():
    text = "# head\r\n\r\nlocalhost slots=2 # x\r\nh1:3\n\th2\tslots = 2 max_slots=4\nh3\n"
    text += "worker-1 slots=4\nu@h4 slots=1\nh1 slots=1"
    assert parse_hostfile(text, "f") == [
        Host("localhost", 2), Host("h1", 4), Host("h2", 2), Host("h3"), Host("worker-1", 4), Host("h4", 1, "u")]


@pytest.mark.parametrize("text, says", [
    ("a slots=1\n\nh slots=two", "hosts.txt:3: 'slots=two' is not a number"),
    ("a\nh lots=8", "hosts.txt:2: 'lots=8' is not understood"),
    ("a\nh 8\n", "hosts.txt:2: '8' is not understood"),
    ("", "hosts.txt: names no host"), ("# only\n", "hosts.txt: names no host"),
    ("a slots=0", "hosts.txt:1: 'slots=0': 0 slots"),
])
def test_l8_a_bad_line_of_a_hostfile_is_told_with_its_number_and_text(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert str(caught.value).startswith(says)
    if ":" in says.split(" ")[0][len("hosts.txt:"):]:
        assert repr(text.splitlines()[-1].strip()) in str(caught.value)


def test_l8_ranks_are_placed_in_order_and_never_beyond_the_slots():
    names = [host.name for host in place(parse_hosts("a:2,b:1,c"), 5)]
    assert names == ["a", "a", "b", "c", "c"]
    assert [host.name for host in place(parse_hosts("a,b"), 3)] == ["a", "a", "b"]
    assert len(place(parse_hosts("a:2,b"), None)) == 3
    with pytest.raises(ConfigError, match="-np 4: more ranks than the 3 slots of a:2,b:1"):
        place(parse_hosts("a:2,b:1"), 4)


# -- L9: allocations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ, files, system, hosts", [
    ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}, {}, "Slurm",
     [Host("n1", 2), Host("n2", 2), Host("n3", 1)]),
    ({"SLURM_JOB_NODELIST": "n[01,4],login"}, {}, "Slurm", [Host("n01", 1), Host("n4", 1), Host("login", 1)]),
    ({"LSB_MCPU_HOSTS": "a 2 b 4"}, {}, "LSF", [Host("a", 2), Host("b", 4)]),
    ({"PBS_NODEFILE": "/f"}, {"/f": "a\na\nb\n"}, "PBS", [Host("a", 2), Host("b", 1)]),
    ({"PE_HOSTFILE": "/f"}, {"/f": "a 2 q@a UNDEFINED\nb 3 q@b UNDEFINED\n"}, "Grid Engine", [Host("a", 2), Host("b", 3)]),
])
def test_l9_allocations_are_found(environ, files, system, hosts):
    found = find_allocation(environ, files.__getitem__)
    assert found is not None and found.system == system and list(found.hosts) == hosts
    assert all(name in found.origin for name in environ)


@pytest.mark.parametrize("environ, says", [
    ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2"}, "3 hosts"), ({"LSB_MCPU_HOSTS": "a 2 b"}, "pairs"),
    ({"PBS_NODEFILE": "/no/such"}, "cannot be read"), ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "x"}, "'x'"),
])
def test_l9_an_allocation_that_makes_no_sense_is_told(environ, says):
    with pytest.raises(ConfigError, match=says):
        find_allocation(environ)


def test_l9_no_allocation():
    assert find_allocation({}) is None


# -- L19, L20: processors, GPUs --------------------------------------------------------------------------------------


def test_l19_ranks_share_the_allowed_processors():
    assert [share([3, 1, 5, 7], 2, rank) for rank in (0, 1)] == [(1, 3), (5, 7)]
    assert share([0, 1, 2], 2, 0) == () and share([0, 1], 1, 0) == ()
    parts = [share(range(7), 3, rank) for rank in range(3)]
    assert sorted(sum(parts, ())) == list(range(7)) and all(len(part) >= 2 for part in parts)
    assert (num_threads(8, 3), num_threads(1, 4)) == (2, 1)


def test_l20_gpus_by_local_rank():
    assert [gpu_of(("GPU-a", "GPU-b"), rank) for rank in range(3)] == ["GPU-a", "GPU-b", "GPU-a"] and gpu_of((), 1) == ""


# -- L7: environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, secret", [
    (b"AWS_SECRET_ACCESS_KEY", True), (b"GITHUB_TOKEN", True), (b"DB_PASSWORD", True), (b"api_key", True),
    (b"WANDB_API_KEY", True),
    (b"PATH", False), (b"TOKENIZERS_PARALLELISM", False), (b"GOOGLE_APPLICATION_CREDENTIALS", False), (b"TOKEN_FILE", False),
    (b"OMP_NUM_THREADS", False), (b"KEYBOARD", False),
])
def test_l7_secrets_are_known_by_name(name, secret):
    assert is_secret(name) is secret


def test_l7_what_is_passed():
    caller = {b"A_TOKEN": b"t", b"B_TOKEN": b"u", b"SSH_CONNECTION": b"c", b"X": b"1"}
    passed, withheld = Passing.of(["B_TOKEN", "NEW=a=b", "E="], False).apply(caller)
    assert passed == {b"B_TOKEN": b"u", b"X": b"1", b"NEW": b"a=b", b"E": b""} and withheld == ["A_TOKEN"]
    assert Passing.of([], True).apply(caller)[0] == caller
    assert Passing.of(["P,Q"], False).missing({b"P": b""}) == ["Q"]
    with pytest.raises(ValueError, match="no name"):
        Passing.of(["=x"], False)
    assert rank_environment({b"PMI_RANK": b"9", b"A": b"1"}, {b"PMI_RANK": b"0", b"B": b"2"}) == {b"PMI_RANK": b"0", b"A": b"1"}


# -- L14: channel ----------------------------------------------------------------------------------------------------


def _pair():
    left, right = socket.socketpair()
    return Channel(left, trusted=True), right


def _frame(kind, payload):
    return struct.pack("!IB", len(payload) + 1, ord(kind)) + payload


def test_l14_frames_arrive_whole_however_they_are_cut():
    channel, wire = _pair()
    data = _frame("J", b'{"kind": "x", "n": 1}') + _frame("O", b"\xff\0bytes") + _frame("E", b"")
    seen = []
    for byte in data:
        wire.send(bytes([byte]))
        seen += channel.receive()
    assert seen == [{"kind": "x", "n": 1}, {"kind": "data", "stream": 1, "data": b"\xff\0bytes"},
                    {"kind": "data", "stream": 2, "data": b""}]
    wire.close()
    assert channel.receive() is None


@pytest.mark.parametrize("data", [
    struct.pack("!IB", 0, ord("J")), struct.pack("!IB", (32 << 20) + 1, ord("J")), _frame("P", b"x"), _frame("J", b"not json"),
    _frame("J", b"[1]"), _frame("J", b'{"no": "kind"}'), _frame("J", b'{"kind": 1}'), _frame("J", b'{"kind": "data"}'),
    _frame("J", b"[" * 200000), _frame("J", b"\x80\x04K\x01."), _frame("J", b"\xff\xfe"),
])
def test_l14_garbage_is_a_value_error_and_nothing_else(data):
    channel, wire = _pair()
    wire.setblocking(False)
    with pytest.raises(ValueError):
        while data or select.select([channel], [], [], 1)[0]:
            data = data[wire.send(data[:1 << 16]):] if data else data
            assert channel.receive() is not None


def test_l14_before_the_token_was_shown_frames_are_small():
    channel, wire = _pair()
    channel.trusted = False
    wire.send(_frame("J", b" " * MAX_HELLO_BYTES))
    with pytest.raises(ValueError, match="a frame of 4097 bytes"):
        channel.receive()


def test_l14_a_proof_binds_the_token_the_role_the_nonce_and_the_rank():
    assert is_proof(proof("t", "guard", "n", 1), "t", "guard", "n", 1)
    for other in [("u", "guard", "n", 1), ("t", "hvdrun", "n", 1), ("t", "guard", "m", 1), ("t", "guard", "n", 2)]:
        assert not is_proof(proof(*other), "t", "guard", "n", 1)
    assert not is_proof(None, "t", "guard", "n", 1) and not is_proof("\udc80", "t", "guard", "n", 1)


# -- L16: output -----------------------------------------------------------------------------------------------------


class _Out:
    """Output into bytes, on a clock that stands unless told."""

    def __init__(self, num_ranks=2, terminal=False, environ=None, **changes):
        self.now_s = 100.0
        self.output = Output(
            OutputOptions(**changes), num_ranks, lambda rank: f"h{rank}", environ=environ, clock=lambda: self.now_s)
        for sink in self.output.sinks.values():
            sink.is_terminal = sink.is_terminal or terminal
            sink.flush = lambda is_ready=True: None

    def take(self, rank, data, stream=1):
        self.output.take(rank, stream, data)
        return self

    def seen(self, stream=1):
        pending = self.output.sinks[stream].pending
        text = bytes(pending)
        pending.clear()
        return text


def test_l16_lines_are_whole_and_a_rank_s_keep_their_order():
    out = _Out(prefix="[{rank}] ", fold=False)
    out.take(0, b"half").take(1, b"one\ntwo\nthr").take(0, b" line\n").take(1, b"ee\n")
    assert out.seen() == b"[1] one\n[1] two\n[0] half line\n[1] three\n"


def test_l16_without_a_prefix_bytes_pass_unchanged():
    assert _Out().take(0, b"\xff\xfe\0\x1b[1m\n").seen() == b"\xff\xfe\0\x1b[1m\n"


def test_l16_the_prefix_is_a_template():
    out = _Out(prefix="{host}/{rank}/{stream}> ", fold=False).take(1, b"x\n").take(1, b"y\n", stream=2)
    assert (out.seen(), out.seen(2)) == (b"h1/1/stdout> x\n", b"h1/1/stderr> y\n")
    assert check_prefix("{time} {{x}}") == "{time} {{x}}"
    for bad, says in [("{rnk}", "rnk"), ("{", "{"), ("{rank:02d}", "rank:02d")]:
        with pytest.raises(ValueError, match=says):
            check_prefix(bad)


def test_l16_equal_lines_are_folded_and_none_waits_long():
    out = _Out(4, prefix="[{rank}] ")
    for rank in range(4):
        out.take(rank, b"same\n")
    assert out.seen() == b"[0-3] same\n"
    out.take(0, b"a\n").take(1, b"a\n").take(3, b"b\n")
    assert out.seen() == b""
    out.now_s += 0.05
    out.output.act_on_time()
    assert out.seen() == b"[0-1] a\n[3] b\n"
    out.output.end_rank(2)
    for rank in (0, 1, 3):
        out.take(rank, b"c\n")
    assert out.seen() == b"[0-1,3] c\n"


def test_l16_progress_bars_are_thinned_in_logs_and_their_last_state_is_kept():
    out = _Out(1)
    for step in range(100):
        out.take(0, b"%d%%\r" % step)
        out.now_s += 0.01
    out.take(0, b"100%\n")
    lines = out.seen().split(b"\n")
    assert lines[0] == b"0%" and lines[-2] == b"100%" and 2 <= len(lines) <= 5
    out.take(0, b"1%\r").take(0, b"2%\r").output.end_rank(0)
    assert out.seen().endswith(b"2%\n")


def test_l16_carriage_returns_before_a_newline_are_no_progress_bar():
    assert _Out().take(0, b"dos\r").take(0, b"\nnext\r\n").seen() == b"dos\r\nnext\r\n"


def test_l16_progress_bars_stand_on_a_terminal():
    out = _Out(1, terminal=True, prefix="", fold=False, color="never")
    out.take(0, b"1%\r2%\r3%")
    assert out.seen() == b"\r\x1b[K1%\r\x1b[K2%\r\x1b[K3%"
    assert out.take(0, b"\r").seen() == b"\r\x1b[K3%" and out.take(0, b"4%").seen() == b"\r\x1b[K3%\r\x1b[K4%"
    assert out.take(0, b"\rdone\n").seen().endswith(b"\r\x1b[K4%\r\x1b[Kdone\n")


def test_l16_a_progress_bar_is_cut_to_the_terminal_s_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    out = _Out(2, terminal=True, prefix="[{rank}] ", fold=False, color="never")
    assert out.take(1, "é234567890\r".encode()).seen() == b"\r\x1b[K[1] " + "é234567".encode()


@pytest.mark.parametrize("color, environ, colored", [
    ("auto", {}, True), ("auto", {"NO_COLOR": "1"}, False), ("auto", {"TERM": "dumb"}, False), ("never", {}, False),
    ("always", {"NO_COLOR": "1"}, True)])
def test_l16_colour_on_a_terminal_only_where_it_is_wanted(monkeypatch, color, environ, colored):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    out = _Out(prefix="[{rank}] ", fold=False, color=color, environ=environ).take(0, b"x\n")
    assert (out.seen() == b"\x1b[36m[0] \x1b[0mx\n") is colored


def test_l16_a_file_per_rank_holds_exactly_its_bytes(tmp_path):
    out = _Out(11, directory=str(tmp_path / "a b"), prefix="[{rank}] ", fold=False)
    out.take(10, b"1\r2\r\xff\n").take(0, b"e\n", stream=2)
    out.output.close()
    assert (tmp_path / "a b/rank.10/stdout").read_bytes() == b"1\r2\r\xff\n"
    assert (tmp_path / "a b/rank.00/stderr").read_bytes() == b"e\n"
    assert (tmp_path / "a b/output.log").read_bytes().endswith(b"[0] e\n")


def test_l16_a_line_without_an_end_takes_little_memory():
    out = _Out(1)
    for _ in range(40):
        out.take(0, b"x" * 65536)
    assert len(out.seen()) > 1 << 20 and len(out.output._streams[0, 1].partial) <= (1 << 20) + 65536


# -- L3: the closing box ---------------------------------------------------------------------------------------------


def _tail(text, now_s=0.0):
    tail = StderrTail()
    shown = [line for one in text.encode().splitlines(keepends=True) for line in tail.take(one, now_s)]
    return tail, shown


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    f()\nRuntimeError: boom\nsecond line\n'


def test_l3_a_traceback_is_held_and_found():
    tail, shown = _tail("before\n" + TRACE)
    assert shown == [b"before\n"] and tail.error() == "RuntimeError: boom"
    assert tail.traceback() == TRACE.splitlines() and tail.release_before_traceback() == []
    chained = TRACE + "\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE.replace("boom", "later")
    tail, _ = _tail(TRACE.replace("boom", "an earlier one, survived") + chained)
    assert tail.error() == "RuntimeError: later" and tail.traceback() == chained.splitlines()
    assert _tail("no trace\n")[0].traceback() == []


def test_l3_a_traceback_after_which_the_program_went_on_is_not_the_cause():
    tail, _ = _tail(TRACE)
    assert tail.take(b"within the hold\n", 2.0) == [] and tail.error() == "RuntimeError: boom"
    assert len(tail.release()) == 6
    assert tail.take(b"epoch 7\n", 4.0) == [b"epoch 7\n"] and tail.error() == "" and tail.traceback() == []


@pytest.mark.parametrize("text, says", [
    ("Traceback (most recent call last):\n" + '  File "a.py", line 3, in f\n    g()\n' * 3000 + "RecursionError: too deep\n",
     "RecursionError: too deep"),
    ('  File "a.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
    ('  + Exception Group Traceback (most recent call last):\n  |   File "a.py", line 1, in <module>\n  |     f()\n'
     "  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n    | ValueError: a\n"
     "    +---------------- 2 ----------------\n    | TypeError: b\n    +------------------------------------\n",
     "ExceptionGroup: two (2 sub-exceptions)")], ids=["recursion", "syntax", "group"])
def test_l3_the_cause_is_found_in_tracebacks_of_every_shape(text, says):
    tail, _ = _tail(text)
    trace = tail.traceback()
    assert tail.error() == says and len(trace) <= 401 and trace[0] == text.splitlines()[0] and trace[-1] == text.splitlines()[-1]


def test_l3_the_box_names_the_cause_its_meaning_and_the_others_in_one_line_and_ends_with_the_traceback():
    outcome = Outcome(0, {
        2: RankEnd(2, 12, 1, 10, host="h2", error="RuntimeError: boom", traceback=tuple(TRACE.splitlines())),
        0: RankEnd(0, 10, 1, 40, is_victim=True, error="PeerFailedError: rank 2 failed"),
        1: RankEnd(1, 11, -15, 50, sent=(15,)), 3: RankEnd(3, 13, -9, 60, sent=(15, 9)), 4: RankEnd(4, 14, 3, 30)})
    box = outcome.box().splitlines()
    assert "rank 2 (pid 12) failed first" in box[1] and "on h2" in box[1] and "RuntimeError: boom" in box[2]
    assert sum("Ranks 1, 3 were then ended by hvdrun" in line for line in box) == 1
    assert any("Rank 4 also failed by itself: exit code 3" in line for line in box)
    assert box[-len(TRACE.splitlines()):] == TRACE.splitlines() and outcome.exit_code == 1
    assert outcome.box(is_unicode=False).isascii()


@pytest.mark.parametrize("returncode, code, says", [
    (-11, 139, "native code touched memory"), (-9, 137, "dmesg"),
    (139, 139, "SIGSEGV"), (-15, 143, "scheduler"), (7, 7, "exit code 7")])
def test_l2_codes_and_meanings(returncode, code, says):
    outcome = Outcome(0, {0: RankEnd(0, 5, returncode, 10)})
    assert outcome.exit_code == code and says in outcome.box()


def test_l2_a_victim_s_code_never_wins():
    ends = {0: RankEnd(0, 5, -15, 10, sent=(15,)), 1: RankEnd(1, 6, 1, 11, is_victim=True), 2: RankEnd(2, 7, 7, 12)}
    assert Outcome(0, ends).exit_code == 7


def test_l3_out_of_memory_is_read_from_the_control_group(tmp_path):
    (tmp_path / "g").mkdir()
    (tmp_path / "g/memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    (tmp_path / "of").write_text("0::/g\n")
    assert num_oom_kills(str(tmp_path), str(tmp_path / "of")) == 3 and num_oom_kills(str(tmp_path), "/no/such") == 0
    box = Outcome(0, {0: RankEnd(0, 5, -9, 10, oom_killed=True, max_rss_bytes=2 * 10**9)}).box()
    assert "out of memory" in box and "2.0 GB" in box


# -- L18: hang reports -----------------------------------------------------------------------------------------------


def _stack(*frames):
    return "Current thread 0x0000 (most recent call first):\n" + "".join(
        f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)


def test_l18_ranks_are_grouped_with_what_they_wait_for():
    waiting = _stack(("/x/hvdlite/handle.py", 80, "wait"), ("/u/train.py", 42, "step"))
    states = {rank: RankState(rank, waiting, {"operation": "allreduce 'grad7'", "pending": [["allreduce 'grad7'", 9.0]]})
              for rank in (0, 1, 3)}
    states[2] = RankState(2, _stack(("/u/data.py", 10, "load")), {"pending": []})
    text = describe_hang(states, {4: "exit code 0"}, 6)
    assert "ranks 0-1, 3: wait in allreduce 'grad7' at train.py:42" in text and "rank 2: is at data.py:10 (load)" in text
    assert "rank 4: ended, exit code 0" in text and "rank 5: did not answer" in text
    assert "allreduce 'grad7': submitted 9 s ago by ranks 0-1, 3; waits for rank" in text


def test_l18_a_job_hangs_when_something_is_pending_long_or_nothing_happens():
    watch = HangWatch(5.0)
    assert not watch.verdict(100.0)
    watch.note_progress(0, 0.0)
    assert not watch.verdict(4.9) and "no rank wrote" in watch.verdict(5.0)
    watch.note_state(0, {"completed": 3, "pending": [["allreduce 'x'", 1.0]]}, 10.0)
    watch.note_progress(0, 13.9)
    assert not watch.verdict(13.9) and "allreduce 'x' has been pending for 5 s" in watch.verdict(14.0)
    watch.note_state(0, {"completed": 4, "pending": []}, 14.0)
    assert not watch.verdict(15.0)


def test_l18_time_in_which_nobody_listened_is_no_silence():
    watch = HangWatch(5.0)
    watch.note_progress(0, 0.0)
    watch.note_state(0, {"completed": 1, "pending": [["allreduce 'x'", 0.1]]}, 1.0)
    watch.shift(20.0)
    assert watch.asks(21.0) and not watch.verdict(25.9) and watch.verdict(26.0)


def test_l19_processors_travel_as_ranges():
    for cpus in ([], [0], [0, 1, 2, 8, 10, 11], list(range(1024))):
        assert parse_cpus(format_cpus(cpus)) == cpus
    assert len(format_cpus(range(100_000))) < 20
    assert parse_cpus(None) == parse_cpus("x") == parse_cpus("1-") == parse_cpus([1]) == []


def test_l18_a_slow_start_is_no_hang():
    watch = HangWatch(5.0, startup_s=30.0, num_ranks=2)
    watch.note_start(0.0)
    watch.note_progress(0, 1.0)
    assert not watch.verdict(35.9)
    assert "for 35 s (--hang-timeout 5 and --start-timeout 30: rank 1 never wrote anything" in watch.verdict(36.0)
    watch.note_state(1, {"completed": 0, "pending": []}, 20.0)
    assert not watch.verdict(24.9) and watch.verdict(25.0)


# -- L24: leftovers --------------------------------------------------------------------------------------------------


def test_l24_leftovers_of_dead_jobs_go_and_nothing_else(tmp_path, monkeypatch):
    shm, tmp = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    tmp.mkdir()
    dead, mapped = "mpich_shm_dead", "sm_segment.mapped"
    for name in (dead, mapped, "mpich_shm_of_others", "precious"):
        (shm / name).write_bytes(b"\0" * 4096)
    import mmap

    with open(shm / mapped, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert sweep.mapped_segments("self", str(shm)) == {mapped}
        sweep.update_claim(sweep.claim_path("dead00000000", 0, str(shm)), {dead, mapped, "precious", "../tmp/x"})
        sweep.update_claim(sweep.claim_path("a11fe0000000", 0, str(shm)), {"mpich_shm_of_others"})
        gone, kept = tmp / "hvdrun-gone", tmp / "hvdrun-kept"
        for path, owner in ((gone, "999999999 1"), (kept, None)):
            path.mkdir()
            (path / "token").write_text("t")
            (path / "owner").write_text(owner) if owner else sweep.own(str(path))
        monkeypatch.setattr(sweep, "living_jobs", lambda: {"a11fe0000000"})
        sweep.sweep_shared_memory(str(shm), str(tmp))
    assert sorted(os.listdir(shm)) == ["hvdlite-a11fe0000000-0", "mpich_shm_of_others", "precious", mapped]
    assert os.listdir(tmp) == ["hvdrun-kept"]


# -- L22: settings ---------------------------------------------------------------------------------------------------


def _settings(argv, environ=None, table=None):
    parser = cli.build_parser()
    return options.resolve(parser.parse_args(argv), environ or {}, "f.toml", table or {})


def test_l22_the_command_line_wins_then_the_environment_then_the_file():
    table = {"np": 2, "grace": 3, "env": {"A": "1"}, "cycle_time_ms": 2.5, "fold": False}
    settings = _settings(["-np", "4", "-x", "B=2"], {"HVDLITE_NP": "3", "HVDLITE_GRACE": "9"}, table)
    assert (settings.np, settings.origin("np")) == (4, "command line")
    assert (settings.grace, settings.origin("grace")) == (9.0, "environment variable HVDLITE_GRACE")
    assert (settings.unwind, settings.origin("unwind")) == (1.0, "default")
    assert settings.env == ("A=1", "B=2") and settings.fold is False and settings.origin("fold") == "f.toml"
    assert settings.variables == {"HVDLITE_CYCLE_TIME": "2.5"}
    lines = options.explain(settings).splitlines()
    assert any(line.split()[0] == "np" and "4" in line and "command line" in line for line in lines)


@pytest.mark.parametrize("table, says", [
    ({"npp": 2}, "'npp' is no setting: did you mean 'np'"), ({"np": "two"}, "'two' is not a whole number"),
    ({"np": [1]}, "no single value"),
    ({"fold": "yes"}, "neither true nor false"), ({"env": [1]}, "list of names")])
def test_l22_a_file_that_makes_no_sense_is_told(table, says):
    with pytest.raises(ConfigError, match=r"f\.toml") as caught:
        _settings([], {}, table)
    assert says in str(caught.value)


def test_l25_the_command_begins_at_the_first_word_that_is_no_option():
    parser = cli.build_parser()

    def split(text):
        own, command = cli.split_command(parser, text.split())
        return " ".join(own), " ".join(command)

    assert split("-np 2 prog -np 3 -- x") == ("-np 2", "prog -np 3 -- x")
    assert split("-np 2 -- -weird --x") == ("-np 2", "-weird --x")
    assert split("-np 2 -m mod -- --x 1") == ("-np 2 -m mod", "--x 1")
    assert split("-np 2 -m mod --x 1") == ("-np 2 -m mod", "--x 1")
    assert split("--explain env") == ("--explain env", "") and split("--explain -np 2 p") == ("--explain -np 2", "p")
    assert split("--fold -np 2 p") == ("--fold -np 2", "p")


def test_horovodrun_s_flags_are_known():
    parser = cli.build_parser()
    arguments = parser.parse_args(["-np", "2", "--gloo", "--mpi", "--disable-cache", "--thread-affinity", "1"])
    assert options.ignored_flags(arguments) == ["--gloo", "--thread-affinity"]
    for flag in ("--hierarchical-allreduce", "--no-hierarchical-allreduce"):
        assert not options.ignored_flags(parser.parse_args(["-np", "2", flag]))
    with pytest.raises(ConfigError, match="--min-np"):
        options.ignored_flags(parser.parse_args(["--min-np", "2"]))


def test_doctor_s_page_marks_the_blocked_and_the_slow_pair_with_a_remedy():
    from hvdlite.launch.doctor import Patient, find, report

    facts = {"python": {"python": "3.11", "hvdlite": "1", "mpi4py": "4", "MPI": "MPICH 4", "numpy": "2"}, "cpus": 2,
             "shm_bytes": 1 << 30, "shm_free_bytes": 1 << 30, "nofile": 4096, "interfaces": {"eth0": "10.0.0.1"}}
    other = {**facts, "python": {**facts["python"], "numpy": "1"}, "shm_bytes": 1 << 20, "nofile": 10}
    patients = [Patient(Host("h1"), "", facts=facts), Patient(Host("h2"), "", facts=other, clock_offset_s=-9.0),
                Patient(Host("h3"), "", error="ssh: exit code 255: no route")]
    pairs = {("h1", "h2"): {"error": "timed out", "via": "eth0"}, ("h2", "h1"): {"bytes_per_s": 5e6, "via": "eth0"},
             ("h1", "h4"): {"bytes_per_s": 1e9, "via": "eth0"}}
    found = find(patients, pairs)
    for says in ["h3: ssh: exit code 255: no route: try ssh h3 true", "numpy: 2 on h1; 1 on h2: install",
                 "h2: /dev/shm has 1 MiB",
                 "h2: 10 open files are allowed: ulimit -n", "h2: its clock differs by -9.0 s: start chronyd",
                 "h1 -> h2: cannot connect from interface eth0: timed out: open the firewall", "h2 -> h1: 5.0 MB/s over eth0"]:
        assert any(one.startswith(says) for one in found), (says, found)
    page = report(patients, pairs, found)
    assert "BLOCKED" in page and "5.0 MB/s" in page and page.count("\nx ") == len(found)
    assert report(patients[:1], {}, []).endswith("all is well")


def test_json_of_the_dry_run_masks_secrets(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2),1")
    monkeypatch.setenv("MY_TOKEN", "canary")
    assert cli.main(["--dry-run", "--json", "-x", "MY_TOKEN", "prog", "a b"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert "canary" not in text and facts["environment"]["MY_TOKEN"] == "***" and facts["command"] == ["prog", "a b"]
    assert [(row["host"], row["local_rank"], row["local_size"]) for row in facts["placement"]] == [
        ("n1", 0, 2), ("n1", 1, 2), ("n2", 0, 2), ("n2", 1, 2), ("n3", 0, 1)]
    assert facts["num_ranks"] == 5 and facts["origin"].startswith("Slurm: SLURM_JOB_NODELIST")


def test_a_value_that_looks_like_an_option_is_a_value():
    parser = cli.build_parser()
    words = ["--ssh-args", "-i key -p 22", "--mpi-args", "-x", "-np", "2", "--fold"]
    arguments = parser.parse_args(options.joined(parser, words))
    assert (arguments.ssh_args, arguments.mpi_args, arguments.np, arguments.fold) == ("-i key -p 22", "-x", 2, True)
