"""Decoding: tokens per second after the first token, against llama.cpp."""

from interlock.bench.measure import Figure, alternate, compare, prompt_token_ids
from interlock.bench.peer import PeerProcess
from interlock.bench.session import Session, decode_seconds, generate

# name, sequences in the batch, prompt tokens, tokens to generate, promised ratio
_CASES = (
    ("decode, batch 1", 1, 16, 128, 1.3),
    ("decode, batch 1, 1,000 of context", 1, 1000, 64, 1.5),
    ("decode, batch 8", 8, 16, 64, None),
)


def run(session: Session) -> list[Figure]:
    """Batch 1 behind a short and behind a long context, and batch 8."""
    engine = session.engine(max_model_len=2048)
    figures = []
    try:
        for name, batch, length, num_tokens, bound in _CASES:

            def prompts(number: int, batch: int = batch, length: int = length) -> list[list[int]]:
                return [prompt_token_ids(length, number * batch + sequence) for sequence in range(batch)]

            def ours(number: int, batch: int = batch, num_tokens: int = num_tokens) -> float:
                return batch * (num_tokens - 1) / decode_seconds(generate(engine, prompts(number), num_tokens))

            def theirs(peer: PeerProcess, number: int, batch: int = batch, num_tokens: int = num_tokens) -> float:
                return batch * num_tokens / float(peer.request("decode", prompts=prompts(number), num_tokens=num_tokens)["seconds"])

            session.say(name)
            samples = alternate(session.rounds, session.with_peer(ours, theirs))
            figures.append(compare(name, "tokens/s", samples, bound=bound))
    finally:
        engine.close()
    return figures
