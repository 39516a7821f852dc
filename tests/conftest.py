"""Puts this folder on the path of all tests, so that they share `checkpoints`."""
