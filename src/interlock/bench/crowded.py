"""Decoding on a crowded machine: as many busy processes as there are CPUs, so that every thread of an engine loses its CPU again and again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from interlock.bench.measure import Figure, alternate, compare, prompt_token_ids
from interlock.bench.peer import PeerProcess
from interlock.bench.session import Session, decode_seconds, generate

_PROMPT_TOKENS = 16
_NUM_TOKENS = 32

# Busy until standard input ends, whatever became of the parent.
_BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass
"""


def run(session: Session) -> list[Figure]:
    """Batch 1 behind a short context."""
    name = f"decode, batch 1, beside {os.cpu_count()} busy processes"
    engine = session.engine(max_model_len=512)

    def ours(number: int) -> float:
        return (_NUM_TOKENS - 1) / decode_seconds(generate(engine, [prompt_token_ids(_PROMPT_TOKENS, number)], _NUM_TOKENS))

    def theirs(peer: PeerProcess, number: int) -> float:
        answer = peer.request("decode", prompts=[prompt_token_ids(_PROMPT_TOKENS, number)], num_tokens=_NUM_TOKENS)
        return _NUM_TOKENS / float(answer["seconds"])

    session.say(name)
    try:
        with _busy_processes(os.cpu_count() or 1):
            return [compare(name, "tokens/s", alternate(session.rounds, session.with_peer(ours, theirs)), bound=1.0)]
    finally:
        engine.close()


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    # In groups of their own, so that an interrupt from a terminal reaches us alone; they end when their input closes.
    command = [sys.executable, "-P", "-c", _BUSY]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()
