"""How figures are made: alternating runs, medians, ratios, and the bound that each figure is held against."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

SETTLE_SECONDS = 0.05  # between two runs, so that threads of the one that spin before they sleep are out of the other's way
VOCABULARY = range(1000, 40000)  # ordinary tokens of the embedded model


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a report. `samples` are the runs behind `value`, the same for the peer; all in `unit`.

    ratio: value against peer_value. bound: what the ratio (or the value itself, where `bound_of` says so) is promised to be, and
    `sense` in which direction; None where nothing is promised.
    """

    name: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    peer: str | None = None
    peer_value: float | None = None
    peer_samples: tuple[float, ...] = ()
    bound: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    bound_of: Literal["ratio", "value"] = "ratio"
    notes: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """`value` divided by the peer's."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none, or it is of a ratio and there is no peer."""
        measured = self.ratio if self.bound_of == "ratio" else self.value
        if self.bound is None or measured is None:
            return None
        return measured >= self.bound if self.sense == "at least" else measured <= self.bound


def alternate(rounds: int, runs: Mapping[str, Callable[[int], float]]) -> dict[str, tuple[float, ...]]:
    """Call each of `runs` once with -1 (to warm up, not counted), then in turn for `rounds` rounds with the round's number."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name, run in runs.items():
            time.sleep(SETTLE_SECONDS)
            gc.collect()
            value = run(number)
            if number >= 0:
                results[name].append(value)
    return {name: tuple(values) for name, values in results.items()}


def compare(
    name: str,
    unit: str,
    samples: Mapping[str, tuple[float, ...]],
    *,
    bound: float | None = None,
    sense: Literal["at least", "at most"] = "at least",
    bound_of: Literal["ratio", "value"] = "ratio",
    notes: Mapping[str, float | str] | None = None,
) -> Figure:
    """The figure of `samples`: the first entry is ours, the second, if there is one, the peer's."""
    (_, ours), *others = samples.items()
    peer, theirs = others[0] if others else (None, ())
    return Figure(
        name=name,
        unit=unit,
        value=statistics.median(ours),
        samples=ours,
        peer=peer,
        peer_value=statistics.median(theirs) if theirs else None,
        peer_samples=theirs,
        bound=bound,
        sense=sense,
        bound_of=bound_of,
        notes=notes or {},
    )


def prompt_token_ids(length: int, salt: int) -> list[int]:
    """A prompt of exactly `length` tokens. Prompts of different `salt` share no prefix."""
    draw = random.Random(f"prompt {salt}")
    return [draw.choice(VOCABULARY) for _ in range(length)]
