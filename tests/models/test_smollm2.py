"""SmolLM2 from its GGUF file against transformers in float32 on the dequantised weights."""

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from model_driver import ModelDriver
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from interlock.models.checkpoints import open_checkpoint, resolve_model
from interlock.models.registry import LoadedModel, load_model

# float32 sums in another order, over thirty layers and logits of a magnitude up to 40; observed: at most 9e-5.
TOLERANCE = 5e-4
NUM_TOKENS = 40

PROMPTS = ["What is the capital of France?", "Write a haiku about 3 green frogs.", "def fibonacci(n):"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def driver(loaded: LoadedModel) -> Iterator[ModelDriver]:
    driver = ModelDriver(loaded, kv_dtype="float32", max_model_len=128)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def transformers_model(loaded: LoadedModel) -> LlamaForCausalLM:
    config = loaded.config
    transformers_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = LlamaForCausalLM(transformers_config)
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(resolve_model("smollm2")).tensors}
    state = {}
    for name, info in open_checkpoint("smollm2").tensors.items():
        values = gguf.quants.dequantize(info.rows(), kinds[info.source_name]).reshape(info.shape)
        state[name] = torch.from_numpy(values.copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers_wherever_the_margin_decides(
    loaded: LoadedModel, driver: ModelDriver, transformers_model: LlamaForCausalLM, prompt: str
) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    program = driver.capture()
    logits = [driver.step([(0, token_ids, 0)], program)[0]]
    generated = []
    for _ in range(NUM_TOKENS - 1):
        generated.append(int(logits[-1].argmax()))
        logits.append(driver.step([(0, generated[-1:], len(token_ids) + len(generated) - 1)], program)[0])
    with torch.no_grad():
        expected = transformers_model(torch.tensor([token_ids + generated])).logits[0, len(token_ids) - 1 :].numpy()
    np.testing.assert_allclose(np.stack(logits), expected, atol=TOLERANCE, rtol=0)
    second, first = np.sort(expected, axis=-1)[:, -2:].T
    decided = first - second > 2 * TOLERANCE
    assert decided.mean() > 0.9
    assert np.array_equal(np.stack(logits).argmax(axis=-1)[decided], expected.argmax(axis=-1)[decided])
