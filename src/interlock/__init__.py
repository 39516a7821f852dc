"""Interlock: an LLM inference runtime whose steps never read KV that has not landed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.core.sampling_params import SamplingParams
    from interlock.engine.llm import LLM
    from interlock.engine.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "interlock.engine.llm",
    "CompletionOutput": "interlock.engine.outputs",
    "Logprob": "interlock.engine.outputs",
    "RequestOutput": "interlock.engine.outputs",
    "SamplingParams": "interlock.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import interlock` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'interlock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
