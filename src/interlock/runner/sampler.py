"""The sampling launch of a step, and its results as Python values."""

from interlock.core.buffer import Buffer
from interlock.core.step import Logprobs
from interlock.graphs.stream import Stream
from interlock.kernels import catalog
from interlock.runner.input_batch import PreparedBatch


class Sampler:
    """Draws one token per logits row on the stream, after the forward pass. logits: float32 [max_num_seqs, vocab_size]."""

    def __init__(self, logits: Buffer, num_threads: int) -> None:
        vocab_size = logits.shape[1]
        stride = catalog.sample_scratch_bytes(vocab_size)
        scratch = Buffer.zeros((num_threads * stride,), "uint8")
        self.kernel = catalog.sample()
        self._arguments = self.kernel.pack(logits=logits, vocab_size=vocab_size, scratch=scratch, scratch_stride=stride)

    def launch(self, stream: Stream) -> None:
        """Launch the sampling of the bound slot's logits rows."""
        stream.launch(self.kernel, self._arguments)


def sampled_tokens(batch: PreparedBatch) -> tuple[dict[str, int], dict[str, str]]:
    """The drawn token of each sampling request, once the step has retired; and the requests that none could be drawn for, with the cause."""
    tokens, failed = {}, {}
    for req_id, token in zip(batch.sampling_req_ids, batch.slot.sampled[: len(batch.sampling_req_ids)].tolist(), strict=True):
        if token >= 0:
            tokens[req_id] = token
        else:
            failed[req_id] = "the logits are not finite"
    return tokens, failed


def sampled_logprobs(batch: PreparedBatch) -> dict[str, Logprobs]:
    """The log-probabilities of the requests that asked for them and have a token."""
    slot, found = batch.slot, {}
    for row, req_id in enumerate(batch.sampling_req_ids):
        count = int(slot.num_logprobs[row])
        if count >= 0 and slot.sampled[row] >= 0:
            tokens = [int(slot.sampled[row]), *slot.top_tokens[row, :count].tolist()]
            values = [float(slot.sampled_logprob[row]), *slot.top_logprobs[row, :count].tolist()]
            found[req_id] = Logprobs(tokens, values, int(slot.sampled_rank[row]))
    return found
