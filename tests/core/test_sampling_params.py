"""Sampling parameters: what is refused, and what of NumPy's is taken."""

import math
from typing import Any

import numpy as np
import pytest

from interlock.core.errors import RequestError
from interlock.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("n", 1.5),
        ("n", math.nan),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "0"),
        ("temperature", 10**400),
        ("top_p", math.nan),
        ("top_p", None),
        ("top_k", -2),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", math.nan),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("skip_special_tokens", "x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("extra_args", 5),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}, expected")


def test_no_stop_tokens_may_be_said_in_vllms_way() -> None:
    assert SamplingParams(stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"n": np.int64(2), "temperature": np.float32(0.5), "top_k": np.uint8(3), "stop_token_ids": [np.int32(7)]}
    params = SamplingParams(**given)
    assert params == SamplingParams(n=2, temperature=0.5, top_k=3, stop_token_ids=[7])
    assert type(params.temperature) is float
    assert type(params.n) is type(params.stop_token_ids[0]) is int
