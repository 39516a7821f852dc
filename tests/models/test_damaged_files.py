"""Model files with any byte or field wrong either load or are refused, soon and in a few lines; nothing that they state is believed unchecked."""

import json
import logging
import math
import random
from pathlib import Path

import pytest

from checkpoints import make_tiny_llama, make_tiny_llama_gguf, random_weights, write_safetensors
from interlock.core.errors import CheckpointError
from interlock.models.checkpoints import open_checkpoint
from interlock.models.checkpoints.checkpoint import MAX_FAULTS
from interlock.models.registry import load_model
from interlock.models.rope import rope_table

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 3,
}
LONGEST_MESSAGE = 12_000  # characters

pytestmark = pytest.mark.timeout(60)


def load_or_refuse(path: str) -> bool:
    """Whether it loads; otherwise it is refused in one message of bounded length."""
    message = ""
    try:
        config = load_model(path).config
        rope_table(config.rope, min(config.max_position_embeddings, 64))
    except CheckpointError as error:
        message = str(error)
    assert len(message) < LONGEST_MESSAGE
    return not message


@pytest.mark.parametrize("seed", range(2))
def test_a_gguf_file_with_any_byte_of_its_header_changed_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    path = Path(make_tiny_llama_gguf(tmp_path / "tiny.gguf", metadata=TOKENIZER, intermediate_size=32, vocab_size=32, hidden_size=32))
    good, rng = path.read_bytes(), random.Random(seed)
    header = good.index(b"blk.1.ffn_down.weight") + 64
    assert load_or_refuse(str(path))
    outcomes = {True: 0, False: 0}
    for position in range(0, header, 3):
        damaged = bytearray(good)
        damaged[position + rng.randrange(3)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        outcomes[load_or_refuse(str(path))] += 1
    assert min(outcomes.values()) > 10, outcomes


HYPERPARAMETERS = ["block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "expert_count", "rope.freq_base"]
HYPERPARAMETERS += [f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon")]
HYPERPARAMETERS += [
    f"rope.{name}" for name in ("dimension_count", "scale_linear", "scaling.factor", "scaling.type", "scaling.original_context_length")
]
GENERAL = [
    "general.architecture",
    "general.alignment",
    "general.type",
    "split.count",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
]


@pytest.mark.parametrize("key", [*(f"llama.{name}" for name in HYPERPARAMETERS), *TOKENIZER, *GENERAL])
def test_a_gguf_file_with_any_key_strange_loads_or_is_refused(tmp_path: Path, key: str) -> None:
    for value in (True, 0, 3, 2**32 - 1, 0.5, math.nan, "", "yarn", [1], ["x"] * 4):
        if key != "general.alignment" or not isinstance(value, list | str):  # the writer itself uses it
            load_or_refuse(make_tiny_llama_gguf(tmp_path / "tiny.gguf", metadata=TOKENIZER | {key: value}))


def test_a_block_count_beyond_what_the_file_holds_is_refused_at_once(tmp_path: Path) -> None:
    path = Path(make_tiny_llama_gguf(tmp_path / "tiny.gguf"))
    data = bytearray(path.read_bytes())
    at = data.index(b"llama.block_count") + len("llama.block_count") + 4
    for count in (3, 1000, 2_900_000_000):
        data[at : at + 4] = count.to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"states {count} layers, but holds tensors of 2"):
            load_model(str(path))


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    text = b"deep"
    nested = (9).to_bytes(4, "little") + (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    item = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + len(text).to_bytes(8, "little") + text
    path = tmp_path / "deep.gguf"
    path.write_bytes(head + nested + item * 100_000)
    with pytest.raises(CheckpointError, match="arrays 4 deep"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.chat_template", 5, ["tokenizer.chat_template is 5", "Jinja"]),
        ("tokenizer.chat_template", "{% if %}", ["tokenizer.chat_template is no valid Jinja template (line 1"]),
        ("tokenizer.chat_template.tool_use", [1], ["tokenizer.chat_template.tool_use is [1]"]),
        ("tokenizer.ggml.add_bos_token", "false", ["add_bos_token is 'false'", "true or false"]),
        ("tokenizer.ggml.unknown_token_id", True, ["unknown_token_id is True", "token id below 4"]),
        ("tokenizer.ggml.token_type", [True] * 4, ["token_type is list", "list of int"]),
        ("tokenizer.ggml.token_type", [1, 1, 1, 5], ["bos_token_id is 3", "'</s>'", "unused"]),
    ],
)
def test_tokenizer_metadata_of_a_wrong_kind_is_refused_by_key_and_value(tmp_path: Path, key: str, value: object, words: list[str]) -> None:
    metadata = TOKENIZER | {key: value}
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(make_tiny_llama_gguf(tmp_path / "tiny.gguf", metadata=metadata))
    for word in ["tiny.gguf", *words]:
        assert word in str(error.value)


STRANGE = [
    None,
    True,
    -1,
    0,
    1,
    3,
    10**6,
    10**30,
    10**400,
    0.5,
    -1.0,
    1e308,
    1e-320,
    math.inf,
    math.nan,
    "x",
    "",
    [],
    [1],
    [[1]],
    {},
    {"rope_type": []},
]


@pytest.mark.parametrize("seed", range(2))
def test_a_config_with_any_field_strange_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    good = json.loads((Path(make_tiny_llama(tmp_path, rope_scaling=scaling)) / "config.json").read_text())
    assert load_or_refuse(str(tmp_path))
    fields = [*good, "head_dim", "layer_types", "quantization_config", "rope_parameters", "sliding_window"]
    cases = [{field: value} for field in fields for value in STRANGE]
    cases += [{"rope_scaling": scaling | {name: value}} for name in scaling for value in STRANGE]
    cases += [{field: rng.choice(STRANGE) for field in rng.sample(fields, 3)} for _ in range(100)]
    for case in cases[seed::2]:
        (tmp_path / "config.json").write_text(json.dumps(good | case))
        load_or_refuse(str(tmp_path))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], 0, "", False, [1], "x"])
