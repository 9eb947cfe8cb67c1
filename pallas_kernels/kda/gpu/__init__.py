"""Triton kernels of KDA for NVIDIA GPUs; everything here needs triton to import.

Reached through `pallas_kernels.kda.triton`, which imports it inside functions, so that
the rest of the package works without triton.
"""
