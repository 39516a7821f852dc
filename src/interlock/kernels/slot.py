"""The step slot: everything that changes from step to step, behind one address.

A slot begins with a header of 64-bit words. A word is a count or the address of an array; kernels read both through the slot
address that every launch receives, so that a captured program needs nothing rewritten between replays. The owner of a slot
(the runner's input batch) fills it, and refills it only after the step that used it has retired.
"""

from typing import Final

# Counts: live rows of this step. Padded rows are neither computed nor written.
NUM_TOKENS: Final = 0
NUM_REQS: Final = 1
NUM_LOGITS: Final = 2  # rows of the output head: one per request that samples in this step
STEP: Final = 3  # the step's stamp

# Addresses of arrays.
STATUS: Final = 4  # int64 [4]: the words STATUS_* below; code 0 means no error
TOKEN_IDS: Final = 5  # int32 [NUM_TOKENS]
POSITIONS: Final = 6  # int32 [NUM_TOKENS]
SLOT_MAPPING: Final = 7  # int64 [NUM_TOKENS]: block * block_size + offset
QUERY_START_LOC: Final = 8  # int32 [NUM_REQS + 1]
SEQ_LENS: Final = 9  # int32 [NUM_REQS]: KV positions valid after this step's writes
BLOCK_TABLE: Final = 10  # int32 [NUM_REQS, BLOCK_TABLE_STRIDE]
BLOCK_TABLE_STRIDE: Final = 11  # count: entries of one row
LOGITS_INDICES: Final = 12  # int32 [NUM_LOGITS]: token rows whose logits are wanted
GATE_TARGETS: Final = 13  # int64 [num_layers]: 0 is an open gate

# Sampling, one entry per logits row.
TEMPERATURE: Final = 14  # float32 [NUM_LOGITS]; 0 is greedy
TOP_K: Final = 15  # int32 [NUM_LOGITS]; 0 is all
TOP_P: Final = 16  # float32 [NUM_LOGITS]
SEED: Final = 17  # uint64 [NUM_LOGITS]
OUTPUT_INDEX: Final = 18  # int64 [NUM_LOGITS]: index of the token to draw, per request (high 32 bits: sample index)
NUM_LOGPROBS: Final = 19  # int32 [NUM_LOGITS]; -1 is none
NUM_MASKED: Final = 27  # int32 [NUM_LOGITS]: how many tokens must not be drawn
MASKED_TOKENS: Final = 28  # int32 [NUM_LOGITS, MAX_MASKED_TOKENS]: their ids, each once; an id outside of the vocabulary is passed over

# Results.
SAMPLED: Final = 20  # int32 [NUM_LOGITS]; -1 where the logits hold NaN, or their largest that may be drawn is not finite
SAMPLED_LOGPROB: Final = 21  # float32 [NUM_LOGITS]
SAMPLED_RANK: Final = 22  # int32 [NUM_LOGITS]: 1 is the most likely token
TOP_TOKENS: Final = 23  # int32 [NUM_LOGITS, MAX_LOGPROBS]
TOP_LOGPROBS: Final = 24  # float32 [NUM_LOGITS, MAX_LOGPROBS]

CONTROL: Final = 25  # the control block of the thread team that runs the step, set by the team; kernels that wait look there for an abort
GATE_WAIT: Final = 26  # nanoseconds that thread 0 waited at gates in this step

NUM_WORDS: Final = 32

# Words of the status block.
STATUS_CODE: Final = 0
STATUS_LAUNCH: Final = 1  # index of the launch in its program
STATUS_ROW: Final = 2
STATUS_KERNEL: Final = 3  # entry address of the kernel

# Error codes in STATUS. The first error of a step wins; the replay skips what follows it.
ERROR_NONE: Final = 0
ERROR_TOKEN_ID: Final = 1  # a token id outside the embedding table; row: the token row
ERROR_SLOT_MAPPING: Final = 2  # a KV slot outside the pool; row: the token row
ERROR_BLOCK_TABLE: Final = 3  # a block outside the pool; row: the request row
ERROR_ABORTED: Final = 4  # the stream was aborted while the step ran
ERROR_GATE: Final = 5  # a gate was released with its error bit; row: the layer

ERROR_TEXT: Final = {
    ERROR_TOKEN_ID: "a token id lies outside the embedding table",
    ERROR_SLOT_MAPPING: "a KV slot lies outside the pool",
    ERROR_BLOCK_TABLE: "a block of a block table lies outside the pool",
    ERROR_ABORTED: "the stream was aborted",
    ERROR_GATE: "a gate was released with an error",
}
