"""`interlock generate`: prompts in, text (or one JSON object a line) out."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.commands.console import StartDisplay, json_line
from interlock.commands.options import ChatOption, EngineOptions, FilesOption, SamplingOptions, with_engine_options, with_sampling_options
from interlock.commands.prompts import Prompt, read_prompts, read_standard_input
from interlock.core.errors import RequestError

if TYPE_CHECKING:
    from interlock.engine.llm import LLM, RequestOutput, StreamDelta


@with_engine_options
@with_sampling_options
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; without any (and no --file), standard input.")] = None,
    file: FilesOption = None,
    chat: ChatOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each prompt, with the fields of RequestOutput.")] = False,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete prompts. Text streams as it comes, prompt after prompt; all prompts run together."""
    config, params = engine.config(), sampling.params()
    wanted = read_prompts(prompts, file) or read_standard_input()
    if not wanted:
        raise RequestError("there is no prompt; give one as an argument, with --file, or on standard input")
    from interlock.engine.llm import LLM

    with StartDisplay() as display:
        options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "model"}
        llm = LLM(config.model, progress=display.reporter("engine"), **options)
    with llm:
        deltas = llm.stream([_prepared(llm, prompt, chat) for prompt in wanted], params)
        if llm.get_tokenizer() is None and not as_json:
            raise RequestError("the model's files have no tokenizer, so that there is no text to write; use --json for token ids")
        outputs = _write_json(deltas) if as_json else _write_text(deltas, len(wanted), params.n)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"error: request {output.request_id}: {output.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _prepared(llm: "LLM", prompt: Prompt, chat: bool | None) -> Any:
    """What the engine is given: text through the chat template, if that is wanted (by default: if there is one)."""
    from interlock.engine.inputs import as_user_message

    tokenizer = llm.get_tokenizer()
    wanted = tokenizer is not None and tokenizer.has_chat_template if chat is None else chat
    return as_user_message(prompt, llm.chat_prompt) if wanted else prompt


def _write_text(deltas: Iterable["StreamDelta"], num_prompts: int, num_samples: int) -> list["RequestOutput"]:
    """Write outputs in order: the first that is not finished streams, the text of those behind it waits for its turn."""
    order = [(prompt, index) for prompt in range(num_prompts) for index in range(num_samples)]
    waiting: dict[tuple[int, int], list[str]] = {key: [] for key in order}
    finished: set[tuple[int, int]] = set()
    outputs = []
    turn = 0
    _begin(order, turn)
    for delta in deltas:
        key = delta.prompt_index, delta.index
        waiting[key].append(delta.text)
        if delta.finish_reason is not None:
            finished.add(key)
        if delta.output is not None:
            outputs.append(delta.output)
        while turn < len(order):
            _write("".join(waiting[order[turn]]))
            waiting[order[turn]].clear()
            if order[turn] not in finished:
                break
            _write("\n")
            turn += 1
            _begin(order, turn)
    return outputs


def _begin(order: Sequence[tuple[int, int]], turn: int) -> None:
    """Head an output with its number, where there are several."""
    if turn < len(order) and len(order) > 1:
        _write(f"{'' if turn == 0 else chr(10)}[{turn + 1}/{len(order)}]\n")


def _write_json(deltas: Iterable["StreamDelta"]) -> list["RequestOutput"]:
    """Write each prompt's result as soon as it and all before it are finished."""
    outputs: dict[int, RequestOutput] = {}
    turn = 0
    for delta in deltas:
        if delta.output is not None:
            outputs[delta.prompt_index] = delta.output
        while turn in outputs:
            _write(json_line(dataclasses.asdict(outputs[turn])) + "\n")
            turn += 1
    return list(outputs.values())


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
