"""The curves that --plot draws; matplotlib is imported only here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import UserError
from files import check_writable, replacing

# Okabe and Ito's palette, and marks that differ too: lines are told apart without colour
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")  # more than colours, so that no pair of both comes twice


class Point(NamedTuple):
    """A rule at one setting of its knob."""

    label: str
    x: float
    y: float
    low: float  # 95 % interval of y
    high: float


def check_plot(path: Path | None) -> None:
    """Raises UserError where --plot can't be had, before any work is done for it. None is fine."""
    check_writable("--plot", path)
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install -r requirements-plot.txt") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise UserError(f"--plot {path}: a picture's name ends in one of {', '.join('.' + kind for kind in sorted(kinds))}")


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as partial:
        figure.savefig(partial, dpi=150)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights moved up as little as keeps them ``gap`` apart, in the order given."""
    moved, last = [0.0] * len(heights), -gap
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        last = moved[i] = max(heights[i], last + gap)
    return moved


def curves_figure(path: Path, curves: dict[str, Sequence[float]], x_label: str, y_label: str) -> None:
    """A line for each name over 1, 2, 3, ..., named at its end."""
    figure, axes = _figure()
    top = max(max(values) for values in curves.values())
    heights = spread([values[-1] for values in curves.values()], top / 22)
    for i, (name, values) in enumerate(curves.items()):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        axes.plot(range(1, len(values) + 1), values, color=colour, marker=mark, markevery=(i % 4, 4), markersize=5, linewidth=1.8)
        axes.annotate(name, (len(values), heights[i]), (6, 0), textcoords="offset points", color=colour, va="center")
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(1, None), ylim=(0, None))
    _save(figure, path)


def rounds_figure(path: Path, bars: dict[str, dict[str, float]], x_label: str) -> None:
    """A bar for each name, of its parts end to end."""
    figure, axes = _figure()
    names = list(bars)
    left = [0.0] * len(names)
    for i, part in enumerate(next(iter(bars.values()))):
        widths = [bars[name][part] for name in names]
        axes.barh(names, widths, left=left, label=part, color=COLOURS[i], hatch=("", "//", "..")[i % 3], edgecolor="white")
        left = [a + b for a, b in zip(left, widths)]
    for y, end in enumerate(left):
        axes.annotate(f"{end:.3g}", (end, y), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set(xlabel=x_label, xlim=(0, 1.1 * max(left)))
    axes.legend(frameon=False)
    _save(figure, path)


def trade_off_figure(path: Path, families: dict[str, list[Point]], x_label: str, y_label: str) -> None:
    """Points with their intervals, those of one family joined."""
    figure, axes = _figure()
    placed = list[tuple[float, float, str, str]]()
    for i, (name, points) in enumerate(families.items()):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        points = sorted(points, key=lambda point: point.x)
        x, y = [p.x for p in points], [p.y for p in points]
        intervals = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
        axes.errorbar(x, y, intervals, color=colour, marker=mark, linewidth=1.6, elinewidth=0.8, capsize=2, label=name)
        placed += [(point.x, point.y, point.label, colour) for point in points if len(points) > 1]
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(frameon=False)
    figure.draw_without_rendering()  # where points lie on the page is known only now
    taken = list[tuple[float, float, float]]()  # a label's left end, height and right end
    for *point, label, colour in placed:
        at = axes.transData.transform(point)
        end = at[0] + 9 * len(label)
        if all(at[0] > right or end < left or abs(at[1] - y) > 12 for left, y, right in taken):  # else they would overlap
            axes.annotate(label, point, (5, 5), textcoords="offset points", fontsize=8, color=colour)
            taken.append((at[0], at[1], end))
    _save(figure, path)
