"""Kernels with a portable XLA fallback. Imports only JAX and NumPy."""
