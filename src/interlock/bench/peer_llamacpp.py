"""llama.cpp, driven over pipes: one JSON request a line in, one JSON answer a line out. Run by the Python of the peers' environment.

It imports nothing of Interlock. The model stays loaded between requests, and nothing runs while no request is there, so that runs
can alternate with ours. Only the low-level API is used: what is timed is llama.cpp, not its Python wrapper.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp

CONTEXT_TOKENS = 4096
MAX_SEQUENCES = 16
BATCH_TOKENS = 2048


class Peer:
    """One model and one context, with `threads` threads. KV is held in llama.cpp's default type (fp16)."""

    def __init__(self, model: str, threads: int) -> None:
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = CONTEXT_TOKENS
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = 512
        parameters.n_seq_max = MAX_SEQUENCES
        parameters.n_threads = threads
        parameters.n_threads_batch = threads
        parameters.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, MAX_SEQUENCES)

    def clear(self) -> None:
        """Forget all KV."""
        llama_cpp.llama_memory_clear(self.memory, True)

    def evaluate(self, tokens: list[int], positions: list[int], sequences: list[int], logits: list[int]) -> None:
        """Run one batch; row i is token `tokens[i]` at `positions[i]` of `sequences[i]`, with logits where asked."""
        self.batch.n_tokens = len(tokens)
        for i in range(len(tokens)):
            self.batch.token[i] = tokens[i]
            self.batch.pos[i] = positions[i]
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequences[i]
            self.batch.logits[i] = logits[i]
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def sample(self, row: int) -> int:
        """The most likely token of a row."""
        return int(llama_cpp.llama_sampler_sample(self.sampler, self.context, row))

    def prompt(self, tokens: list[int], sequence: int = 0, start: int = 0) -> int:
        """Evaluate a prompt (or its tail from position `start`) and give its next token."""
        count = len(tokens)
        self.evaluate(tokens, list(range(start, start + count)), [sequence] * count, [0] * (count - 1) + [1])
        return self.sample(-1)

    def decode(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Prefill, then generate `num_tokens` for each prompt in one batch: seconds of the generation alone."""
        self.clear()
        current = [self.prompt(tokens, sequence) for sequence, tokens in enumerate(prompts)]
        positions = [len(tokens) for tokens in prompts]
        sequences = list(range(len(prompts)))
        start = time.perf_counter()
        for _ in range(num_tokens):
            self.evaluate(current, positions, sequences, [1] * len(current))
            current = [self.sample(row) for row in sequences]
            positions = [position + 1 for position in positions]
        return {"seconds": time.perf_counter() - start}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from a prompt to its first token."""
        self.clear()
        start = time.perf_counter()
        self.prompt(prompt)
        return {"seconds": time.perf_counter() - start}

    def restore(self, prompt: list[int]) -> dict[str, Any]:
        """Save the state of a prompt to memory; then seconds to restore it into an empty context and give the next token.

        Logits are not part of the state, so the last token is evaluated again, as llama-server does.
        """
        self.clear()
        expected = self.prompt(prompt)
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        saved = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self.context, saved, size, 0)
        self.clear()
        start = time.perf_counter()
        restored = llama_cpp.llama_state_seq_set_data(self.context, saved, size, 0)
        llama_cpp.llama_memory_seq_rm(self.memory, 0, len(prompt) - 1, -1)
        token = self.prompt(prompt[-1:], 0, len(prompt) - 1)
        seconds = time.perf_counter() - start
        if not restored or token != expected:
            raise RuntimeError(f"the restored state gave token {token}, expected {expected}")
        return {"seconds": seconds, "bytes": int(size)}


def main() -> None:
    """Serve requests until standard input closes."""
    begin = time.perf_counter()
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    hello = {"name": "llama.cpp", "version": f"llama-cpp-python {llama_cpp.__version__}", "seconds": time.perf_counter() - begin}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        operations: dict[str, Callable[..., dict[str, Any]]] = {"decode": peer.decode, "prefill": peer.prefill, "restore": peer.restore}
        print(json.dumps(operations[request.pop("op")](**request)), flush=True)


if __name__ == "__main__":
    main()
