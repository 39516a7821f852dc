"""SIGKILL of a producer or a consumer at random moments under load: the survivor never hangs, never answers wrong, and has all its blocks."""

import pytest
from storm import CONFIGURATIONS, Storm

KILLS = dict(zip(CONFIGURATIONS, (3, 2, 2, 2, 3, 2), strict=True))


@pytest.mark.parametrize(("transport", "mode"), CONFIGURATIONS)
def test_the_survivor_goes_on_as_if_nothing_had_happened(model, prompts, expected, transport, mode):
    storm = Storm(model, transport, mode, expected, prompts, seed=len(transport))
    try:
        outcome = storm.run(KILLS[transport, mode])
    finally:
        storm.close()
    assert sum(outcome.kills.values()) == KILLS[transport, mode]
    assert outcome.requests > 0
