"""Streams, thread team, programs, events, timelines: how kernels are launched, captured and replayed."""
