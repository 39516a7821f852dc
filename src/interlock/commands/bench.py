"""`interlock bench`: our figures, alternating with the peer's in one run."""

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer

from interlock.commands.console import OutputConsole
from interlock.commands.values import positive
from interlock.core.errors import ConfigError

BENCHMARKS = ("decode", "prefill", "handoff", "modes", "step-overhead", "startup", "crowded", "overlap", "transfer")


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(BENCHMARKS)}, or all.")] = "all",
    json: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write every run and the machine's description to this file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PATH", help="Draw the figures of 'overlap' to this file (.png or .svg).")] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", parser=positive, help="Counted runs of each side.")] = 5,
    threads: Annotated[int, typer.Option("--threads", metavar="N", parser=positive, help="Threads of each side.")] = 2,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Whether to alternate with llama.cpp, where it is installed.")] = True,
) -> None:
    """Measure: medians of alternating runs, ours and llama.cpp's in turn, on the embedded model.

    The peer is found in the environment that `make bench-peers` makes, or through INTERLOCK_PEERS_PYTHON.
    """
    if name != "all" and name not in BENCHMARKS:
        raise ConfigError(f"benchmark is {name!r}, expected one of {', '.join(BENCHMARKS)}, or all")
    from interlock.bench.overlap_plot import check_plot, write_plot
    from interlock.bench.peer import PeerProcess, find_peer_python
    from interlock.bench.report import print_table, write_json
    from interlock.bench.session import Session, without_repeats
    from interlock.models.checkpoints import resolve_model

    if plot is not None:
        check_plot(plot)
        if name not in ("overlap", "all"):
            raise ConfigError(f"--plot shows the benchmark 'overlap', and {name!r} is to be run")
    for path in (json, plot):
        if path is not None:
            _check_writable(path)
    errors = OutputConsole(stderr=True, highlight=False)
    python = find_peer_python() if peer else None
    if peer and python is None:
        errors.print("llama.cpp is not installed (make bench-peers); figures are ours alone", style="yellow")
    opponent = PeerProcess(python, str(resolve_model("smollm2")), threads) if python else None
    figures = []
    try:
        say = without_repeats(lambda what: errors.print(f"measuring: {what}", style="dim"))
        session = Session("smollm2", threads, rounds, opponent, say)
        for benchmark in BENCHMARKS if name == "all" else (name,):
            figures += importlib.import_module(f"interlock.bench.{benchmark.replace('-', '_')}").run(session)
    finally:
        if opponent is not None:
            opponent.close()
        if figures:
            print_table(OutputConsole(), figures, f"{opponent.name} ({opponent.version})" if opponent else "none")
            if json is not None:
                write_json(json, figures, threads, rounds)
            if plot is not None:
                write_plot(plot, figures)


def _check_writable(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if a file cannot be written at `path`."""
    directory = path.absolute().parent
    if not directory.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {directory}")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a directory; name a file in it")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"{path} cannot be written: this user may not write {'to it' if path.exists() else f'into {directory}'}")
