"""What the benchmarks of one run share: sizes, the peer, and engines of ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from interlock.bench.measure import Figure
from interlock.bench.peer import PeerProcess
from interlock.core.sampling_params import SamplingParams
from interlock.engine.llm import LLM, RequestOutput

OURS = "interlock"


@dataclass(frozen=True, slots=True)
class Session:
    """One run of benchmarks. `peer` is None where it is not installed; figures then have ours alone. `say` shows what is being done."""

    model: str
    threads: int
    rounds: int
    peer: PeerProcess | None
    say: Callable[[str], None]

    def engine(self, **options: Any) -> LLM:
        """An engine of ours with this session's model and threads. Prefix caching is off: every prompt is computed."""
        return LLM(model=self.model, threads=self.threads, enable_prefix_caching=False, **options)

    def with_peer(self, ours: Callable[[int], float], theirs: Callable[[PeerProcess, int], float]) -> dict[str, Callable[[int], float]]:
        """The runs to alternate: ours, and the peer's where there is one."""
        peer = self.peer
        return {OURS: ours} if peer is None else {OURS: ours, peer.name: lambda number: theirs(peer, number)}


Benchmark = Callable[[Session], list[Figure]]


def without_repeats(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, but for what it has just shown: a stage reports each part of it that is done."""
    last: str | None = None

    def say(what: str) -> None:
        nonlocal last
        if what != last:
            last = what
            show(what)

    return say


def generate(engine: LLM, prompts: Sequence[list[int]], num_tokens: int) -> list[RequestOutput]:
    """Exactly `num_tokens` greedy tokens for each prompt, all prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def first_token_seconds(output: RequestOutput) -> float:
    """Seconds from a request's arrival to its first token."""
    seconds = output.metrics.time_to_first_token
    assert seconds is not None
    return seconds


def decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Seconds from the last first token of a batch to its last token."""
    firsts = [output.metrics.first_token_time for output in outputs]
    lasts = [output.metrics.finished_time for output in outputs]
    return max(time for time in lasts if time is not None) - max(time for time in firsts if time is not None)
