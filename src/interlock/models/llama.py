"""Llama (H. Touvron et al., 2023): a decoder of pre-normalised layers with grouped rotary attention and a gated MLP."""

from dataclasses import dataclass

from interlock.core.buffer import Buffer, DType
from interlock.kernels.native import Kernel
from interlock.models import ops
from interlock.models.config import ModelConfig
from interlock.models.layers import Embedding, GateUp, Linear, RMSNorm
from interlock.models.parameters import ParameterLoader


@dataclass(frozen=True, slots=True, eq=False)
class LlamaDecoderLayer:
    """One layer's weights."""

    input_layernorm: RMSNorm
    qkv_proj: Linear
    o_proj: Linear
    post_attention_layernorm: RMSNorm
    gate_up_proj: GateUp
    down_proj: Linear


@dataclass(frozen=True, slots=True, eq=False)
class LlamaForCausalLM:
    """The model. It calls ops and knows nothing of modes, devices or connectors."""

    config: ModelConfig
    embed_tokens: Embedding
    layers: tuple[LlamaDecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear

    def forward(self, op: ops.Ops) -> Buffer:
        """One pass over the step slot's tokens. Returns the logits, float32 `[max_num_seqs, vocab_size]`, of which NUM_LOGITS rows are live."""
        work = op.workspace
        op.embedding(self.embed_tokens, out=work.hidden)
        for index, layer in enumerate(self.layers):
            op.linear(work.hidden, layer.qkv_proj, norm=layer.input_layernorm, out=work.qkv)
            op.attention(index, work.qkv, out=work.attended)
            op.linear(work.attended, layer.o_proj, out=work.hidden, residual=work.hidden)
            op.gated_silu(work.hidden, layer.gate_up_proj, norm=layer.post_attention_layernorm, out=work.activated)
            op.linear(work.activated, layer.down_proj, out=work.hidden, residual=work.hidden)
        op.linear(work.hidden, self.lm_head, norm=self.norm, out=work.logits, gather=True)
        return work.logits

    def kernels(self, kv_dtype: DType) -> tuple[Kernel, ...]:
        """Every kernel that `forward` launches with a KV pool of `kv_dtype`, so that all can be compiled or loaded at once."""
        linears = [self.lm_head, *(linear for layer in self.layers for linear in (layer.qkv_proj, layer.o_proj, layer.down_proj))]
        gate_ups = [layer.gate_up_proj for layer in self.layers]
        return ops.kernels(self.config, self.embed_tokens, linears, gate_ups, kv_dtype)

    @classmethod
    def parameter_shapes(cls, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, under the names of Hugging Face."""
        hidden, intermediate = config.hidden_size, config.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (config.q_size, hidden),
                "self_attn.k_proj": (config.kv_size, hidden),
                "self_attn.v_proj": (config.kv_size, hidden),
                "self_attn.o_proj": (hidden, config.q_size),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (intermediate, hidden),
                "mlp.up_proj": (intermediate, hidden),
                "mlp.down_proj": (hidden, intermediate),
            }
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        return shapes

    @classmethod
    def load(cls, config: ModelConfig, parameters: ParameterLoader) -> "LlamaForCausalLM":
        """Take every parameter once."""
        embed_tokens = parameters.embedding("model.embed_tokens.weight")
        layers = tuple(_load_layer(config, parameters, f"model.layers.{index}") for index in range(config.num_layers))
        norm = parameters.rms_norm("model.norm.weight", config.rms_norm_eps)
        lm_head = embed_tokens.as_head() if config.tie_word_embeddings else parameters.linear("lm_head.weight")
        return cls(config, embed_tokens, layers, norm, lm_head)


def _load_layer(config: ModelConfig, parameters: ParameterLoader, prefix: str) -> LlamaDecoderLayer:
    return LlamaDecoderLayer(
        input_layernorm=parameters.rms_norm(f"{prefix}.input_layernorm.weight", config.rms_norm_eps),
        qkv_proj=parameters.linear(*(f"{prefix}.self_attn.{name}_proj.weight" for name in "qkv")),
        o_proj=parameters.linear(f"{prefix}.self_attn.o_proj.weight"),
        post_attention_layernorm=parameters.rms_norm(f"{prefix}.post_attention_layernorm.weight", config.rms_norm_eps),
        gate_up_proj=parameters.gate_up(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"),
        down_proj=parameters.linear(f"{prefix}.mlp.down_proj.weight"),
    )
