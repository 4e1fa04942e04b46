"""Output: the ranks' lines on hvdrun's standard output and error: whole, prefixed, folded; progress bars; a file per rank.

*Guarantees*: a line is never broken or mixed with another, and a rank's lines keep their order. Bytes that are no text pass
as they are. Little is held in memory: who sends more than the reader takes waits (see ``backlog_bytes``).
*Threads*: none; nothing here blocks but :meth:`Output.finish`. The descriptors stay as they were: no flag of theirs changes,
because other programs share them; a pipe that polls as writable takes ``PIPE_BUF`` bytes at once.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import string
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdlite.errors import ConfigError
from hvdlite.launch.job import OutputOptions
from hvdlite.launch.tracebacks import StderrTail

#: A line that grows beyond this is cut, so that memory stays bounded. Chosen.
MAX_LINE_BYTES = 1 << 20
#: How long a line waits for equal ones of other ranks. Chosen: below what a person notices.
FOLD_WINDOW_S = 0.04
#: In logs one frame of a progress bar appears so often. Sourced: the issue's 0.5 s.
FRAME_INTERVAL_S = 0.5
_PIPE_BYTES = 4096
_FILE_BYTES = 1 << 18
_FIELDS = {"rank", "host", "time", "t", "local_rank", "stream"}
_COLORS = (36, 33, 35, 32, 34, 31)  # of a terminal: cyan, yellow, magenta, green, blue, red
_CLEAR = b"\r\x1b[K"
_ENDS = re.compile(rb"\r?\n|\r")
_NEVER_S = float("inf")


def check_prefix(template: str) -> str:
    """Return a template that can be used. Raises: ValueError that says what it may hold."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as reason:
        raise ValueError(f"{template!r}: {reason}") from None
    if unknown := names - _FIELDS:
        raise ValueError(f"{template!r}: {{{sorted(unknown)[0]}}} is unknown: "
                         "use {rank}, {local_rank}, {host}, {time}, {stream}")
    try:
        template.format(**dict.fromkeys(_FIELDS, "0"))
    except (ValueError, LookupError, AttributeError) as reason:
        raise ValueError(f"{template!r}: {reason}: fields are text, such as 0-3: write {{rank:>3}} for a width") from None
    return template


