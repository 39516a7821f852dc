"""The `interlock` command: what a user sees of errors, interrupts and closed pipes is decided here and nowhere else."""

import os
import sys

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
EXIT_TERMINATED = 143  # 128 + SIGTERM
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main() -> None:
    """Run the command line. A user error is one line on standard error and exit status 2; no interrupt shows a traceback."""
    try:
        from interlock.commands import app
        from interlock.core.errors import InterlockError

        try:
            app()
        except InterlockError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(EXIT_USER_ERROR)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush has somewhere to go
        sys.exit(EXIT_BROKEN_PIPE)
