"""`interlock pd`: prefill in one process, decode in another, and the proof that nothing was lost between them."""

import importlib.util
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from interlock.commands.console import StartDisplay
from interlock.commands.options import EngineOptions, SamplingOptions, with_engine_options, with_sampling_options
from interlock.commands.pd_report import TransportRun, result_as_json, shortened, show_runs
from interlock.commands.prompts import DEFAULT_PROMPTS, Prompt, read_prompts
from interlock.core.config import KVTransferConfig
from interlock.core.errors import ConfigError, RequestError
from interlock.pd.pair import HandOff, PairRequest, PrefillDecodePair, run_single
from interlock.pd.process import EngineProcessError

EXIT_FAILED = 1
CONNECTOR = "PeerConnector"
TRANSPORTS = ("shared_memory", "nixl")
COMPARED_ROUNDS = 7


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
    transport: Annotated[
        list[str] | None,
        typer.Option(
            "--transport", help="What moves the bytes: 'shared_memory' (the default), 'nixl', or 'all' that are installed; may be repeated."
        ),
    ] = None,
    compare_barrier: Annotated[
        bool, typer.Option("--compare-barrier", help="Also show what the way of waiting saves against a barrier, on the longest prompt.")
    ] = False,
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
    connectors = _connectors(engine, kv_load_failure_policy, transport)
    options = engine.plain()
    runs: list[TransportRun] = []
    try:
        for name, connector in connectors.items():
            runs.append(_run_pair(name, connector, options, requests, compare_barrier, as_json))
        if verify:
            with StartDisplay() as display:
                run_single(options, [result for run in runs for result in run.results], display.update)
    except EngineProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    results = [result for run in runs for result in run.results]
    if as_json:
        for run in runs:
            for result in run.results:
                print(json.dumps(result_as_json(result, run.transport)), flush=True)
    else:
        show_runs(runs, verify)
    if any(result.error for result in results) or any(not result.identical for result in results if verify and result.decode):
        raise typer.Exit(EXIT_FAILED)


def _run_pair(
    name: str, connector: Mapping[str, Any], options: Mapping[str, Any], requests: list[PairRequest], compare_barrier: bool, as_json: bool
) -> TransportRun:
    """All requests through one pair of processes; text goes to standard output as it comes."""
    console = Console(highlight=False, soft_wrap=True)
    run = TransportRun(name)
    with StartDisplay() as display:
        pair = PrefillDecodePair(options, connector=connector, on_progress=display.update)
    with pair:
        for number, request in enumerate(requests, 1):
            if not as_json:
                console.print(f"[{number}/{len(requests)}] {shortened(request.prompt)}", style="bold", markup=False)
            run.results.append(pair.run(request, _discard if as_json else _write))
            _end_text(run.results[-1], as_json)
        served = [result for result in run.results if result.decode is not None]
        for result in served:
            pair.recompute(result)
        if compare_barrier and served:
            longest = max(served, key=lambda result: len(result.prompt_token_ids))
            with StartDisplay() as display:
                run.waits = pair.compare_waits(longest.request, COMPARED_ROUNDS, display.update)
    return run


def _requests(prompts: list[Prompt], sampling: SamplingOptions, chat: bool | None) -> list[PairRequest]:
    params = sampling.params()  # refused here, before any process starts
    if params.n != 1:
        raise RequestError(f"n is {params.n}, expected 1: a hand-off serves one output")
    values = {"logprobs": 5, **sampling.plain()}
    return [PairRequest(f"request-{number}", prompt, values, chat) for number, prompt in enumerate(prompts, 1)]


def _connectors(engine: EngineOptions, failure_policy: str | None, transports: list[str] | None) -> dict[str, dict[str, Any]]:
    """The connectors to show, by the name of their transport: the one that the command line describes, or the peer connector over each
    transport. All are checked before any process starts."""
    given = engine.plain().get("kv_transfer_config")
    if given is not None and transports:
        raise ConfigError("both --transport and --kv-transfer-config are given; the configuration names its own transport, so leave one out")
    names = _installed_transports() if "all" in (transports or ()) else tuple(dict.fromkeys(transports or TRANSPORTS[:1]))
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(f"--transport is {name!r}, expected one of {[*TRANSPORTS, 'all']}")
    peers = {name: {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"transport": name}} for name in names}
    chosen = peers if given is None else {given.get("kv_connector", ""): given}
    policy = {} if failure_policy is None else {"kv_load_failure_policy": failure_policy}
    connectors = {name: {"kv_load_failure_policy": "recompute", **values, **policy} for name, values in chosen.items()}
    for values in connectors.values():
        KVTransferConfig.from_mapping(values)
    engine.config()
    return connectors


def _installed_transports() -> tuple[str, ...]:
    if importlib.util.find_spec("nixl_cu12") is None:
        print("note: NIXL is not installed (pip install 'interlock[nixl]'); the hand-off is shown over shared memory alone", file=sys.stderr)
        return TRANSPORTS[:1]
    return TRANSPORTS


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
