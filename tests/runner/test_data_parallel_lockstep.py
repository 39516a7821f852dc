"""What ranks agree about the steps to come: all make the same number of steps, and a message that comes late calls for nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_ranks import FixedGroup, thread_groups, together

from interlock.core.config import EngineConfig
from interlock.core.errors import ConfigError
from interlock.runner.data_parallel import Lockstep, join_lockstep


class Rank:
    """A rank with `work`: the steps that it needs by itself."""

    def __init__(self, group) -> None:
        self.lockstep = Lockstep(group)
        self.work = 0

    @property
    def wants_step(self) -> bool:
        return self.lockstep.wants_step(self.work > 0)

    def step(self) -> None:
        self.lockstep.begin_step(self.work > 0)
        self.lockstep.all_gather([int(self.work > 0), 1, 2])
        self.work = max(0, self.work - 1)


def pair() -> list[Rank]:
    return [Rank(group) for group in thread_groups(2, watchdog=10.0)]


def step_while_wanted(ranks: list[Rank]) -> None:
    """Both step until neither wants to; that one of them wants to and the other does not would stop both for ever."""
    for _ in range(1000):
        wants = [rank.wants_step for rank in ranks]
        if not any(wants):
            return
        if not all(wants):  # the one that begins says so, and the other hears of it
            ranks[wants.index(False)].lockstep.wake(ranks[wants.index(True)].lockstep.num_steps + 1)
        assert all(rank.wants_step for rank in ranks)
        together(*[rank.step for rank in ranks])
    raise AssertionError("the ranks never rest")


def test_all_step_until_none_has_requests_and_once_more():
    ranks = pair()
    ranks[0].work, ranks[1].work = 2, 7
    step_while_wanted(ranks)
    assert [rank.lockstep.num_steps for rank in ranks] == [8, 8]


def test_a_wake_for_a_step_that_was_made_calls_for_nothing():
    ranks = pair()
    ranks[0].work = 3
    step_while_wanted(ranks)
    for stale in range(ranks[1].lockstep.num_steps + 1):
        ranks[1].lockstep.wake(stale)
        assert not ranks[1].wants_step
    ranks[1].lockstep.wake(ranks[1].lockstep.num_steps + 1)
    assert ranks[1].wants_step


def test_a_pause_holds_on_all_ranks_after_the_same_step_and_ends_once():
    ranks = pair()
    ranks[0].work = ranks[1].work = 50
    together(*[rank.step for rank in ranks])
    ranks[1].lockstep.pause()
    ranks[1].lockstep.pause()
    assert all(rank.wants_step for rank in ranks)
    together(*[rank.step for rank in ranks])
    assert [rank.lockstep.num_steps for rank in ranks] == [2, 2]
    for rank in ranks:
        rank.lockstep.wake(2)  # it was on its way when the pause began
        rank.lockstep.pause()
        assert not rank.wants_step
    ranks[0].lockstep.resume()
    ranks[0].lockstep.resume()
    assert ranks[0].wants_step
    assert not ranks[1].wants_step
    ranks[1].lockstep.wake(3)
    step_while_wanted(ranks)
    assert [rank.lockstep.num_steps for rank in ranks] == [51, 51]
    for rank in ranks:
        rank.lockstep.resume()
        assert not rank.wants_step


def test_the_last_word_counts_when_a_resume_and_a_pause_come_before_the_next_step():
    lockstep = Lockstep(FixedGroup([1, 1, 2, 1, 0]))
    lockstep.pause()
    lockstep.all_gather([0, 1, 2])
    assert lockstep.paused
    lockstep.resume()
    lockstep.pause()
    lockstep.all_gather([0, 1, 2])
    assert lockstep.paused
    lockstep.pause()
    lockstep.resume()
    lockstep.all_gather([0, 1, 2])
    assert not lockstep.paused


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["work", "pause", "resume", "stale"]), st.integers(0, 1), st.integers(1, 4)), max_size=12))
def test_whatever_happens_the_ranks_make_the_same_number_of_steps(events):
    ranks = pair()
    for kind, which, amount in events:
        rank = ranks[which]
        if kind == "work":
            rank.work += amount
        elif kind == "pause":
            rank.lockstep.pause()
        elif kind == "resume":
            rank.lockstep.resume()
        else:
            rank.lockstep.wake(max(0, rank.lockstep.num_steps - amount))
        step_while_wanted(ranks)
        assert ranks[0].lockstep.num_steps == ranks[1].lockstep.num_steps
        assert ranks[0].lockstep.paused == ranks[1].lockstep.paused
        assert ranks[0].lockstep.paused or not any(rank.work for rank in ranks)


def test_what_is_agreed_beside_the_rows_stays_out_of_them():
    lockstep = Lockstep(FixedGroup([4, 0, 1, 1, 0]))
    assert lockstep.all_gather([2, 1, 2]) == [[2, 1, 2], [4, 0, 1]]
    assert lockstep.others_busy


def test_an_engine_that_runs_by_itself_joins_nobody():
    assert join_lockstep(EngineConfig(model="smollm2")) is None
    assert join_lockstep(EngineConfig(model="smollm2", data_parallel_lockstep=True)) is None
    assert join_lockstep(EngineConfig(model="smollm2", data_parallel_size=2)) is None


@pytest.mark.parametrize(
    "options", [{"data_parallel_rank": 2, "data_parallel_size": 2}, {"data_parallel_size": 0}, {"data_parallel_rank": np.int64(-1)}]
)
def test_a_rank_outside_its_group_is_refused(options):
    with pytest.raises(ConfigError, match="data_parallel_"):
        EngineConfig(model="smollm2", **options)
