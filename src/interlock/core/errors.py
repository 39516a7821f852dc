"""The errors that Interlock raises for things a user can change; `assert` is kept for our own invariants."""


class InterlockError(Exception):
    """Base of all errors that Interlock raises on purpose. The message names the thing, its value, what was expected, and what to do."""


class ConfigError(InterlockError, ValueError):
    """An engine option has a value that cannot be used."""


class CheckpointError(InterlockError):
    """A model file is missing, truncated, not supported, or does not hold exactly the parameters that the model needs."""


class RequestError(InterlockError, ValueError):
    """A request (prompt or sampling parameters) cannot be served as given; other requests are not touched."""


class KernelError(InterlockError, RuntimeError):
    """A kernel reported a fault through its status word; `launch`, `row` and `code` say where."""

    def __init__(self, message: str, *, code: int = 0, launch: int = -1, row: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.launch = launch
        self.row = row


class CompileError(InterlockError, RuntimeError):
    """A kernel could not be compiled or loaded on this machine."""


class StreamError(InterlockError, RuntimeError):
    """A stream, event, program or thread team was used in a state that does not allow it."""


class KVTransferError(InterlockError, RuntimeError):
    """A KV transfer could not be set up or did not land."""


class PeerMismatchError(KVTransferError):
    """A peer's KV identity, layout or version differs from ours; the message holds the two values."""


class KVLoadError(KVTransferError):
    """A request was promised KV that did not land, and the policy is `fail`."""


class LifecycleError(InterlockError, RuntimeError):
    """A connector step was driven out of order (double finish, finish without begin, leaked step, no forward context)."""


class DataParallelError(InterlockError, RuntimeError):
    """The ranks of a data-parallel engine did not come together, or one of them is gone."""
