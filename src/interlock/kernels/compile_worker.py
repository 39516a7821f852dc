"""A compiler process: reads one JSON request a line, answers with a JSON header line and the object file. Run by `compile_cache`."""

import json
import sys

from interlock.kernels.compile_cache import compile_object
from interlock.kernels.native import NativeFunction


def main() -> None:
    """Serve requests from standard input until it closes."""
    for line in sys.stdin.buffer:
        name, signature, source, arguments = json.loads(line)
        code = b""
        try:
            symbol, code = compile_object(NativeFunction(name, tuple(signature), source, tuple(arguments)))
            header: dict[str, object] = {"symbol": symbol, "size": len(code)}
        except Exception as error:
            header = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + code)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
