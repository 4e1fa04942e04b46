"""Compression: how tensors travel, for every framework alike; ``compression=`` of a call or of an optimizer wrapper.

Cast: floating-point tensors go as 16 bits. Quantised: 1 to 8 bits per element with error feedback (``collectives.quantized``).
A user's own class with static ``compress`` and ``decompress`` works as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from hvdlite import submission
from hvdlite.adapters import adapter_for
from hvdlite.compression.exchange import ExchangeSpec
from hvdlite.compression.spec import CodecSpec
from hvdlite.errors import InvalidRequestError
from hvdlite.fusion import FLOATS
from hvdlite.handle import Handle
from hvdlite.submission import Submission
from hvdlite.tensor_queue import TensorEntry

#: Fewer elements than this gain nothing. Chosen after CNTK's, CGX's and BytePS's experience with small layers.
MIN_ELEMENTS = 16384


class Compressor:
    """How a tensor travels. What ``compress`` returns is summed elementwise over the ranks."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send and what ``decompress`` has to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Turn what arrived back into a tensor like the one given to ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every tensor as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in 16 bits; they are summed in float32 and cast once."""

    dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return adapter_for(tensor).cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return adapter_for(tensor).cast(tensor, ctx)


class FP16Compressor(_Cast):
    """float16: ten bits of fraction, overflows at 65504."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """bfloat16: the range of float32, seven bits of fraction. torch only: NumPy and CuPy have no such type."""

    dtype = "bfloat16"


@dataclass(frozen=True)
class Quantized(Compressor):
    """1, 2, 4 or 8 bits per element and a scale per group of 512, with what is left over sent in later calls.

    ``scale``: "rotated", or for comparison, with 1 bit, "l1", "two_means" (CNTK's) or "rms". ``schedule``: "ring", "two_shot",
    or "auto", the one that was measured to be the faster: name one if a job is to repeat another bit by bit. Optimizer wrappers
    exchange densely for ``warmup_steps`` steps, and always what has one dimension or none, fewer than ``min_elements`` elements,
    or a name that ``exclude`` holds: a function of the name, or patterns such as ``["embedding.*"]``. ``precondition``: "adam"
    quantises in units of the root of Adam's second moment, which all ranks hold alike, without residuals, after at least 20 dense
    steps; None: where the torch optimizer needs it; "none": never. On a single call compression is obeyed whatever the tensor;
    integers arrive exactly.

    float16, bfloat16, float32 and float64 tensors; Average and Sum. Residuals belong to the call's name: unnamed calls have none.
    Raises: InvalidRequestError for other values.
    """

    bits: int = 1
    scale: str = "rotated"
    group: int = 512
    warmup_steps: int = 0
    schedule: str = "auto"
    min_elements: int = MIN_ELEMENTS
    exclude: Callable[[str], bool] | Sequence[str] | None = None
    precondition: str | None = None

    def __post_init__(self) -> None:
        try:
            ExchangeSpec(CodecSpec(self.bits, self.scale, self.group), self.schedule)
        except ValueError as reason:
            raise InvalidRequestError(str(reason)) from reason
        if self.precondition not in (None, "adam", "none"):
            raise InvalidRequestError(
                f"quantised exchange: precondition is {self.precondition!r}: use 'adam', 'none', or None for what the optimizer "
                "needs")
        if self.precondition == "adam" and self.scale != "rotated":
            raise InvalidRequestError("quantised exchange: precondition='adam' with another scale: leave scale at 'rotated'")
        for name in ("warmup_steps", "min_elements"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InvalidRequestError(f"quantised exchange: {name} is {value!r}: use a number from 0")
        if isinstance(self.exclude, str) or not (
                self.exclude is None or callable(self.exclude) or all(isinstance(one, str) for one in self.exclude)):
            raise InvalidRequestError(f"quantised exchange: exclude is {self.exclude!r}: use a function of a name, or patterns")

    @cached_property
    def wire_name(self) -> str:
        """What requests say, and all ranks must agree on. Compiles the codec, so that nothing is compiled while peers wait."""
        import hvdlite.compression.codec_cpu  # noqa: F401

        return str(ExchangeSpec(CodecSpec(self.bits, self.scale, self.group), self.schedule))

    @cached_property
    def preconditioned_name(self) -> str:
        """As ``wire_name``, in units of a second moment."""
        import hvdlite.compression.codec_cpu  # noqa: F401

        return str(ExchangeSpec(CodecSpec(self.bits, self.scale, self.group), self.schedule, True))

    def moment_correction(self, num_ranks: int) -> float:
        """By what the square of a decoded gradient is too large: its energy is that of the gradient and of what quantising added.

        For gradients that are mostly noise, as in training; of each rank's part, and again of their sum, the share of
        ``1 - distortion`` is signal.
        *Source*: design.md, section 5; distortions: J. Max, Quantizing for minimum distortion, 1960, for a Gaussian.
        """
        kept = 1 - {1: 1 - 2 / math.pi, 2: 0.1175, 4: 0.01154, 8: 0.0001}[self.bits]
        return kept / (1 + (1 / kept - 1) * (num_ranks - 1) / num_ranks)

    def takes(self, name: str, shape: Sequence[int], dtype: str) -> bool:
        """Whether an optimizer wrapper quantises this gradient."""
        num_elements = 1
        for length in shape:
            num_elements *= length
        if len(shape) <= 1 or num_elements < self.min_elements or dtype not in FLOATS:
            return False
        if callable(self.exclude):
            return not self.exclude(name)
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude or ())

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        """Raises: NotImplementedError: codes cannot be summed, so this is no work for a user's thread."""
        raise NotImplementedError(
            "a quantised tensor cannot be had by itself: pass this as compression= to an allreduce or to DistributedOptimizer")


@dataclass(frozen=True)
class Auto(Quantized):
    """For each bucket the fastest of float32, float16 and 1 bit per element, as measured on this job's links and processors.

    Decided alike on all ranks, by the slowest one; measured again from time to time; rank 0 logs every decision (level info), and
    ``hvdlite.explain_compression()`` returns them.
    """

    @cached_property
    def wire_name(self) -> str:
        import hvdlite.compression.codec_cpu  # noqa: F401

        return "auto"


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    quantized = Quantized
    onebit = Quantized()
    auto = Auto()


def checked(compression: Any) -> Any:
    """Return a compressor that can be used. Raises: TypeError for anything else."""
    if compression is Quantized:
        return Compression.onebit
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression={compression!r} is no compressor: pass Compression.none, .fp16, .bf16, .onebit, .auto or "
            ".quantized(...), or a class with static methods compress(tensor) and decompress(tensor, ctx)")
    return compression


