"""The connector in docs/writing-a-connector.md is complete, short, and keeps the law."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from tier_engine import MODES, bits, drain, forget_local, make_prompts, open_engine, params_of, run_alone

from checkpoints import make_tiny_llama

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-connector.md"


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """The module on the page."""
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code = [line for line in source.splitlines() if line.strip()]
    assert 50 <= len(code) <= 75
    (tmp_path / "notebook_connector.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "notebook_connector", raising=False)
    return importlib.import_module("notebook_connector")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("notebook"), dtype="bfloat16")


@pytest.fixture(scope="module")
def alone(model):
    prompts = make_prompts()
    return run_alone(model, prompts, [params_of(number) for number in range(len(prompts))])


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_the_connector_on_the_page_saves_loads_and_changes_no_bit(model, alone, notebook, cudagraph_mode):
    prompts = make_prompts()
    params = [params_of(number) for number in range(len(prompts))]
    for life in range(2):
        with open_engine(model, "notebook_connector:NotebookConnector", {}, cudagraph_mode=cudagraph_mode) as llm:
            assert [bits(output) for output in llm.generate(prompts, params)] == alone
            forget_local(llm)
            assert (llm.metrics()["num_external_tokens"] > 0) or life == 0
            drain(llm)


def test_what_it_has_lost_since_the_lookup_is_recomputed(model, alone, notebook):
    prompt, params = make_prompts()[2], params_of(2)
    with open_engine(model, "notebook_connector:NotebookConnector", {}) as llm:
        llm.generate([prompt], params)
        forget_local(llm)
        update = llm.core._connector.update_state_after_alloc

        def lose(request, block_ids, num_external_tokens):
            update(request, block_ids, num_external_tokens)
            if num_external_tokens:
                del notebook.STORE[request.block_hashes[1]]

        llm.core._connector.update_state_after_alloc = lose
        (output,) = llm.generate([prompt], params)
        assert bits(output) == alone[2]
        assert llm.metrics()["num_failed_loads"] == 1
        drain(llm)
