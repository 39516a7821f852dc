"""SIGSTOP of a producer or a consumer under load: it is alive, its kernel answers for it, and it may go on at any time. The survivor ends all
that it has, answers right, and when the other one goes on, it too; every block comes back."""

import pytest
from storm import CONFIGURATIONS, VICTIMS, Storm

ENGINE = {"kv_async_load_timeout": 3.0}  # of loads whose blocks a peer that stands still may yet write


@pytest.mark.parametrize(("transport", "mode"), CONFIGURATIONS)
def test_nobody_hangs_and_nobody_answers_wrong(model, prompts, expected, transport, mode):
    storm = Storm(model, transport, mode, expected, prompts, seed=5, decode=ENGINE)
    try:
        for victim in VICTIMS:
            storm.halt(victim)
    finally:
        storm.close()
