"""What a decode step costs beside its model's kernels: scheduling, inputs, launch, waiting, sampling, outputs."""

from interlock.bench.measure import Figure, alternate, compare
from interlock.bench.session import OURS, Session
from interlock.bench.steps import replay_seconds, step_seconds

_STEPS = 64
_CASES = ((1, 0.5), (8, 1.0))  # batch, promised milliseconds


def run(session: Session) -> list[Figure]:
    """Batch 1 and batch 8, by FULL replay. An upper bound of the Python part: barriers and the sampling kernel are in it."""
    engine = session.engine(cudagraph_mode="FULL", max_model_len=512)
    figures = []
    try:
        for batch, bound in _CASES:

            def overhead(number: int, batch: int = batch) -> float:
                return (step_seconds(engine, batch, _STEPS) - replay_seconds(engine, batch)[1]) * 1e3

            name = f"step less its kernels, batch {batch}"
            session.say(name)
            figures.append(compare(name, "ms", alternate(session.rounds, {OURS: overhead}), bound=bound, sense="at most", bound_of="value"))
    finally:
        engine.close()
    return figures
