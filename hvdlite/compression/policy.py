"""Which way a bucket travels under ``Compression.auto``: pure functions of what was measured.

Every rank has timed the same exchanges of a few sizes in each way, all together; the slowest rank's time counts. Between two
sizes the time is a straight line: latency and bandwidth of the link, and the rates of the codec, casts and sums, are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The ways, dense ones first: of two that take equally long the first is taken.
FP32, FP16, QUANTIZED = "fp32", "fp16", "quantized"
WAYS = (FP32, FP16, QUANTIZED)

#: What a way must gain over the one before it to be taken. Chosen: about what two measurements of one thing differ by.
LEAST_GAIN = 0.03
#: What a change must gain over the way that a bucket takes now. Chosen: so that a bucket does not go back and forth.
LEAST_GAIN_OF_A_CHANGE = 0.1


@dataclass(frozen=True)
class Decision:
    """How a bucket travels from now on, and why.

    *Units*: bytes of the bucket in float32, and seconds that each way is expected to take.
    """

    bucket: str
    num_bytes: int
    way: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{way} {1e3 * self.seconds[way]:.3g} ms" for way in WAYS if way in self.seconds)
        return f"{self.bucket} ({self.num_bytes / 1e6:.3g} MB): {times}: {self.way}"


def expected_s(num_bytes: int, measured: Sequence[tuple[int, float]]) -> float:
    """The time for so many bytes, on the line through the two nearest of ``measured``, pairs of bytes and seconds."""
    points = sorted(measured)
    above = next((index for index, (size, _) in enumerate(points) if size >= num_bytes), len(points) - 1)
    (small, fast), (large, slow) = points[max(0, above - 1)], points[max(1, above)]
    slope = max(0.0, (slow - fast) / (large - small))
    return max(fast + slope * (num_bytes - small), min(fast, slow) * num_bytes / large)


def decide(
    bucket: str, num_bytes: int, measured: Mapping[str, Sequence[tuple[int, float]]], now: str = ""
) -> Decision:
    """Choose the way of a bucket. ``measured``: of each way that is possible; ``now``: the one it takes, if any."""
    seconds = {way: expected_s(num_bytes, measured[way]) for way in WAYS if way in measured}
    chosen = next(iter(seconds))
    for way, taken in seconds.items():
        if taken < seconds[chosen] * (1 - LEAST_GAIN):
            chosen = way
    if now in seconds and seconds[chosen] > seconds[now] * (1 - LEAST_GAIN_OF_A_CHANGE):
        chosen = now
    return Decision(bucket, num_bytes, chosen, seconds)
