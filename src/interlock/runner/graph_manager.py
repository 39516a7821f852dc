"""The captured programs of a rank, one per batch descriptor, and the three ways in which a forward pass is launched."""

from collections.abc import Callable, Iterable

from interlock.core import interrupts
from interlock.core.forward_context import BatchDescriptor, CUDAGraphMode
from interlock.graphs.program import Program
from interlock.graphs.stream import Stream

Forward = Callable[[], object]


class GraphManager:
    """Launches a forward pass on `stream` in the mode of its descriptor. `forward` launches the model's kernels; the same in all modes."""

    def __init__(self, stream: Stream, forward: Forward) -> None:
        self._stream = stream
        self._forward = forward
        self._programs: dict[BatchDescriptor, Program] = {}

    def capture(self, descriptors: Iterable[BatchDescriptor]) -> None:
        """Capture one program per descriptor: whole for FULL, broken at the layer hooks for PIECEWISE. Runs no kernel."""
        for descriptor in descriptors:
            interrupts.deliver()
            program = Program()
            with self._stream.capture(program, breaks=descriptor.cg_mode is CUDAGraphMode.PIECEWISE):
                self._forward()
            self._programs[descriptor] = program

    def launch(self, descriptor: BatchDescriptor) -> None:
        """Launch the forward pass for the bound slot. Returns when everything is submitted, not when it has run."""
        if descriptor.cg_mode is CUDAGraphMode.NONE:
            self._forward()
        else:
            self._stream.replay(self._programs[descriptor])

    def program(self, descriptor: BatchDescriptor) -> Program:
        """The captured program of a descriptor."""
        return self._programs[descriptor]