def compressed_allreduce(call: Submission, compression: Any, *, in_place: bool, **arguments: Any) -> Handle:
    """Queue an allreduce whose tensors travel as ``compression`` says; its result is in their own dtypes."""
    compression = NoneCompressor if compression is None else checked(compression)
    if isinstance(compression, Quantized):
        return submission.allreduce(call, in_place=in_place, compressor=compression.wire_name, **arguments)
    if compression is NoneCompressor:
        return submission.allreduce(call, in_place=in_place, **arguments)
    given = call.tensors
    sent = [compression.compress(tensor) for tensor in given]
    call.tensors = [tensor for tensor, _ in sent]

    def result(entry: TensorEntry) -> Any:
        arrived = [compression.decompress(buffer.tensor, context)
                   for buffer, (_, context) in zip(entry.outputs, sent, strict=True)]
        if in_place:
            for tensor, one in zip(given, arrived, strict=True):
                if tensor is not one:
                    _overwrite(tensor, one)
            arrived = given
        return arrived if call.is_group else arrived[0]

    return submission.allreduce(call, in_place=in_place, result=result, **arguments)


def _overwrite(tensor: Any, values: Any) -> None:
    target = adapter_for(tensor).buffer(tensor, True)
    target.array[:] = adapter_for(values).buffer(values, False).array
    if target.write_back:
        target.write_back()
