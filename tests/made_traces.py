"""Rings of jobs that never ran, with every time chosen: what analysis must find is known to the nanosecond."""

from hvdlite.message import Key, ReduceOp, Request
from hvdlite.timeline import recorder
from hvdlite.timeline.phase import REASONS, Phase
from hvdlite.timeline.recorder import HEADER_BYTES, RECORD, RingTimeline

MS = 1_000_000


class MadeJob:
    """Steps of one allreduce each, after input and computing; all times in ns on rank 0's clock."""

    def __init__(self, directory, size, *, clocks=None, threshold=4 << 20, capacity=4096, ranks=None):
        """``clocks``: by rank, a function from rank 0's time to the rank's own; such ranks have clocks of their own."""
        self.size, self.clocks = size, clocks or {}
        self.rings = {}
        for rank in range(size) if ranks is None else ranks:
            facts = dict(fusion_threshold_bytes=threshold)
            own = [RingTimeline(str(directory), rank, size, HEADER_BYTES + capacity * RECORD.size, thread, facts)
                   for thread in ("background", "main", "clock")]
            if rank in self.clocks:
                for ring in own:
                    replace_header(ring, clock=f"clock {rank}")
            self.rings[rank] = own
        self.at, self.number, self.plan = 10 * MS, 0, 0

    def own(self, rank, at):
        return int(self.clocks[rank](at)) if rank in self.clocks else at

    def span(self, rank, phase, name, start, end, num_bytes=0, *, thread=0, operation=0, **rest):
        ring = self.rings[rank][thread]
        ring.operation, ring.plan = operation, self.plan
        ring.span(phase, name, self.own(rank, start), self.own(rank, end), num_bytes, **rest)

    def reading(self, rank, at, error_ns, off_ns=0):
        """A comparison of clocks that is wrong by ``off_ns``."""
        self.rings[rank][2].span(Phase.CLOCK, "clock", self.own(rank, at), at + off_ns, value=error_ns)

    def step(self, compute, *, moving=2 * MS, negotiating=0, reading=None, stopped=None, tail=0, num_bytes=1 << 20, name="grad",
             reason="large"):
        """``compute``, ``reading``, ``stopped``: by rank, ns before the rank submits; ``tail``: after the call."""
        begin, size = self.at, self.size
        reading, stopped = reading or [0] * size, stopped or [0] * size
        came = [begin + reading[rank] + compute[rank] for rank in range(size)]
        started = max(came) + negotiating
        ended = started + moving
        self.plan += 1
        operation = self.plan
        label = f"allreduce.{name}"
        for rank in self.rings:
            if reading[rank]:
                self.span(rank, Phase.INPUT, "input", begin, begin + reading[rank], thread=1, count=self.number)
            if stopped[rank]:
                at = begin + reading[rank]
                self.span(rank, Phase.NOT_RUNNING, "not running", at, at + stopped[rank])
            self.rings[rank][0].describe(label, request(name, (num_bytes // 4,)))
            self.span(rank, Phase.SUBMIT, label, came[rank], came[rank], num_bytes)
            self.span(rank, Phase.QUEUE, label, came[rank], came[rank], operation=operation)
            self.span(rank, Phase.NEGOTIATE_ALLREDUCE, label, came[rank], started, operation=operation)
            self.span(rank, Phase.MPI_ALLREDUCE, label, started, ended, num_bytes, operation=operation)
            self.span(rank, Phase.BUCKET, label, started, ended, num_bytes, operation=operation, detail=REASONS.index(reason),
                      count=1)
            self.span(rank, Phase.ALLREDUCE, label, came[rank], ended, operation=operation)
            self.span(rank, Phase.WAIT, label, came[rank], ended, operation=operation)
            self.span(rank, Phase.STEP, f"step {self.number}", begin, ended + tail, thread=1, count=self.number)
        self.at = ended + tail
        self.number += 1


_requests = {}


def request(name, shape, dtype="float32", op=ReduceOp.Sum, names=()):
    """A Request, the same object for the same arguments, as the runtime makes them."""
    key = (name, shape, dtype, op, names)
    return _requests.setdefault(key, Request(Key(0, "allreduce", name), (dtype,), (shape,), op=int(op), names=names))


def replace_header(ring, **facts):
    """Change what a ring says about itself."""
    import json

    header = json.loads(ring._memory[:HEADER_BYTES])
    ring._memory[:HEADER_BYTES] = json.dumps({**header, **facts}).encode().ljust(HEADER_BYTES)


assert recorder.MAGIC