class Sink:
    """One of hvdrun's own descriptors."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = bytearray()
        self.is_terminal = os.isatty(descriptor)
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            mode = stat.S_IFREG
            self.is_closed = True
        else:
            self.is_closed = False
        # What never makes a writer wait takes more at a time.
        self._piece_bytes = _FILE_BYTES if stat.S_ISREG(mode) else _PIPE_BYTES

    def write(self, data: bytes) -> None:
        """Add what is to be written; it goes out in :meth:`flush`."""
        if not self.is_closed:
            self.pending += data

    def flush(self, is_ready: bool = True) -> None:
        """Write what can be written without waiting, given that the descriptor polled as writable."""
        while self.pending and is_ready:
            piece = bytes(memoryview(self.pending)[:self._piece_bytes])
            try:
                written = os.write(self.descriptor, piece)
            except BlockingIOError:
                return  # somebody made it non-blocking
            except OSError:
                # Nobody reads it any more, as after `| head`: the job goes on, as it would with no terminal.
                self.is_closed = True
                self.pending.clear()
                return
            del self.pending[:written]
            is_ready = bool(select.select([], [self.descriptor], [], 0)[1])


@dataclass
class _Stream:
    """What one rank wrote on one stream and is no line yet."""

    partial: bytearray = field(default_factory=bytearray)
    frame_at_s: float = -_NEVER_S
    frame: bytes = b""
    draws: bool = False  # whether it has written a progress bar
    file: int = -1


class Output:
    """The output of all ranks."""

    def __init__(
        self, options: OutputOptions, num_ranks: int, host: Callable[[int], str] = lambda rank: "",
        local_rank: Callable[[int], int] = lambda rank: rank, environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._num_ranks = options, num_ranks
        self._host, self._local_rank, self._clock = host, local_rank, clock
        self.sinks = {1: Sink(1), 2: Sink(2)}
        self._streams = {(rank, stream): _Stream() for rank in range(num_ranks) for stream in (1, 2)}
        self.tails = [StderrTail() for _ in range(num_ranks)]
        self._live = {1: set(range(num_ranks)), 2: set(range(num_ranks))}
        self._queues: dict[int, dict[int, deque[tuple[float, bytes]]]] = {
            stream: {rank: deque() for rank in range(num_ranks)} for stream in (1, 2)}
        self._waiting = {1: 0, 2: 0}
        on_terminal = self.sinks[1].is_terminal
        self._template = options.prefix if options.prefix is not None else (
            "[{rank}] " if (on_terminal and num_ranks > 1) or options.fold else "")
        tells_rank = "{rank}" in self._template and "{local_rank}" not in self._template and "{host}" not in self._template
        tells_time = "{time}" in self._template or "{t}" in self._template
        self._folds = tells_rank and not tells_time and num_ranks > 1 if options.fold is None else options.fold
        no_color = (environ or {}).get("NO_COLOR", "")
        self._colors = {
            stream: options.color == "always" or (
                options.color == "auto" and sink.is_terminal and not no_color and (environ or {}).get("TERM") != "dumb")
            for stream, sink in self.sinks.items()}
        self._transient: int | None = None  # the stream whose terminal shows an unfinished line
        self._merged = -1
        if options.directory:
            self._open_files(options.directory)

    def _open_files(self, directory: str) -> None:
        """Raises: ConfigError where they cannot be made."""
        try:
            self._make_files(directory)
        except OSError as reason:
            self.close()
            raise ConfigError(
                f"--output-dir {directory}: {reason.strerror or reason}: name a directory that can be written") from None

    def _make_files(self, directory: str) -> None:
        width = len(str(self._num_ranks - 1))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for (rank, stream), one in self._streams.items():
            folder = os.path.join(directory, f"rank.{rank:0{width}d}")
            os.makedirs(folder, exist_ok=True)
            one.file = os.open(os.path.join(folder, "stdout" if stream == 1 else "stderr"), flags, 0o666)
        self._merged = os.open(os.path.join(directory, "output.log"), flags, 0o666)

    # -- what ranks write --------------------------------------------------------------------------------------

    def take(self, rank: int, stream: int, data: bytes) -> None:
        """Take what a rank wrote."""
        one = self._streams[rank, stream]
        if one.file >= 0:
            self._write_file(one.file, data)
        if self._options.is_raw:
            self.sinks[stream].write(data)
            return
        partial = one.partial
        start = max(0, len(partial) - 1)
        partial += data
        begin = 0
        for match in _ENDS.finditer(partial, start):
            if match.group() == b"\r":
                if match.end() == len(partial):
                    one.draws = True
                    break  # a newline may follow
                self._frame(rank, stream, one, bytes(partial[begin:match.start()]))
            else:
                self._line(rank, stream, bytes(partial[begin:match.end()]))
                one.frame = b""
            begin = match.end()
        del partial[:begin]
        if len(partial) > MAX_LINE_BYTES:
            self._line(rank, stream, bytes(partial) + b"\n")
            partial.clear()
        if one.draws and partial.strip() and self.sinks[stream].is_terminal:
            self._show(rank, stream, bytes(partial).rstrip(b"\r"))  # the newest state is shown, not the one before it

    def _frame(self, rank: int, stream: int, one: _Stream, text: bytes) -> None:
        """A state of a progress bar: on a terminal it stands until the next; of a log it is a line now and then."""
        if not text.strip():
            return
        one.draws = True
        if self.sinks[stream].is_terminal:
            self._show(rank, stream, text)
        elif self._clock() - one.frame_at_s >= FRAME_INTERVAL_S:
            one.frame_at_s = self._clock()
            one.frame = b""
            self._line(rank, stream, text + b"\n")
        else:
            one.frame = text

    def _show(self, rank: int, stream: int, text: bytes) -> None:
        """Draw an unfinished line on the terminal's last row, cut to its width, where the next one replaces it."""
        width = shutil.get_terminal_size().columns - 1 - len(self._prefixed((rank,), stream, b"", color=False))
        shown = text.decode("utf-8", "surrogateescape")[:max(width, 1)].encode("utf-8", "surrogateescape")
        self.sinks[stream].write(_CLEAR + self._prefixed((rank,), stream, shown))
        self._transient = stream

    def _line(self, rank: int, stream: int, line: bytes) -> None:
        tail = self.tails[rank]
        lines = tail.take(line, self._clock()) if stream == 2 else [line]
        if not self._options.holds_tracebacks:
            lines += tail.release()
        for one in lines:
            self._queue(rank, stream, one)

    def _queue(self, rank: int, stream: int, line: bytes) -> None:
        if not self._folds:
            self._emit((rank,), stream, line)
            return
        self._queues[stream][rank].append((self._clock(), line))
        self._waiting[stream] += 1
        self._fold(stream)

    def _fold(self, stream: int, all_now: bool = False) -> None:
        """Emit the lines that need not wait: those that every rank has, those that waited long enough."""
        queues, live = self._queues[stream], self._live[stream]
        now_s = self._clock()
        while self._waiting[stream]:
            heads = {rank: queue[0] for rank, queue in queues.items() if queue}
            first = min(heads, key=lambda rank: heads[rank][0])
            at_s, line = heads[first]
            same = [rank for rank, head in heads.items() if head[1] == line]
            if not (all_now or live <= set(same) or now_s - at_s >= FOLD_WINDOW_S or len(queues[first]) > 1000):
                return
            for rank in same:
                queues[rank].popleft()
            self._waiting[stream] -= len(same)
            self._emit(tuple(sorted(same)), stream, line)

    def _emit(self, ranks: tuple[int, ...], stream: int, line: bytes) -> None:
        sink = self.sinks[stream]
        text = self._prefixed(ranks, stream, line)
        if self._transient is not None and sink.is_terminal:
            text, self._transient = _CLEAR + text, None
        sink.write(text)
        if self._merged >= 0:
            self._write_file(
                self._merged, self._prefixed(ranks, stream, line, template=self._template or "[{rank}] ", color=False))
        if len(sink.pending) > _FILE_BYTES:
            sink.flush(bool(not sink.is_closed and select.select([], [sink.descriptor], [], 0)[1]))

    def _prefixed(self, ranks: tuple[int, ...], stream: int, text: bytes, template: str | None = None,
                  color: bool | None = None) -> bytes:
        template = self._template if template is None else template
        if not template:
            return text
        now = time.strftime("%H:%M:%S") if "{t" in template else ""
        prefix = template.format(
            rank=_worded(ranks), local_rank=",".join(str(self._local_rank(rank)) for rank in ranks),
            host=",".join(sorted({self._host(rank) for rank in ranks})), time=now, t=now,
            stream="stdout" if stream == 1 else "stderr").encode("utf-8", "surrogateescape")
        if self._colors[stream] if color is None else color:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLORS[ranks[0] % len(_COLORS)], prefix)
        return prefix + text

    # -- time, and the end -------------------------------------------------------------------------------------

    @property
    def backlog_bytes(self) -> int:
        """What nobody has read yet: of hvdrun's own output."""
        return sum(len(sink.pending) for sink in self.sinks.values())

    def deadline_s(self) -> float:
        """When :meth:`act_on_time` has something to do."""
        heads = [queue[0][0] + FOLD_WINDOW_S for queues in self._queues.values() for queue in queues.values() if queue]
        return min([*heads, *(tail.release_at_s for tail in self.tails)], default=_NEVER_S)

    def act_on_time(self) -> None:
        """Emit what has waited long enough."""
        now_s = self._clock()
        for rank, tail in enumerate(self.tails):
            if now_s >= tail.release_at_s:
                for line in tail.release():
                    self._queue(rank, 2, line)
        for stream in (1, 2):
            self._fold(stream)

    def end_rank(self, rank: int) -> None:
        """A rank writes no more: its unfinished line is one, and others need not wait for it."""
        for stream in (1, 2):
            one = self._streams[rank, stream]
            rest = bytes(one.partial).rstrip(b"\r") or one.frame
            one.partial.clear()
            if rest:
                self._line(rank, stream, rest + b"\n")
            self._live[stream].discard(rank)
            self._fold(stream)

    def say(self, text: str) -> None:
        """A line of hvdrun's own, on standard error."""
        self.say_bytes(text.encode("utf-8", "backslashreplace") + b"\n")

    def say_bytes(self, data: bytes) -> None:
        """What a program of hvdrun's own says, on standard error, as it comes."""
        if self._transient is not None:
            data, self._transient = _CLEAR + data, None
        self.sinks[2].write(data)

    def emit_rest(self, dropped: frozenset[int] = frozenset()) -> None:
        """Emit all that still waits, but the tracebacks of ``dropped`` ranks, which are told otherwise."""
        for rank, tail in enumerate(self.tails):
            lines = tail.release_before_traceback() if rank in dropped else tail.release()
            for line in lines:
                self._queue(rank, 2, line)
        for stream in (1, 2):
            self._fold(stream, all_now=True)
        if self._transient is not None:
            self.sinks[self._transient].write(b"\n")
            self._transient = None

    def finish(self, interrupted: Callable[[float], bool]) -> None:
        """Write all that is pending, however slowly it is read; ``interrupted(seconds)`` waits and may end that."""
        while any(sink.pending for sink in self.sinks.values()):
            waiting = [sink for sink in self.sinks.values() if sink.pending]
            ready = select.select([], [sink.descriptor for sink in waiting], [], 0)[1]
            for sink in waiting:
                sink.flush(sink.descriptor in ready)
            if not ready and interrupted(0.05):
                return

    def _write_file(self, descriptor: int, data: bytes) -> None:
        """Write to one of the files; where that fails the job goes on without them, which is said."""
        try:
            _write_all(descriptor, data)
        except OSError as reason:
            self.close()
            self.say(f"hvdrun: warning: --output-dir {self._options.directory}: {reason.strerror}: the files end here, the job "
                     "goes on")

    def close(self) -> None:
        """Close the files."""
        for one in self._streams.values():
            if one.file >= 0:
                os.close(one.file)
                one.file = -1
        if self._merged >= 0:
            os.close(self._merged)
            self._merged = -1


def _worded(ranks: tuple[int, ...]) -> str:
    """``0-2,5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view):]
