"""CodecSpec: what a code means, and how many bytes it takes. ``codec`` tells the algorithm and the wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.compression.rotation import GROUP, ROWS

BITS = (1, 2, 4, 8)
SCALES = ("rotated", "l1", "two_means", "rms")

#: What an index stands for, in units of the scale. Two bits: Lloyd and Max's levels for a Gaussian; above, uniform.
LEVELS = {
    1: np.array([-1, 1], np.float32),
    2: np.array([-1.510, -0.4528, 0.4528, 1.510], np.float32),
    4: np.arange(16, dtype=np.float32) - np.float32(7.5),
    8: np.arange(256, dtype=np.float32) - np.float32(127.5),
}
#: Where |v| passes to the next level, in standard deviations: 2 bits: the one threshold; above: the step of the uniform
#: quantiser of a Gaussian with least error (J. Max, Quantizing for minimum distortion, 1960).
STEPS = {1: np.float32(1), 2: np.float32(0.9816), 4: np.float32(0.3352), 8: np.float32(0.0308)}
#: Below this the squares of a group lose digits; and what v is multiplied by when its sum of squares is too small, too large.
SMALLEST, RAISE, LOWER = np.float32(2.0**-80), np.float32(2.0**100), np.float32(2.0**-80)
NAN = np.float32(np.nan)

#: What a gradient's elements may be; the last two are 16 bits each in memory.
DTYPES = ("float32", "float64", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}

#: Columns of a table of pieces, int64 of shape (num_pieces, 7). Addresses are in bytes, 0: none. A piece starts on a group
#: boundary of its tensor and ends on one, or with the tensor.
#: GRADIENT: of its first element, in the gradient's dtype; without one it is zero. COUNT: its elements.
#: RESIDUAL, SHADOW: float32, padded to whole groups; without shadow the new residual is dropped.
#: OUT: where the result goes, COUNT elements of the gradient's dtype; may be GRADIENT.
#: MOMENT: float32 second moments, COUNT elements. FIRST: the piece's first group within the message.
GRADIENT, COUNT, RESIDUAL, SHADOW, OUT, MOMENT, FIRST = range(7)
NUM_COLUMNS = 7

#: Of p = sqrt(moment) + FLOOR * sqrt(mean moment of the group), by which a gradient is divided. Measured: with it Adam on
#: 1 bit reached the accuracy of dense Adam (Fashion-MNIST, 2 to 8 ranks); without the second term elements that have no
#: moment receive noise they cannot bear.
FLOOR = np.float32(0.03)


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """What two ranks must agree on to understand each other's codes, and the sizes that follow from it."""

    bits: int = 1
    scale: str = "rotated"
    group: int = GROUP

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"quantised exchange: bits is {self.bits!r}: use 1, 2, 4 or 8")
        if self.scale not in SCALES:
            raise ValueError(f"quantised exchange: scale is {self.scale!r}: use one of {', '.join(SCALES)}")
        if self.bits > 1 and self.scale != "rotated":
            raise ValueError(f"quantised exchange: bits is {self.bits} with scale {self.scale!r}: use scale='rotated' or bits=1")
        if self.group != GROUP:
            raise ValueError(f"quantised exchange: group is {self.group!r}: use {GROUP}, the only one there is")

    @property
    def words_per_group(self) -> int:
        """Of 32 bits."""
        return ROWS * self.bits

    @property
    def scales_per_group(self) -> int:
        """Of float32."""
        return 2 if self.scale == "two_means" else 1

    def num_groups(self, num_elements: int) -> int:
        """How many groups hold so many elements."""
        return -(-num_elements // self.group)

    def padded(self, num_elements: int) -> int:
        """The length of a residual, or of any array of the rotated domain."""
        return self.num_groups(num_elements) * self.group

    def wire_bytes(self, num_elements: int) -> int:
        """Bytes of words and scales, without headers."""
        return self.num_groups(num_elements) * 4 * (self.words_per_group + self.scales_per_group)

    def split(self, message: np.ndarray, num_elements: int) -> tuple[np.ndarray, np.ndarray]:
        """The words and the scales of a message, as views. *Shapes*: message (wire_bytes,), uint8, aligned to 4."""
        middle = self.num_groups(num_elements) * 4 * self.words_per_group
        return message[:middle].view(np.uint32), message[middle : self.wire_bytes(num_elements)].view(np.float32)


def check_table(pieces: np.ndarray) -> None:
    """*Raises*: ValueError."""
    if pieces.dtype != np.int64 or pieces.ndim != 2 or pieces.shape[1] != NUM_COLUMNS or not pieces.flags.c_contiguous:
        raise ValueError(
            f"quantised exchange: a table of pieces is {pieces.dtype} of shape {pieces.shape}: "
            f"make it int64, C-contiguous, of shape (num_pieces, {NUM_COLUMNS})"
        )


def check_pieces(spec: CodecSpec, has_negative: bool, has_moment: bool) -> None:
    """*Raises*: ValueError."""
    if has_negative:
        raise ValueError("quantised exchange: a piece has a negative COUNT or FIRST: build the table anew")
    if has_moment and spec.scale != "rotated":
        raise ValueError(f"quantised exchange: a piece has a MOMENT with scale {spec.scale!r}: use scale='rotated'")


def check_messages(spec: CodecSpec, num_groups: int, messages: Sequence[tuple[np.ndarray | None, np.ndarray]]) -> None:
    """Hold words and scales to what so many groups need. *Raises*: ValueError."""
    for words, scales in messages:
        for array, dtype, each in ((words, np.uint32, spec.words_per_group), (scales, np.float32, spec.scales_per_group)):
            if array is None:
                continue
            if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(
                    f"quantised exchange: words or scales are {array.dtype} of shape {array.shape}: "
                    f"make them one-dimensional, contiguous uint32 and float32"
                )
            if len(array) < num_groups * each:
                raise ValueError(
                    f"quantised exchange: words or scales have {len(array)} elements where {num_groups} groups "
                    f"need {num_groups * each}: size them by CodecSpec.words_per_group and scales_per_group"
                )
