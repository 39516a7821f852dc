from collections.abc import Iterator
from dataclasses import dataclass

import graph_kernels
import pytest

from interlock.core.buffer import Buffer
from interlock.graphs import Stream, ThreadTeam


@dataclass
class Machine:
    """A team of two threads, a stream on it, and the step slot that is bound to the stream."""

    team: ThreadTeam
    stream: Stream
    slot: Buffer
    status: Buffer


@pytest.fixture
def machine() -> Iterator[Machine]:
    team = ThreadTeam(2)
    stream = Stream(team)
    slot, status = graph_kernels.step_slot()
    stream.bind_slot(slot.address, status)
    yield Machine(team, stream, slot, status)
    team.shutdown()
