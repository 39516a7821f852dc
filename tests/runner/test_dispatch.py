from collections.abc import Sequence

import pytest

from interlock.core.forward_context import CUDAGraphMode
from interlock.runner.dispatch import Dispatcher

SIZES = (1, 2, 4, 8, 64)
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class CountingGroup:
    """A group whose other ranks answer what the test says."""

    def __init__(self, others: Sequence[Sequence[int]]) -> None:
        self.size = 1 + len(others)
        self.collectives = 0
        self._others = [list(row) for row in others]

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        self.collectives += 1
        return [list(values), *self._others]


@pytest.mark.parametrize(
    ("configured", "decode", "mixed"),
    [
        (CUDAGraphMode.NONE, NONE, NONE),
        (CUDAGraphMode.PIECEWISE, PIECEWISE, PIECEWISE),
        (CUDAGraphMode.FULL, FULL, FULL),
        (CUDAGraphMode.FULL_DECODE_ONLY, FULL, NONE),
        (CUDAGraphMode.FULL_AND_PIECEWISE, FULL, PIECEWISE),
    ],
)
def test_modes_of_decode_and_mixed_batches_are_those_of_vllm(configured, decode, mixed):
    dispatcher = Dispatcher(configured, SIZES, 8)
    assert dispatcher.dispatch(3, uniform=True)[0].cg_mode is decode
    assert dispatcher.dispatch(3, uniform=False)[0].cg_mode is mixed


def test_a_batch_is_padded_to_the_next_capture_size_and_one_above_the_largest_runs_eagerly():
    dispatcher = Dispatcher(CUDAGraphMode.FULL, SIZES, 8)
    assert [dispatcher.dispatch(n, uniform=False)[0].num_tokens for n in (1, 3, 8, 9)] == [1, 4, 8, 64]
    beyond = dispatcher.dispatch(65, uniform=False)[0]
    assert (beyond.cg_mode, beyond.num_tokens) == (NONE, 65)


@pytest.mark.parametrize("configured", list(CUDAGraphMode))
def test_every_descriptor_that_can_be_dispatched_is_captured(configured):
    dispatcher = Dispatcher(configured, SIZES, 8)
    captured = set(dispatcher.descriptors())
    for num_tokens in range(1, 66):
        for uniform in (True, False):
            descriptor = dispatcher.dispatch(num_tokens, uniform)[0]
            assert descriptor.cg_mode is NONE or descriptor in captured


@pytest.mark.parametrize("group", [None, CountingGroup([])])
def test_one_rank_makes_no_collective(group):
    dispatcher = Dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 8, group)
    assert [dispatcher.dispatch(n, n == 1)[1] for n in (1, 5, 200)] == [None] * 3
    assert group is None or group.collectives == 0


def test_two_ranks_make_one_collective_and_take_the_most_conservative_mode():
    piecewise_elsewhere = [5, 0, 1]
    group = CountingGroup([piecewise_elsewhere])
    descriptor, metadata = Dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 8, group).dispatch(1, uniform=True)
    assert group.collectives == 1
    assert (descriptor.cg_mode, descriptor.num_tokens) == (PIECEWISE, 8)
    assert metadata is not None
    assert metadata.num_tokens_across_dp == (1, 5)