def test_a_rope_object_of_another_type_is_refused_although_it_is_empty(tmp_path: Path, key: str, value: object) -> None:
    make_tiny_llama(tmp_path, config_overrides={"rope_scaling": None, "rope_parameters": None} | {key: value})
    with pytest.raises(CheckpointError, match=f"{key} is"):
        open_checkpoint(str(tmp_path))


KINDS = {
    "linear": ["factor"],
    "dynamic": ["factor"],
    "yarn": ["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"],
    "longrope": ["factor", "attention_factor", "original_max_position_embeddings"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_parameters_give_finite_angles_or_are_refused(tmp_path: Path, kind: str) -> None:
    good = {"rope_type": kind, "factor": 2.0} | ({"short_factor": [1.0] * 8, "long_factor": [1.0] * 8} if kind == "longrope" else {})
    for name in KINDS[kind]:
        for value in (1e-320, 1e-300, 1, 64, 1e300, 1.7e308):
            make_tiny_llama(tmp_path, rope_scaling=good | {name: value})
            load_or_refuse(str(tmp_path))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1e-5])
def test_a_norm_epsilon_that_is_no_finite_number_above_0_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(CheckpointError, match=r"rms_norm_eps is .*finite number above 0"):
        open_checkpoint(make_tiny_llama(tmp_path / "hf", config_overrides={"rms_norm_eps": value}))
    with pytest.raises(CheckpointError, match=r"layer_norm_rms_epsilon is .*finite number above 0"):
        open_checkpoint(make_tiny_llama_gguf(tmp_path / "x.gguf", metadata={"llama.attention.layer_norm_rms_epsilon": float(value)}))


def test_bytes_that_belong_to_no_tensor_are_refused(tmp_path: Path) -> None:
    file = Path(make_tiny_llama(tmp_path)) / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good + b"xyz")
    with pytest.raises(CheckpointError, match=r"trailing: 3 bytes behind the last tensor"):
        open_checkpoint(str(tmp_path))
    header = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]}}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(40))
    with pytest.raises(CheckpointError, match=r"gap: 8 bytes before b belong to no tensor"):
        open_checkpoint(str(tmp_path))


def test_a_safetensors_file_with_any_byte_of_its_header_changed_loads_or_is_refused(tmp_path: Path) -> None:
    file = Path(make_tiny_llama(tmp_path, intermediate_size=32, hidden_size=32, vocab_size=32)) / "model.safetensors"
    good, rng = file.read_bytes(), random.Random(0)
    for position in range(8 + int.from_bytes(good[:8], "little")):
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        load_or_refuse(str(tmp_path))


