"""What is on the wire when gradients are quantised: codec (the reference), codec_cpu (its twin in Numba)."""
