"""A compiler process: reads one JSON request a line, answers with a JSON header line and the object file. Run by `compile_pool`."""

import json
import os
import sys
import threading
import time

from interlock.core.errors import CompileError
from interlock.kernels.compiler import compile_object
from interlock.kernels.native import NativeFunction

_PARENT_SECONDS = 0.5  # how often the parent is looked for


def main() -> None:
    """Serve requests from standard input until it closes, or until the process with the id in the first argument is not the parent."""
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    # Whatever prints on standard output (Numba, a factory) must not end up between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        name, signature, source, arguments = json.loads(line)
        code = b""
        try:
            symbol, code = compile_object(NativeFunction(name, tuple(signature), source, tuple(arguments)))
            header: dict[str, object] = {"symbol": symbol, "size": len(code)}
        except CompileError as error:
            header = {"error": str(error)}
        except Exception as error:
            header = {"error": f"kernel {name} could not be compiled: {type(error).__name__}: {error}"}
        answers.write(json.dumps(header).encode() + b"\n" + code)
        answers.flush()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
