"""Puts this folder on the path of all tests, so that they share `checkpoints`; and lets a generated case take as long as the machine needs."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
