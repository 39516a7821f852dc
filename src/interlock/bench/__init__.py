"""Benchmarks: ours alone, and side by side with peers in one run."""
