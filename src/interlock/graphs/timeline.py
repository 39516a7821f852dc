"""Timelines: per layer one word that only grows. Gates wait for it inside a replay, signals advance it (a timeline semaphore in Vulkan)."""

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, Final

from interlock.core import interrupts
from interlock.core.buffer import Buffer
from interlock.core.errors import StreamError
from interlock.graphs.threads import SLICE_NANOSECONDS
from interlock.kernels.control import TIMELINE_ERROR, TIMELINE_WORDS
from interlock.kernels.native import Arguments, Kernel, NativeFunction, kernel

_SOURCE: Final = "interlock.kernels.cpu.gates"
ADVANCE: Final = NativeFunction("timeline_advance", ("i64", "i64", "i64"), f"{_SOURCE}:advance")
WAIT_REACHED: Final = NativeFunction("timeline_wait", ("i64",) * 4, f"{_SOURCE}:wait_reached")

MAX_STAMP: Final = TIMELINE_ERROR - 1


@functools.cache
def gate() -> Kernel:
    """Waits until `timeline` (the address of a layer's word) has reached GATE_TARGETS[layer] of the slot; a target of 0 is open.

    A timeline that was advanced with an error opens the gate and is not a fault of the step: whoever set the error knows. Needs no
    barrier after it (`Stream.launch(..., barrier=False)`), since each thread waits by itself.
    """
    return kernel("gate", f"{_SOURCE}:gate", ("timeline", "layer"))


@functools.cache
def signal() -> Kernel:
    """Advances `timeline` (the address of a layer's word) to the slot's STEP. Everything launched before it has been written."""
    return kernel("signal", f"{_SOURCE}:signal", ("timeline", "layer"))


class Timelines:
    """One timeline per layer, all at stamp 0. Any thread may advance or read them."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._buffer = Buffer.zeros((num_layers, TIMELINE_WORDS), "int64")
        self._words = self._buffer.numpy()
        self._advance: Callable[[int, int], int] = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(ADVANCE.address)
        self._wait: Callable[[int, int, int], int] = WAIT_REACHED.callable()

    def address(self, layer: int) -> int:
        """Address of the layer's word."""
        if not 0 <= layer < self.num_layers:
            raise StreamError(f"layer is {layer}, expected one of the {self.num_layers} layers of these timelines, from 0")
        return self._buffer.address + layer * TIMELINE_WORDS * 8

    def word(self, layer: int) -> Buffer:
        """The layer's word, int64 [1]."""
        return Buffer(self.address(layer), (1,), "int64", self._buffer.owner)

    def gate_arguments(self, layer: int) -> Arguments:
        """Arguments of a `gate` launch for the layer."""
        return gate().pack(timeline=self.word(layer), layer=layer)

    def signal_arguments(self, layer: int) -> Arguments:
        """Arguments of a `signal` launch for the layer."""
        return signal().pack(timeline=self.word(layer), layer=layer)

    def advance(self, layer: int, stamp: int, *, error: bool = False) -> bool:
        """Set the layer's timeline to `stamp` and wake who waits for it: a release store, so that what was written before is seen.

        False, and no change, if it had reached that stamp before. `error`: the stamp is reached because something failed.
        """
        if not 0 < stamp <= MAX_STAMP:
            raise StreamError(f"stamp is {stamp}, expected a number from 1 to {MAX_STAMP}")
        return bool(self._advance(self.address(layer), stamp | TIMELINE_ERROR if error else stamp))

    def value(self, layer: int) -> int:
        """The stamp that the layer's timeline has reached."""
        return self._load(layer) & MAX_STAMP

    def failed(self, layer: int) -> bool:
        """Whether that stamp was reached by a failure."""
        return bool(self._load(layer) & TIMELINE_ERROR)

    def wait(self, layer: int, stamp: int, timeout: float | None = None) -> bool:
        """Wait, without the GIL and with signals served, until the layer's timeline has reached `stamp`; False after `timeout` seconds."""
        address = self.address(layer)
        deadline = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        while True:
            interrupts.deliver()
            remaining = SLICE_NANOSECONDS if deadline is None else deadline - time.monotonic_ns()
            if self._wait(address, stamp, max(0, min(remaining, SLICE_NANOSECONDS))):
                return True
            if remaining <= 0:
                return False

    def _load(self, layer: int) -> int:
        self.address(layer)
        word: Any = self._words[layer, 0]
        return int(word)
