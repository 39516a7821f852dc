"""The `interlock` command: what a user sees of errors, interrupts and closed streams is decided here and nowhere else."""

import contextlib
import errno
import io
import os
import sys
from typing import Any

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_OUTPUT_ERRORS = {errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF}


def main() -> None:
    """Run the command line. An error that the user can mend is one line on standard error and exit status 2; no interrupt, no reader that
    goes away and no full disk shows a traceback."""
    if _open_missing_streams():
        sys.exit(_fail("standard output is closed, expected somewhere to write results; redirect it to /dev/null to discard them", EXIT_USER_ERROR))
    _spell_out_the_unwritable()
    try:
        status = _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        status = _fail(f"the output cannot be written: {error.strerror}", EXIT_FAILED)
    _discard_unwritten()
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """Run the command and return its exit status. Typer's own `main` is left aside: it turns a closed pipe into status 1."""
    import typer

    from interlock.commands import app
    from interlock.core.errors import InterlockError
    from interlock.core.logs import set_up_logging

    usage_error: Any = typer.BadParameter.__base__  # typer does not name it, and brings its own copy of click
    try:
        set_up_logging()
        command = typer.main.get_command(app)
        with command.make_context("interlock", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except usage_error as error:
        where = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
        return _fail(error.format_message() + where, EXIT_USER_ERROR)
    except InterlockError as error:
        return _fail(str(error), EXIT_USER_ERROR)
    return 0


def _fail(message: str, status: int) -> int:
    """Say what is wrong, in one line."""
    with contextlib.suppress(OSError):
        print("error:", " ".join(message.split("\n")), file=sys.stderr, flush=True)
    return status


def _open_missing_streams() -> bool:
    """Put /dev/null where a standard stream was closed, lest a file that is opened later gets its descriptor; whether it was the output."""
    missing = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for number in missing:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if number > 0:
            setattr(sys, ("stdin", "stdout", "stderr")[number], os.fdopen(number, "w", closefd=False))
    return 1 in missing


def _spell_out_the_unwritable() -> None:
    """Characters that the encoding of a stream does not have are written as Python spells them, on standard output too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_unwritten() -> None:
    """Give the interpreter's last flush somewhere to go, where what is still unwritten cannot be."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