def test_a_list_of_faults_names_the_first_and_counts_the_rest(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    weights = random_weights(seed=0, tie=True, **SIZES) | {
        f"stray.{i}": random_weights(seed=0, tie=True, **SIZES)["model.norm.weight"] for i in range(50)
    }
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(CheckpointError) as error:
        load_model(str(tmp_path))
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines[:MAX_FAULTS]] == ["unknown"] * MAX_FAULTS
    assert lines[MAX_FAULTS:] == [f"  and {50 - MAX_FAULTS} more"]


def test_a_huge_value_is_shortened_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_act is 'xxx.*characters") as error:
        open_checkpoint(make_tiny_llama(tmp_path, config_overrides={"hidden_act": "x" * 10**6}))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings"])
def test_a_size_of_any_length_makes_a_short_message(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{key} is 1000.*characters.*an integer from 1 to 2147483647") as error:
        open_checkpoint(make_tiny_llama(tmp_path, config_overrides={key: 10**4000}))
    assert len(str(error.value)) < 1000


def test_a_shard_that_no_file_can_be_named_makes_a_short_message(tmp_path: Path) -> None:
    index = Path(make_tiny_llama(tmp_path, shards=2)) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "x" * 10**6}}))
    with pytest.raises(CheckpointError, match=r"cannot be read .*too long") as error:
        open_checkpoint(str(tmp_path))
    assert len(str(error.value)) < 1000


TEMPLATES = ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"]
SMALL_FILES = [*TEMPLATES, "config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"]


@pytest.mark.parametrize("name", SMALL_FILES)
@pytest.mark.parametrize("damage", ["bytes", "empty", "folder", "link to nothing", "list", "deep"])
def test_a_small_file_that_is_damaged_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if damage == "folder":
        path.mkdir()
    elif damage == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        deep = (b"{{ " if name.endswith(".jinja") else b"") + b"[" * 100_000
        path.write_bytes({"bytes": b"\xff\xfe", "empty": b"", "list": b"[1, {%]", "deep": deep}[damage])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (5, ["chat_template is 5"]),
        ("", ["chat_template is ''"]),
        ({"default": "x"}, ["chat_template is {'default'"]),
        ("{% for m in messages %}", ["chat_template is no valid Jinja template (line 1", "endfor"]),
        ("{{ 'x' | nothing }}", ["chat_template is no valid Jinja template", "nothing"]),
        ("{% for x in y %}" * 30 + "{% endfor %}" * 30, ["chat_template cannot be compiled", "SyntaxError"]),
        (["x"], ["chat_template[0] is 'x'", "'name'"]),
        ([{"name": ["a"], "template": "x"}], ["chat_template[0] is {'name': ['a']"]),
        ([{"name": "default", "template": "x"}, {"name": "rag"}], ["chat_template[1] is {'name': 'rag'}", "'template'"]),
        ([{"name": "rag", "template": 5}], ["chat_template[0]: the template 'rag' is 5"]),
    ],
)
def test_a_chat_template_of_a_wrong_kind_is_refused_by_place_and_value(tmp_path: Path, template: object, words: list[str]) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    for name in ("tokenizer_config.json", "chat_template.json"):
        (tmp_path / name).write_text(json.dumps({"chat_template": template}))
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(str(tmp_path))
        for word in [str(tmp_path / name), *words]:
            assert word in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [5, ["<s>"], {}, {"content": None}, True, "\ud800"])
def test_a_special_token_of_a_wrong_kind_is_refused(tmp_path: Path, value: object) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token is .*expected text, an object"):
        open_checkpoint(str(tmp_path))


def test_a_tokenizer_whose_code_panics_is_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tokenizer_size=259)
    path = tmp_path / "tokenizer.json"
    normalizers = [{"type": "Prepend", "prepend": ""}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": normalizers}}))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer \(index out of bounds"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-of-this-name/model", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"model '.*(expected 'smollm2'|nor a Hugging Face directory)"):
        open_checkpoint(model)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_end_tokens_beyond_the_vocabulary_are_ignored_with_a_warning(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    if kind == "hf":
        path = make_tiny_llama(tmp_path / "hf", config_overrides={"eos_token_id": [2, 256, 10**12], "bos_token_id": 256})
    else:
        ids = {"tokenizer.ggml.eos_token_id": 256, "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.bos_token_id": 256}
        path = make_tiny_llama_gguf(tmp_path / "x.gguf", metadata=ids)
    with caplog.at_level(logging.WARNING):
        config = load_model(path).config
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), None)
    assert "beyond the vocabulary of 256 tokens are ignored" in caplog.text
