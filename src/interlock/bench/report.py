"""A run of benchmarks as JSON and as a table."""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from interlock.bench.measure import Figure


def write_json(path: Path, figures: Iterable[Figure], threads: int, rounds: int) -> None:
    """Write all samples, with the machine that they were taken on, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "interlock": importlib.metadata.version("interlock"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "threads": threads,
        "rounds": rounds,
        "figures": [{**asdict(figure), "ratio": figure.ratio, "met": figure.met} for figure in figures],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def print_table(console: Console, figures: Sequence[Figure], peer: str) -> None:
    """Print one row per figure: ours, the peer's, the ratio, and the promise with whether it is kept. `peer` says who the peer is."""
    table = Table(title=f"Medians; ratio = ours / peer; peer: {peer}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure")
    for heading in ("ours", "peer", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("promise", no_wrap=True)
    for figure in figures:
        ratio = _number(figure.ratio) if figure.ratio is not None else ""
        table.add_row(f"{figure.name} ({figure.unit})", _number(figure.value), _number(figure.peer_value), ratio, _promise(figure))
        for note, value in figure.notes.items():
            table.add_row(f"  {note}", value if isinstance(value, str) else _number(value), style="dim")
    console.print(table)


def machine() -> dict[str, Any]:
    """The machine, as far as figures depend on it."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    flags = next((line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), []) if cpuinfo.exists() else []
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _promise(figure: Figure) -> str:
    if figure.bound is None:
        return ""
    kept = {True: "[green]kept[/]", False: "[red]not kept[/]", None: "[yellow]no peer[/]"}[figure.met]
    return f"{'>=' if figure.sense == 'at least' else '<='} {figure.bound:g} {kept}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
