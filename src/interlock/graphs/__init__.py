"""Streams and graphs: asynchronous launches on a native thread team, capture, replay, events, timelines with gates and signals, copies."""

from interlock.graphs.copy import COPY_LIST, copy_list
from interlock.graphs.program import Program, profile_buffer
from interlock.graphs.stream import Event, Stream, raise_for_status
from interlock.graphs.threads import TEAM_FUNCTIONS, ThreadTeam
from interlock.graphs.timeline import ADVANCE, WAIT_REACHED, Timelines, gate, signal
from interlock.kernels.native import NativeFunction

NATIVE_FUNCTIONS: tuple[NativeFunction, ...] = (*TEAM_FUNCTIONS, COPY_LIST, ADVANCE, WAIT_REACHED, gate().function, signal().function)
"""Everything native of this floor, to be loaded together with the kernels of a model."""

__all__ = [
    "NATIVE_FUNCTIONS",
    "Event",
    "Program",
    "Stream",
    "ThreadTeam",
    "Timelines",
    "copy_list",
    "gate",
    "profile_buffer",
    "raise_for_status",
    "signal",
]
