"""Compressors of the dense path: what a tensor is turned into before it is summed, and back.

A user's own class with static ``compress`` and ``decompress`` works as well.
"""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """How a tensor travels. What ``compress`` returns is summed elementwise over the ranks."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send and what ``decompress`` has to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Turn what arrived back into a tensor like the one given to ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in 16 bits; they are summed in float32 and cast once."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """float16: ten bits of fraction, overflows at 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """bfloat16: the range of float32, seven bits of fraction."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def checked(compression: Any) -> Any:
    """Return a compressor that can be used. Raises: TypeError for anything else."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression={compression!r} is no compressor: pass Compression.none, .fp16 or .bf16, or a class with "
            "static methods compress(tensor) and decompress(tensor, ctx)")
    return compression
