"""Graph modes: a decode step at batch 1 in FULL, PIECEWISE and NONE, and a FULL step against the sum of its kernels."""

from functools import partial

from interlock.bench.measure import Figure, alternate, compare
from interlock.bench.session import Session
from interlock.bench.steps import replay_seconds, step_seconds

_STEPS = 64


def run(session: Session) -> list[Figure]:
    """Three engines, one per mode, take turns."""
    session.say("decode step by mode, batch 1")
    engines = {mode: session.engine(cudagraph_mode=mode, max_model_len=512) for mode in ("FULL", "PIECEWISE", "NONE")}
    replays: list[tuple[float, float]] = []

    def step(mode: str, number: int) -> float:
        return step_seconds(engines[mode], 1, _STEPS) * 1e3

    def replay(number: int) -> float:
        replays.append(replay_seconds(engines["FULL"], 1))
        return replays[-1][0] * 1e3

    try:
        samples = alternate(session.rounds, {**{mode: partial(step, mode) for mode in engines}, "replay": replay})
    finally:
        for engine in engines.values():
            engine.close()
    kernels = tuple(seconds * 1e3 for _, seconds in replays[1:])  # the first was the warm-up
    return [
        compare("step: FULL / PIECEWISE", "ms", {"FULL": samples["FULL"], "PIECEWISE": samples["PIECEWISE"]}, bound=0.9, sense="at most"),
        compare("step: PIECEWISE / NONE", "ms", {"PIECEWISE": samples["PIECEWISE"], "NONE": samples["NONE"]}, bound=1.0, sense="at most"),
        compare("step: FULL / its kernels", "ms", {"FULL": samples["FULL"], "kernels": kernels}, bound=1.03, sense="at most"),
        compare("graph replay: FULL / its kernels", "ms", {"replay": samples["replay"], "kernels": kernels}),
    ]
