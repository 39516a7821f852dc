"""A captured program: launches in native memory, cut at Python calls where it was captured with breaks."""

from collections.abc import Callable
from dataclasses import dataclass

from interlock.core.buffer import Buffer
from interlock.core.errors import StreamError
from interlock.kernels.control import NO_BARRIER
from interlock.kernels.native import Arguments, Kernel

Hook = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Launches that are rung in together: int64 [num_launches, 2], pairs (kernel, arguments). `first` is the first one's index in the program."""

    launches: Buffer
    first: int
    num_launches: int


class Program:
    """What `Stream.capture` fills and `Stream.replay` runs, once and for all. Keeps alive all that its launches point to."""

    def __init__(self) -> None:
        self._launches: list[tuple[Kernel, Arguments, bool]] = []
        self._hooks: list[tuple[int, Hook]] = []  # each with the number of launches before it
        self._pieces: tuple[Piece | Hook, ...] | None = None
        self._is_begun = False

    @property
    def num_launches(self) -> int:
        """Number of launches, over all pieces."""
        return len(self._launches)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The kernel of each launch."""
        return tuple(kernel.name for kernel, _, _ in self._launches)

    @property
    def pieces(self) -> tuple[Piece | Hook, ...]:
        """Pieces and Python calls in order. Raises StreamError if the program was not captured to its end."""
        if self._pieces is None:
            raise StreamError("this program was not captured to its end; capture it with Stream.capture before it is replayed")
        return self._pieces

    def begin(self) -> None:
        """Begin the capture. Raises StreamError if one was begun before, whatever became of it."""
        if self._is_begun:
            raise StreamError("this program was captured already, or is being captured; a program is captured once, so create a new Program")
        self._is_begun = True

    def append(self, kernel: Kernel, args: Arguments, *, barrier: bool = True) -> None:
        """Add a launch; without `barrier` the next one may begin before every thread has ended this one."""
        self._check_open()
        self._launches.append((kernel, args, barrier))

    def append_call(self, hook: Hook) -> None:
        """Add a Python call: the current piece ends here."""
        self._check_open()
        self._hooks.append((len(self._launches), hook))

    def finish(self) -> None:
        """End the capture: lay the launches out in native memory."""
        self._check_open()
        pieces: list[Piece | Hook] = []
        start = 0
        for position, hook in self._hooks:
            pieces += [*self._piece(start, position), hook]
            start = position
        self._pieces = (*pieces, *self._piece(start, len(self._launches)))

    def _piece(self, start: int, stop: int) -> list[Piece]:
        if start == stop:
            return []
        launches = Buffer.zeros((stop - start, 2), "int64")
        words = launches.numpy()
        for i, (kernel, args, barrier) in enumerate(self._launches[start:stop]):
            words[i] = (kernel.address, args.address | (0 if barrier else NO_BARRIER))
        return [Piece(launches, start, stop - start)]

    def _check_open(self) -> None:
        if self._pieces is not None:
            raise StreamError("this program was captured already; a program is captured once, so create a new Program")


def profile_buffer(program: Program, num_threads: int) -> Buffer:
    """Memory for `Stream.replay(program, profile=...)`: nanoseconds, int64 [num_launches, num_threads]."""
    return Buffer.zeros((max(1, program.num_launches), num_threads), "int64")
