"""A small model for the commands to run on."""

from collections.abc import Iterator

import pytest
from cli_support import Command

from checkpoints import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a byte-level tokenizer and a chat template."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=3, vocab_size=288, tokenizer_size=259, eos_token_id=None)


@pytest.fixture
def engine_flags(tiny_model: str) -> list[str]:
    """Flags that make an engine small and quick to start."""
    sizes = ["--kv-cache-memory-bytes", "4194304", "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--cudagraph-capture-sizes", "1,8,64"]
    return ["--model", tiny_model, "--threads", "1", *sizes]


@pytest.fixture
def start() -> Iterator[list[Command]]:
    """A list to put started commands into; what still runs at the end of the test is killed."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()
