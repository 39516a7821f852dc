"""What the tests of the tiers' law share: one tiny model, its prompts, and what each of them gives alone, computed once."""

import pytest
from tier_engine import make_prompts, params_of, run_alone

from checkpoints import make_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype="bfloat16")


@pytest.fixture(scope="session")
def prompts():
    return make_prompts()


@pytest.fixture(scope="session")
def params(prompts):
    return [params_of(number) for number in range(len(prompts))]


@pytest.fixture(scope="session")
def outputs_alone(model, prompts, params):
    return run_alone(model, prompts, params)


@pytest.fixture(scope="session")
def alone(outputs_alone):
    return outputs_alone
