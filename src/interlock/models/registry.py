"""Which class serves which architecture, and how a model comes to be in memory."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from interlock.core.config import WeightDType
from interlock.models.checkpoints import check_num_layers, match_parameters, open_checkpoint
from interlock.models.config import ModelConfig
from interlock.models.llama import LlamaForCausalLM
from interlock.models.parameters import ParameterLoader, Progress
from interlock.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ARCHITECTURES: Mapping[str, type[LlamaForCausalLM]] = {"LlamaForCausalLM": LlamaForCausalLM}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory. weights_digest: hex sha256 over the weights as they are held and the constants that they are used with
    (not the rotary table); equal digests give equal hidden states. tokenizer: None if the checkpoint has none."""

    config: ModelConfig
    model: LlamaForCausalLM
    tokenizer: Tokenizer | None
    weights_digest: str


def load_model(model: str, dtype: WeightDType = "auto", progress: Progress | None = None) -> LoadedModel:
    """Load `smollm2`, a GGUF file, or a Hugging Face directory, each parameter exactly once. `progress(what, done, total)`.

    dtype converts float weights (nearest even); quantised weights stay as they are. Raises CheckpointError.
    """
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    architecture = ARCHITECTURES[config.architecture]
    check_num_layers(checkpoint)
    match_parameters(checkpoint, architecture.parameter_shapes(config))
    with ParameterLoader(checkpoint, dtype, progress) as parameters:
        loaded = architecture.load(config, parameters)
        digest = parameters.finish()
    if checkpoint.tokenizer is not None and checkpoint.tokenizer.vocab_size > config.vocab_size:
        logger.warning(
            "%s: the tokenizer knows %d tokens, the model only %d; prompts that use the others are refused",
            checkpoint.path,
            checkpoint.tokenizer.vocab_size,
            config.vocab_size,
        )
    return LoadedModel(config, loaded, checkpoint.tokenizer, digest)
