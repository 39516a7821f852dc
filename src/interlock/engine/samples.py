"""The n samples of one prompt: they share the prompt's KV through the prefix cache, and are told apart by their sample index."""

import dataclasses

from interlock.core.sampling_params import SamplingParams
from interlock.engine.core import EngineCore
from interlock.engine.detokenizer import Detokenizer
from interlock.engine.inputs import TokenizedPrompt
from interlock.engine.outputs import CompletionOutput, RequestDelta, RequestOutput, logprob_table
from interlock.engine.request import Request


class PromptSamples:
    """One prompt in an engine. Its first sample computes the prompt; the others follow when that is done, and find it cached.

    Raises RequestError, with nothing started, if the prompt cannot be served.
    """

    def __init__(self, core: EngineCore, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        self.request_id = request_id
        self._core = core
        self._params = params
        seed = core.draw_seed(params)
        followers = params if params.extra_args is None else dataclasses.replace(params, extra_args=None)  # a hand-off is used once
        self.requests = [
            core.make_request(
                request_id if params.n == 1 else f"{request_id}.{index}", prompt, params if index == 0 else followers, seed=seed, sample_index=index
            )
            for index in range(params.n)
        ]
        self._following: list[Request] = []
        self._unfinished = {request.request_id for request in self.requests}
        self._text: dict[str, list[str]] = {request.request_id: [] for request in self.requests}

    def start(self) -> None:
        """Put the first sample into the engine. Raises RequestError if the connector refuses it."""
        self._core.add_request(self.requests[0])
        self._following = self.requests[1:]

    def take(self, delta: RequestDelta) -> int:
        """Note what a step added to one of the samples; returns its index."""
        self._text[delta.request_id].append(delta.text)
        if delta.finished:
            self._unfinished.discard(delta.request_id)
        following, self._following = self._following, []
        for request in following:
            if self.requests[0].finish_reason in ("abort", "error"):
                self._unfinished.discard(request.request_id)
            else:
                self._core.add_request(request)
        return next(index for index, request in enumerate(self.requests) if request.request_id == delta.request_id)

    def abort(self) -> None:
        """End all samples."""
        for request in self._following:
            self._unfinished.discard(request.request_id)
        self._following = []
        for req_id in list(self._unfinished):
            self._core.abort_request(req_id)

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return not self._unfinished

    def output(self) -> RequestOutput:
        """The state of all samples."""
        first = self.requests[0]
        ends = [request.metrics.finished_time for request in self.requests if request.metrics.finished_time is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[self._completion(index, request) for index, request in enumerate(self.requests)],
            finished=self.finished,
            metrics=dataclasses.replace(first.metrics, finished_time=max(ends) if self.finished and ends else None),
            kv_transfer_params=first.output_kv_transfer_params,
            error=next((request.error for request in self.requests if request.error is not None), None),
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        detokenizer: Detokenizer = self._core.detokenizer
        logprobs, cumulative = None, None
        if self._params.logprobs is not None:
            logprobs = [logprob_table(position, lambda token_id: detokenizer.text([token_id], False)) for position in request.logprobs]
            cumulative = sum(position.logprobs[0] for position in request.logprobs)
        return CompletionOutput(
            index=index,
            text="".join(self._text[request.request_id]),
            token_ids=request.output_token_ids,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=request.finish_reason or (None if request.request_id in self._unfinished else self.requests[0].finish_reason),
            stop_reason=request.stop_reason,
        )
