"""`interlock pd`: prefill in one process, decode in another, and the proof that nothing was lost between them."""

import importlib.util
import math
import signal
import sys
from typing import Annotated, Any

import typer

from interlock.commands.options import ChatOption, EngineOptions, FilesOption, SamplingOptions, with_engine_options, with_sampling_options
from interlock.commands.pd_report import show_json, show_runs
from interlock.commands.pd_session import PairSession
from interlock.commands.prompts import DEFAULT_PROMPTS, Prompt, read_prompts
from interlock.commands.values import number
from interlock.core.config import KVTransferConfig
from interlock.core.errors import ConfigError, RequestError
from interlock.pd.pair import PairRequest
from interlock.pd.process import STALL_SECONDS

EXIT_FAILED = 1
CONNECTOR = "PeerConnector"
TRANSPORTS = ("shared_memory", "nixl")

_POLICY_HELP = "When KV does not land: 'recompute' on decode (the default), or 'fail' the request."
_TRANSPORT_HELP = "What moves the bytes: 'shared_memory' (the default), 'nixl', or 'all' that are installed; may be repeated."
_BARRIER_HELP = "Also show what the way of waiting saves against a barrier, on the longest prompt."
_STALL_HELP = "Seconds without a sign of life after which a process at work is taken for stalled and ended."


@with_engine_options
@with_sampling_options
def pd(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; without any, a long and two short ones.")] = None,
    file: FilesOption = None,
    chat: ChatOption = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Whether to compare with a single process, bit for bit.")] = True,
    kv_load_failure_policy: Annotated[str | None, typer.Option("--kv-load-failure-policy", metavar="POLICY", help=_POLICY_HELP)] = None,
    transport: Annotated[list[str] | None, typer.Option("--transport", metavar="NAME", help=_TRANSPORT_HELP)] = None,
    compare_barrier: Annotated[bool, typer.Option("--compare-barrier", help=_BARRIER_HELP)] = False,
    stall_timeout: Annotated[float, typer.Option("--stall-timeout", metavar="SECONDS", parser=number, help=_STALL_HELP)] = STALL_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each request, and nothing else.")] = False,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Prefill in one process, decode in another: stream the text, then show what moved, what it saved, and that no bit differs.

    The prefill process computes a prompt's KV. The decode process reads it across with one-sided reads and generates by graph replay.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if not 0 < stall_timeout < math.inf:
        raise ConfigError(f"--stall-timeout is {stall_timeout:g}, expected a number of seconds above 0")
    requests = _requests(read_prompts(prompts, file) or DEFAULT_PROMPTS, sampling, chat)
    connectors = _connectors(engine, kv_load_failure_policy, transport)
    session = PairSession(engine.plain(), requests, stall_timeout=stall_timeout, compare_barrier=compare_barrier, quiet=as_json)
    complete = all(session.run(name, connector) for name, connector in connectors.items())
    verified = verify and complete
    if verified:
        session.verify()
    if as_json:
        show_json(session.runs)
    else:
        show_runs(session.runs, verified)
    if session.failed or (verified and not all(result.identical for result in session.results if result.decode)):
        raise typer.Exit(EXIT_FAILED)


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
        role = KVTransferConfig.from_mapping(values).kv_role
        if role != "kv_both" or "engine_id" in values:
            named = "engine_id" if "engine_id" in values else "kv_role"
            raise ConfigError(f"--kv-transfer-config has {named} {values[named]!r}, but each process is given its own here; leave it out")
    engine.config()
    return connectors


def _installed_transports() -> tuple[str, ...]:
    if importlib.util.find_spec("nixl_cu12") is None:
        print("note: NIXL is not installed (pip install 'interlock[nixl]'); the hand-off is shown over shared memory alone", file=sys.stderr)
        return TRANSPORTS[:1]
    return TRANSPORTS
