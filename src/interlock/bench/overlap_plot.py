"""The overlap benchmark as a picture: step time over load time, both in units of the step's compute time."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlock.bench.measure import Figure
from interlock.bench.overlap import WAYS, OverlapFigure
from interlock.core.errors import ConfigError

SUFFIXES = (".png", ".svg")
"""What a plot may be written as."""

_COLOURS = {way.name: colour for way, colour in zip(WAYS, ("#0072b2", "#e69f00", "#cc79a7", "#555555"), strict=True)}
_MARKERS = {way.name: marker for way, marker in zip(WAYS, "osv^", strict=True)}


def check_plot(path: Path) -> None:
    """Raises ConfigError if a plot cannot be written to `path`: its suffix, or matplotlib that is not installed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot is {str(path)!r}, expected a name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib, which is not installed; install interlock[plot]") from None


def write_plot(path: Path, figures: Sequence[Figure]) -> None:
    """Draw the overlap figures among `figures` to `path`. Raises ConfigError as `check_plot` does, or when there is none."""
    check_plot(path)
    overlap = [figure for figure in figures if isinstance(figure, OverlapFigure)]
    if not overlap:
        raise ConfigError("--plot shows the benchmark 'overlap', which was not run")
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context({"svg.hashsalt": "interlock", "svg.fonttype": "none", "font.size": 10}):
        canvas = Canvas(figsize=(9, 4), layout="constrained")
        step, stall = canvas.subplots(1, 2)
        _draw(step, overlap, lambda figure: figure.value)
        _draw_bound(step, overlap)
        step.set_title("a step with a load", loc="left")
        step.set_ylabel("milliseconds, median")
        _draw(stall, overlap, lambda figure: figure.worst_stall)
        stall.set_title("the worst stall of rows that load nothing", loc="left")
        stall.set_ylabel("milliseconds, largest")
        top = max(axes.get_ylim()[1] for axes in (step, stall))
        for axes in (step, stall):
            axes.set_ylim(0, top)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted({figure.load_to_compute for figure in overlap}), minor=False)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("load time / compute time")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        step.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axes: Any, figures: Sequence[OverlapFigure], value: Any) -> None:
    for way in dict.fromkeys(figure.way for figure in figures):
        points = [(figure.load_to_compute, value(figure)) for figure in figures if figure.way == way]
        axes.plot(*zip(*points, strict=True), label=way, color=_COLOURS[way], marker=_MARKERS[way], linewidth=1.8 if way == WAYS[0].name else 1.2)


def _draw_bound(axes: Any, figures: Sequence[OverlapFigure]) -> None:
    ratios = sorted({figure.load_to_compute for figure in figures})
    bounds = [statistics.median(figure.peer_value or 0.0 for figure in figures if figure.load_to_compute == ratio) for ratio in ratios]
    axes.plot(ratios, bounds, label="bound: max(T, C) and one layer", color="black", linestyle=":", linewidth=1.2, zorder=0)
