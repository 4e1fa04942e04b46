"""The compressors, under the name that scripts import them by: those of every framework (``hvdlite.compressor``)."""

from hvdlite.compressor import BF16Compressor, Compression, Compressor, FP16Compressor, NoneCompressor, Quantized, checked

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "Quantized", "checked"]
