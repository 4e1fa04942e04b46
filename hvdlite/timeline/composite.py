"""Composite records: an operation, or a bucket with its phases, in one record instead of four. Readers see the four.

What is written in a step costs most by its number of records: after a step's computing, each runs from cold caches.

*Format*: phase WHOLE_OPERATION or WHOLE_BUCKET; start and end are those of the operation or the bucket. The low and the high
half of ``num_bytes``, then those of ``value``, are four u32; times in ns from the start, unless said otherwise.

- WHOLE_OPERATION: seen by a cycle (the end of QUEUE); agreed (the end of NEGOTIATE); how long WAIT took until the end; by how
  much the operation's number exceeds that of QUEUE and NEGOTIATE. ``detail``: the phase of the whole, and AWAITED where there
  is a WAIT.
- WHOLE_BUCKET: bytes; when its first phase began; when it was packed; when it was combined. ``detail``: the reason it was closed
  for, the phase of the exchange times 256, and PACKED where it was packed and unpacked; else the exchange is its only phase.

What does not fit (4 s, 4 GiB) is recorded as single records.
"""

from __future__ import annotations

from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import Record

#: What a delta must be below.
LIMIT = 1 << 32
#: Flags in ``detail``.
AWAITED = PACKED = 1 << 15
EXCHANGE_SHIFT, EXCHANGE_MASK, REASON_MASK = 8, 0x7f, 0xff
#: From the phase of an operation to that of its negotiation.
NEGOTIATING = Phase.NEGOTIATE_ALLREDUCE - Phase.ALLREDUCE


def singles(record: Record) -> list[Record]:
    """What a record stands for, as single records."""
    if record[0] == Phase.WHOLE_OPERATION:
        return _of_operation(record)
    return _of_bucket(record) if record[0] == Phase.WHOLE_BUCKET else [record]


def _of_operation(record: Record) -> list[Record]:
    _, name, start_ns, end_ns, low, detail, count, high, operation, plan, process_set = record
    (seen, agreed), (waited, later) = _halves(low), _halves(int(high))
    whole, own, rest = Phase(detail & ~AWAITED), operation - later, (plan, process_set)
    seen_ns, agreed_ns = start_ns + seen, start_ns + agreed
    found: list[Record] = [
        (Phase.QUEUE, name, start_ns, seen_ns, 0, 0, 0, 0.0, own, *rest),
        (Phase(whole + NEGOTIATING), name, seen_ns, agreed_ns, 0, 0, 0, 0.0, own, *rest),
        (whole, name, start_ns, end_ns, 0, 0, count, 0.0, operation, *rest)]
    if detail & AWAITED:
        found.append((Phase.WAIT, name, end_ns - waited, end_ns, 0, 0, 0, 0.0, operation, *rest))
    return found


def _of_bucket(record: Record) -> list[Record]:
    _, name, start_ns, end_ns, low, detail, count, high, operation, plan, process_set = record
    (num_bytes, first), (packed, combined) = _halves(low), _halves(int(high))
    exchange = Phase(detail >> EXCHANGE_SHIFT & EXCHANGE_MASK)
    first_ns, packed_ns, combined_ns = start_ns + first, start_ns + packed, start_ns + combined
    phases = [(exchange, first_ns, end_ns)]
    if detail & PACKED:
        phases = [(Phase.MEMCPY_IN_FUSION_BUFFER, first_ns, packed_ns), (exchange, packed_ns, combined_ns),
                  (Phase.MEMCPY_OUT_FUSION_BUFFER, combined_ns, end_ns)]
    return [*((phase, name, began_ns, ended_ns, num_bytes, 0, 0, 0.0, operation, plan, process_set)
              for phase, began_ns, ended_ns in phases),
            (Phase.BUCKET, name, start_ns, end_ns, num_bytes, detail & REASON_MASK, count, 0.0, operation, plan, process_set)]


def _halves(bits: int) -> tuple[int, int]:
    return bits & LIMIT - 1, bits >> 32
