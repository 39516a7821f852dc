"""Architectures that read like the paper, and readers of checkpoints."""
