"""Prefill: prompt tokens per second up to the first token, against llama.cpp."""

from interlock.bench.measure import Figure, alternate, compare, prompt_token_ids
from interlock.bench.peer import PeerProcess
from interlock.bench.session import Session, first_token_seconds, generate

_LENGTHS = ((512, 2.0), (2000, None))


def run(session: Session) -> list[Figure]:
    """Prompts of 512 and of 2,000 tokens."""
    engine = session.engine(max_model_len=2048)
    figures = []
    try:
        for length, bound in _LENGTHS:

            def ours(number: int, length: int = length) -> float:
                (output,) = generate(engine, [prompt_token_ids(length, number)], 1)
                return length / first_token_seconds(output)

            def theirs(peer: PeerProcess, number: int, length: int = length) -> float:
                return length / float(peer.request("prefill", prompt=prompt_token_ids(length, number))["seconds"])

            name = f"prefill, {length:,} tokens"
            session.say(name)
            samples = alternate(session.rounds, session.with_peer(ours, theirs))
            figures.append(compare(name, "tokens/s", samples, bound=bound))
    finally:
        engine.close()
    return figures
