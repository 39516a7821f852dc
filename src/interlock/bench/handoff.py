"""The hand-off: decode-side time to first token of a prompt whose KV lies in another process, against llama.cpp restoring a state."""

import statistics

from interlock.bench.measure import Figure, alternate, compare, prompt_token_ids
from interlock.bench.peer import PeerProcess
from interlock.bench.session import Session
from interlock.core.errors import InterlockError
from interlock.pd.messages import Finished
from interlock.pd.pair import PairRequest, PrefillDecodePair

_PROMPT_TOKENS = 1000
_BOUND = 1.0


def run(session: Session) -> list[Figure]:
    """A 1,000-token prompt."""
    name = f"first token, {_PROMPT_TOKENS:,} of remote KV"
    session.say(name)
    options = {"model": session.model, "threads": session.threads, "max_model_len": 2048}
    waits: list[float] = []
    recomputed: list[float] = []
    moved = 0

    def show(process: str, stage: str, done: int, total: int) -> None:
        session.say(f"{name}: {process}: {stage}")

    with PrefillDecodePair(options, connector={"kv_connector": "PeerConnector"}, on_progress=show) as pair:

        def ours(number: int) -> float:
            nonlocal moved
            request = PairRequest(f"request-{number}", prompt_token_ids(_PROMPT_TOKENS, number), {"temperature": 0.0, "max_tokens": 1}, False)
            result = pair.run(request, lambda text: None)
            if result.decode is None:
                raise InterlockError(f"the hand-off failed: {result.error}")
            waits.append(result.decode.load_wait_seconds * 1e3)
            moved = result.decode.kv_bytes_loaded
            pair.recompute(result)
            recomputed.append(_first_token(result.recompute))
            return _first_token(result.decode)

        def theirs(peer: PeerProcess, number: int) -> float:
            return float(peer.request("restore", prompt=prompt_token_ids(_PROMPT_TOKENS, number))["seconds"]) * 1e3

        samples = alternate(session.rounds, session.with_peer(ours, theirs))
    notes = {
        "waited for loads (ms)": statistics.median(waits[1:]),
        "KV moved (MB)": moved / 1e6,
        "recomputed there (ms)": statistics.median(recomputed[1:]),
    }
    return [compare(name, "ms", samples, bound=_BOUND, sense="at most", notes=notes)]


def _first_token(finished: Finished | None) -> float:
    assert finished is not None
    return finished.ttft_seconds * 1e3
