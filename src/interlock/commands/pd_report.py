"""What `interlock pd` shows at its end: a table of the hand-offs, what gates save against a barrier, or JSON."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from interlock.commands.console import OutputConsole, json_line
from interlock.pd.messages import Finished
from interlock.pd.pair import HandOff, WaitComparison


@dataclass(slots=True)
class TransportRun:
    """What one pair of processes did of `num_requests`: its transport (or connector), those begun, and the comparison of waits if there was one."""

    transport: str
    num_requests: int
    results: list[HandOff] = field(default_factory=list)
    waits: WaitComparison | None = None


def show_runs(runs: list[TransportRun], verified: bool) -> None:
    """Print the tables and a closing sentence for each run. verified: whether the results were to be compared with a single process."""
    console = OutputConsole(highlight=False, soft_wrap=True)
    for run in runs:
        console.print(_table(run, verified))
        console.print(_verdict(run, verified))
    compared = [run for run in runs if run.waits is not None and run.waits.obstacle is None]
    if compared:
        console.print(_waits_table(compared))
    for run in runs:
        if run.waits is not None and run.waits.obstacle is not None:
            console.print(f"Gates and barrier over {run.transport}: {run.waits.obstacle}, so there is nothing to compare.")


def show_json(runs: list[TransportRun]) -> None:
    """Print one JSON object a line for each request."""
    for run in runs:
        for result in run.results:
            print(json_line(_result_as_json(result, run.transport)), flush=True)


def _waits_table(runs: list[TransportRun]) -> Table:
    title = "First token of the longest prompt, on decode: waiting at gates inside the replay, and for the whole load before it (medians)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("transport", no_wrap=True)
    for column in ("gates\nms", "barrier\nms", "saved\nms"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        assert run.waits is not None
        gates, barrier = statistics.median(run.waits.as_configured) * 1e3, statistics.median(run.waits.barrier) * 1e3
        table.add_row(run.transport, f"{gates:.1f}", f"{barrier:.1f}", f"{barrier - gates:.1f}")
    return table


def _table(run: TransportRun, verified: bool) -> Table:
    title = f"The hand-off over {run.transport}, per request, on the decode side; recomputed: first token without it"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    numbers = ("#", "prompt\ntokens", "KV moved\nMB", "waited\nms", "1st token\nms", "recomputed\nms", "gain")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    if verified:
        table.add_column("bits")
    for number, result in enumerate(run.results, 1):
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
    if result.single is None:
        return "[yellow]not compared[/]"
    if result.identical:
        return "[green]equal[/]"
    return ", ".join(f"[red]{what} differ[/]" for what, same in (("tokens", result.same_tokens), ("logprobs", result.same_logprobs)) if not same)


def _verdict(run: TransportRun, verified: bool) -> str:
    moved = sum(result.decode.kv_bytes_loaded for result in run.results if result.decode)
    served = [result for result in run.results if result.decode]
    both = sum(result.prefill is not None for result in served)
    alone = f", {len(served) - both} through decode alone" if both < len(served) else ""
    text = f"{both} of {run.num_requests} requests went through both processes{alone}; {moved / 1e6:.1f} MB of KV moved"
    if not verified:
        return f"{text}; not compared with a single process."
    same = sum(result.identical for result in served)
    if not served:
        return f"{text}; none is left to compare with a single process."
    return f"{text}; {same} of {len(served)} equal to a single process in every token and in every bit of every log-probability."


def _result_as_json(result: HandOff, transport: str) -> dict[str, Any]:
    """One request as a JSON object, with the fields of a RequestOutput and those of its hand-off."""
    if result.decode is None:
        return {"request_id": result.request.request_id, "error": result.error, "warnings": result.warnings}
    done, again = result.decode, result.recompute
    return {
        "request_id": done.request_id,
        "prompt_token_ids": done.prompt_token_ids,
        "outputs": [_output(done)],
        "handoff": {
            "transport": transport,
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
