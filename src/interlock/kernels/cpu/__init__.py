"""Kernels for CPUs, written in Python and compiled by Numba through LLVM."""
