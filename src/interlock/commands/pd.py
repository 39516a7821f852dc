"""`interlock pd`: prefill in one process, decode in another, and the proof that nothing was lost between them."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from interlock.commands.console import StartDisplay
from interlock.commands.options import EngineOptions, SamplingOptions, with_engine_options, with_sampling_options
from interlock.commands.prompts import DEFAULT_PROMPTS, Prompt, read_prompts
from interlock.core.config import KVTransferConfig
from interlock.core.errors import RequestError
from interlock.pd.messages import Finished
from interlock.pd.pair import HandOff, PairRequest, PrefillDecodePair, run_single
from interlock.pd.process import EngineProcessError

EXIT_FAILED = 1
CONNECTOR = "PeerConnector"


@with_engine_options
@with_sampling_options
def pd(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; without any, a long and two short ones.")] = None,
    file: Annotated[list[Path] | None, typer.Option("--file", help="A file that is a prompt, or a .jsonl file of prompts; may be repeated.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help="Whether text goes through the chat template; yes if the model has one.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Whether to compare with a single process, bit for bit.")] = True,
    kv_load_failure_policy: Annotated[
        str | None,
        typer.Option("--kv-load-failure-policy", help="When KV does not land: 'recompute' on decode (the default), or 'fail' the request."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each request, and nothing else.")] = False,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Prefill in one process, decode in another: stream the text, then show what moved, what it saved, and that no bit differs.

    The prefill process computes a prompt's KV. The decode process reads it across with one-sided reads and generates by graph replay.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    requests = _requests(read_prompts(prompts, file) or DEFAULT_PROMPTS, sampling, chat)
    connector = _connector(engine, kv_load_failure_policy)
    options = engine.plain()
    output = Console(highlight=False, soft_wrap=True)
    results: list[HandOff] = []
    try:
        with StartDisplay() as display:
            pair = PrefillDecodePair(options, connector=connector, on_progress=display.update)
        with pair:
            for number, request in enumerate(requests, 1):
                if not as_json:
                    output.print(f"[{number}/{len(requests)}] {_shortened(request.prompt)}", style="bold", markup=False)
                results.append(pair.run(request, _discard if as_json else _write))
                _end_text(results[-1], as_json)
            for result in results:
                if result.decode is not None:
                    pair.recompute(result)
        if verify:
            with StartDisplay() as display:
                run_single(options, results, display.update)
    except EngineProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    if as_json:
        for result in results:
            print(json.dumps(_as_json(result)), flush=True)
    else:
        output.print(_table(results, verify))
        output.print(_verdict(results, verify))
    if any(result.error for result in results) or any(not _identical(result) for result in results if verify and result.decode):
        raise typer.Exit(EXIT_FAILED)


def _requests(prompts: list[Prompt], sampling: SamplingOptions, chat: bool | None) -> list[PairRequest]:
    params = sampling.params()  # refused here, before any process starts
    if params.n != 1:
        raise RequestError(f"n is {params.n}, expected 1: a hand-off serves one output")
    values = {"logprobs": 5, **sampling.plain()}
    return [PairRequest(f"request-{number}", prompt, values, chat) for number, prompt in enumerate(prompts, 1)]


def _connector(engine: EngineOptions, failure_policy: str | None) -> dict[str, Any]:
    """The connector of both processes: what the command line says, checked, or the peer connector."""
    values = {"kv_load_failure_policy": "recompute", **(engine.plain().get("kv_transfer_config") or {"kv_connector": CONNECTOR})}
    values.update({} if failure_policy is None else {"kv_load_failure_policy": failure_policy})
    KVTransferConfig.from_mapping(values)
    engine.config()
    return values


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    pass


def _end_text(result: HandOff, as_json: bool) -> None:
    if not as_json:
        _write("\n\n")
    for warning in result.warnings:
        print(f"warning: {result.request.request_id}: {warning}", file=sys.stderr)
    if result.error is not None:
        print(f"error: {result.request.request_id}: {result.error}", file=sys.stderr)


def _identical(result: HandOff) -> bool:
    return bool(result.same_tokens and result.same_logprobs)


def _table(results: list[HandOff], verified: bool) -> Table:
    title = "The hand-off, per request, on the decode side; recomputed: first token without it"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    numbers = ("#", "prompt\ntokens", "KV moved\nMB", "waited\nms", "1st token\nms", "recomputed\nms", "gain")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    if verified:
        table.add_column("bits")
    for number, result in enumerate(results, 1):
        if result.decode is None:
            table.add_row(str(number), "failed", style="red")
            continue
        done, again = result.decode, result.recompute
        row = [
            str(number),
            str(len(done.prompt_token_ids)),
            f"{done.kv_bytes_loaded / 1e6:.2f}",
            f"{done.load_wait_seconds * 1e3:.1f}",
            f"{done.ttft_seconds * 1e3:.1f}",
            f"{again.ttft_seconds * 1e3:.1f}" if again else "",
            f"{again.ttft_seconds / done.ttft_seconds:.3g}x" if again else "",
            "\n".join(f"{mode} x {count}" for mode, count in done.modes.items()),
        ]
        table.add_row(*row, *([_equality(result)] if verified else []))
    return table


def _equality(result: HandOff) -> str:
    if _identical(result):
        return "[green]equal[/]"
    return ", ".join(f"[red]{what} differ[/]" for what, same in (("tokens", result.same_tokens), ("logprobs", result.same_logprobs)) if not same)


def _verdict(results: list[HandOff], verified: bool) -> str:
    moved = sum(result.decode.kv_bytes_loaded for result in results if result.decode)
    served = [result for result in results if result.decode]
    text = f"{len(served)} of {len(results)} requests went through both processes; {moved / 1e6:.1f} MB of KV moved"
    if not verified:
        return f"{text}; not compared (--no-verify)."
    same = sum(_identical(result) for result in served)
    return f"{text}; {same} of {len(served)} equal to a single process in every token and in every bit of every log-probability."


def _as_json(result: HandOff) -> dict[str, Any]:
    if result.decode is None:
        return {"request_id": result.request.request_id, "error": result.error, "warnings": result.warnings}
    done, again = result.decode, result.recompute
    return {
        "request_id": done.request_id,
        "prompt_token_ids": done.prompt_token_ids,
        "outputs": [_output(done)],
        "handoff": {
            "kv_bytes_moved": done.kv_bytes_loaded,
            "cudagraph_modes": done.modes,
            "load_wait_seconds": done.load_wait_seconds,
            "num_failed_loads": done.num_failed_loads,
            "time_to_first_token": done.ttft_seconds,
            "time_to_first_token_recomputed": again.ttft_seconds if again else None,
            "tokens_equal_to_single_process": result.same_tokens,
            "logprobs_equal_to_single_process": result.same_logprobs,
        },
        "warnings": result.warnings,
    }


def _output(done: Finished) -> dict[str, Any]:
    logprobs = [[{"token_id": token, "logprob": value} for token, value in position] for position in done.logprobs]
    return {"index": 0, "text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason, "logprobs": logprobs}


def _shortened(prompt: Prompt) -> str:
    if isinstance(prompt, list):
        return f"{len(prompt)} token ids"
    line = " ".join(prompt.split())
    return line if len(line) <= 100 else f"{line[:60]} … {line[-36:]}"
