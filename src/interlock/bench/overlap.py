"""Loads under compute: a step of seven rows that decode and one that loads most of its prompt, by the way in which the load is waited for."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from interlock.bench import overlap_transport
from interlock.bench.measure import Figure, alternate, compare
from interlock.bench.overlap_step import Answer, Batch, RepeatedStep, Way
from interlock.bench.session import Session
from interlock.core.errors import InterlockError
from interlock.core.forward_context import CUDAGraphMode

GATES: Final = Way("FULL, gates", CUDAGraphMode.FULL, "gate")
BARRIER: Final = Way("FULL, barrier", CUDAGraphMode.FULL, "barrier")
WAYS: Final = (
    GATES,
    Way("PIECEWISE, hooks", CUDAGraphMode.PIECEWISE, "auto"),
    Way("eager, hooks", CUDAGraphMode.NONE, "auto"),
    BARRIER,
)
RATIOS: Final = (0.25, 0.5, 1.0, 2.0)
BATCH: Final = Batch(loaded=1000, computed=64, others=(128,) * 7)

_BOUND = 1.1
_NOT_SLOWER = 1.02  # medians of the same thing differ by so much
_TURNS = 3  # of each way in a round
_COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class OverlapFigure(Figure):
    """A figure of one way at one ratio of load time to compute time (`load_to_compute`), in milliseconds. Its peer is the bound of a
    pipeline over layers. worst_stall: the longest that a row that loads nothing waited for its next token."""

    way: str = ""
    load_to_compute: float = 0.0
    worst_stall: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """Milliseconds at one ratio: of the load, of the step without a load, of steps by way, and of each way's worst stall."""

    load_to_compute: float
    num_layers: int
    load: float
    compute: tuple[float, ...]
    steps: Mapping[str, tuple[float, ...]]
    stalls: Mapping[str, float]

    @property
    def bound(self) -> float:
        """The least time of a pipeline over layers, in which a layer is computed when it has landed and those before it are computed."""
        compute = statistics.median(self.compute)
        return max(self.load, compute) + min(self.load, compute) / self.num_layers


def run(session: Session) -> list[Figure]:
    """Four engines, one for each way, take turns: on loads that come due by the clock, then on real transports."""
    session.say("overlap: starting an engine for each way")
    steps = []
    try:
        for way in WAYS:
            steps.append(RepeatedStep(session.model, session.threads, way, BATCH))
        points = measure(steps, session.rounds, say=session.say)
    finally:
        for step in steps:
            step.close()
    real = overlap_transport.run(session.model, session.threads, session.rounds, WAYS, BARRIER, session.say)
    return [*(figure for point in points for figure in figures(point)), *real]


def measure(
    steps: Sequence[RepeatedStep], rounds: int, *, ratios: Sequence[float] = RATIOS, say: Callable[[str], None] = lambda what: None
) -> list[Point]:
    """Each way's steps at each ratio; the first of `steps` also shows what the step costs without a load.

    Raises InterlockError when any step of any way gives other bits than the first one.
    """
    reference = steps[0].run()
    compute = statistics.median(_without_load(steps[0], reference) for _ in range(_TURNS * rounds))
    points = []
    for ratio in ratios:
        say(f"overlap: T/C = {ratio:g}")
        points.append(_point(steps, reference, ratio, compute * ratio, rounds))
    return points


def figures(point: Point) -> list[Figure]:
    """One figure of each way against the bound, and one of the gates against the best of the others. The promises are of the gates."""
    found: list[Figure] = []
    for name, samples in point.steps.items():
        found.append(
            OverlapFigure(
                name=f"T/C = {point.load_to_compute:g}: {name}",
                unit="ms",
                value=statistics.median(samples),
                samples=samples,
                peer="bound",
                peer_value=point.bound,
                bound=_BOUND if name == GATES.name else None,
                sense="at most",
                notes={"worst stall of others (ms)": point.stalls[name]},
                way=name,
                load_to_compute=point.load_to_compute,
                worst_stall=point.stalls[name],
            )
        )
    others = {name: samples for name, samples in point.steps.items() if name != GATES.name}
    best = min(others, key=lambda name: statistics.median(others[name]))
    notes: dict[str, float | str] = {"best other": best, "load T (ms)": point.load, "compute C (ms)": statistics.median(point.compute)}
    pair = {GATES.name: point.steps[GATES.name], best: others[best]}
    return [*found, compare(f"T/C = {point.load_to_compute:g}: gates / best other", "ms", pair, bound=_NOT_SLOWER, sense="at most", notes=notes)]


def _point(steps: Sequence[RepeatedStep], reference: Answer, ratio: float, load: float, rounds: int) -> Point:
    stalls: dict[str, float] = {}

    def with_load(step: RepeatedStep, number: int) -> float:
        before, answer = step.run(), step.run(load * 1e-3)
        _check_bits(step.way.name, reference, before, answer)
        if number >= 0:
            stalls[step.way.name] = max(stalls.get(step.way.name, 0.0), (answer.ended - before.ended) * 1e3)
        return answer.seconds * 1e3

    runs = {step.way.name: partial(with_load, step) for step in steps}
    samples = alternate(_TURNS * rounds, {**runs, _COMPUTE: lambda number: _without_load(steps[0], reference)})
    compute = samples.pop(_COMPUTE)
    return Point(ratio, steps[0].runner.model_config.num_layers, load, compute, samples, stalls)


def _without_load(step: RepeatedStep, reference: Answer) -> float:
    """Milliseconds of the step alone, measured as the others are: behind a step of its own."""
    before, answer = step.run(), step.run()
    _check_bits(_COMPUTE, reference, before, answer)
    return answer.seconds * 1e3


def _check_bits(name: str, reference: Answer, *answers: Answer) -> None:
    if not all(answer.same_bits(reference) for answer in answers):
        raise InterlockError(f"{name}: a step gave other tokens or other logits than the same step without a load")
