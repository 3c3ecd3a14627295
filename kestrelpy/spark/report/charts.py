"""Charts of a load, as PNG bytes. Each is drawn for a light page and for a dark one.

All queues of a picture share one time axis. A queue has the same colour in all pictures. Names are drawn as they are,
without an interpretation as mathematical text.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kestrelpy.spark.report.load import CURVE, MINUTE_MS, Load, Row

COLOURS = ("#1b6ca8", "#d98841", "#3f8f5f", "#8e5ea2", "#b5484d", "#7a6a4f")
WIDE, DOTS = 9.0, 110
_UTC = datetime.UTC


class Theme(NamedTuple):
    """The colours of a picture: its background, text and thin lines."""

    name: str
    ground: str
    ink: str
    faint: str


LIGHT = Theme("light", "#ffffff", "#202124", "#d7dbdf")
DARK = Theme("dark", "#17191c", "#e4e6e8", "#3b4147")


class Chart(NamedTuple):
    """One picture: the name of its file without the suffix, its title, and a text that says how to read it."""

    name: str
    title: str
    text: str


CHARTS = (
    Chart(
        "items",
        "Items per minute",
        "The mean of each slot of time. The pale area reaches up to the busiest minute of the slot.",
    ),
    Chart("bytes", "Data per minute", "The mean of each slot of time, without the bytes that the journal adds."),
    Chart(
        "curve",
        "How busy the minutes are",
        "A point at 10% and 500 means: a tenth of all minutes had 500 items or more. A steady load is a flat line. A "
        "load in bursts falls steeply. Minutes without an item count, too.",
    ),
    Chart("sizes", "Sizes of items", "The share of the items, and of the data, by size. A column is a power of two."),
    Chart(
        "gaps",
        "Time from one item to the next",
        "The share of the items by the time since the item before. Items of one batch come at the same time.",
    ),
    Chart("lifetimes", "Time from put to expiry", "The share of the items that have an expiry, by that time."),
    Chart("errors", "Items that were aborted", "The number of aborted items, by how often they were aborted."),
)


def draw(load: Load, theme: Theme) -> dict[str, bytes]:
    """Draw the charts that have data. Returns PNG bytes by the name of the chart."""
    matplotlib = import_module("matplotlib")
    style = {
        "figure.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "savefig.facecolor": theme.ground,
        "axes.edgecolor": theme.faint,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "text.parse_math": False,
        **{f"{name}.color": theme.ink for name in ("text", "xtick", "ytick")},
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
    }
    with matplotlib.rc_context(style):
        return _painted(load)


def _painted(load: Load) -> dict[str, bytes]:
    found = {}
    for picture in CHARTS:
        figure = _PAINTERS[picture.name](load)
        if figure is not None:
            figure.suptitle(picture.title, x=0.01, ha="left", fontsize=12)
            found[picture.name] = _png(figure)
    return found


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DOTS, metadata={"Software": None})
    return out.getvalue()


def _figure(rows: int, each: float, *, share_y: bool = False) -> tuple[Any, list[Any]]:
    """Axes below each other, with one horizontal axis. Uses the Agg backend only: no window and no shared state."""
    figure = import_module("matplotlib.figure").Figure(figsize=(WIDE, 0.9 + each * rows), layout="constrained")
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, sharey=share_y, squeeze=False)
    return figure, [row[0] for row in axes]


def _name(axes: Any, queue: str, note: str = "") -> None:
    shown = queue if len(queue) <= 60 else f"{queue[:59]}…"
    axes.set_title(f"{shown}{note}", loc="left", fontsize=9)


def _by_queue(load: Load, rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """The name, the colour and the rows of each queue that has rows."""
    found = []
    for queue, colour in zip(load.drawn, COLOURS, strict=False):
        mine = [row for row in rows if row["queue"] == queue]
        if mine:
            found.append((queue, colour, mine))
    return found


# -- along time ------------------------------------------------------------------------------------------------------


def _items(load: Load) -> Any:
    return _along_time(load, "items", "items per minute", peaks=load.slot_minutes > 1)


def _bytes(load: Load) -> Any:
    return _along_time(load, "bytes", "data per minute", peaks=False)


def _along_time(load: Load, column: str, label: str, *, peaks: bool) -> Any:
    queues, width = _by_queue(load, load.slots), load.slot_minutes
    first = min(row["number"] for row in load.slots)
    last = max(row["number"] for row in load.slots)
    numbers = range(first, last + width, width)
    edges = [_moment(number) for number in (*numbers, last + width)]
    figure, all_axes = _figure(len(queues), 1.5)
    for axes, (queue, colour, rows) in zip(all_axes, queues, strict=True):
        there = {row["number"]: row for row in rows}
        means = [there[number][column] / width if number in there else 0.0 for number in numbers]
        if peaks:
            tops = [float(there[number]["peak"]) if number in there else 0.0 for number in numbers]
            axes.stairs(tops, edges, fill=True, color=colour, alpha=0.22, linewidth=0)
        axes.stairs(means, edges, fill=not peaks, color=colour, alpha=1.0 if peaks else 0.85, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter(_plain if column == "items" else data_size)
        _name(axes, queue)
    slot = "" if width == 1 else f" (a slot is {_length(width)})"
    figure.supylabel(label, fontsize=9)
    _clock(all_axes[-1], f"time, UTC{slot}")
    return figure


def _clock(axes: Any, label: str) -> None:
    dates = import_module("matplotlib.dates")
    locator = dates.AutoDateLocator(tz=_UTC, maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=_UTC))
    axes.set_xlabel(label)


def _moment(number: int) -> datetime.datetime:
    """The start of a minute, from its number since 1970."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=_UTC)
    return epoch + datetime.timedelta(milliseconds=number * MINUTE_MS)


def _length(minutes: int) -> str:
    if minutes < 120:
        return f"{minutes} minutes"
    return f"{minutes / 60:.3g} hours" if minutes < 2880 else f"{minutes / 1440:.3g} days"


# -- distributions ---------------------------------------------------------------------------------------------------


def _curve(load: Load) -> Any:
    figure, (axes,) = _figure(1, 3.2)
    highest = 1.0
    for queue, colour in zip(load.drawn, COLOURS, strict=False):
        counts = load.curves[queue]
        highest = max(highest, *counts)
        axes.plot([step * 100 / CURVE for step in range(CURVE + 1)], counts, color=colour, label=queue, linewidth=1.6)
    if highest >= 1000:
        axes.set_yscale("symlog", linthresh=10)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 100)
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel("share of the minutes, the busiest first, %")
    axes.set_ylabel("items per minute, at least")
    legend = axes.legend(frameon=False, loc="upper right")
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _sizes(load: Load) -> Any:
    return _columns(load, load.sizes, "bytes", ("items", "bytes"), "size of an item", _size)


def _gaps(load: Load) -> Any:
    """Leave out gaps of 0, if there are others: their large share would hide the others."""
    rows = [row for row in load.gaps if row["from_ms"]] or load.gaps
    notes = {}
    for queue in load.drawn:
        counts = {row["from_ms"]: row["count"] for row in load.gaps if row["queue"] == queue}
        share = 100 * counts.get(0, 0) / (sum(counts.values()) or 1)
        notes[queue] = f"   {share:.3g}% come at the same time, the others:" if rows is not load.gaps else ""
    return _columns(load, rows, "ms", ("count",), "time since the item before", milliseconds, notes)


def _lifetimes(load: Load) -> Any:
    return _columns(load, load.lifetimes, "s", ("items",), "time from put to expiry", _seconds)


def _columns(
    load: Load,
    rows: Sequence[Row],
    unit: str,
    series: tuple[str, ...],
    label: str,
    words: Callable[[float], str],
    notes: Mapping[str, str] | None = None,
) -> Any:
    """Draw shares in buckets of powers of two. A second series is drawn as an outline."""
    queues = _by_queue(load, rows)
    if not queues:
        return None
    buckets = [_bucket(row[f"from_{unit}"]) for row in rows]
    first, last, highest = min(buckets), max(buckets), 0.0
    figure, all_axes = _figure(len(queues), 1.5, share_y=True)
    for axes, (queue, colour, mine) in zip(all_axes, queues, strict=True):
        for name in series:
            total = sum(row[name] for row in mine) or 1
            shares = [0.0] * (last - first + 1)
            for row in mine:
                shares[_bucket(row[f"from_{unit}"]) - first] += 100 * row[name] / total
            highest = max(highest, *shares)
            edges = [each - 0.5 for each in range(first, last + 2)]
            if name == series[0]:
                axes.bar(range(first, last + 1), shares, width=0.86, color=colour, label=f"of the {name}", alpha=0.9)
            else:
                axes.stairs(shares, edges, color=_ink(axes), linewidth=1.2, label="of the data")
        _name(axes, queue, (notes or {}).get(queue, ""))
        axes.grid(visible=False, axis="x")
    all_axes[0].set_ylim(0, 1.06 * highest)
    if len(series) > 1:
        all_axes[0].legend(frameon=False, loc="upper right", ncols=2)
    step = max(1, -(-(last - first + 1) // 14))
    ticks = range(first, last + 1, step)
    all_axes[-1].set_xticks(list(ticks), [words(float(1 << (at - 1)) if at else 0.0) for at in ticks])
    all_axes[-1].set_xlim(first - 0.6, max(last, first + 5) + 0.6)
    all_axes[-1].set_xlabel(f"{label}, from here to twice that")
    figure.supylabel("share, %", fontsize=9)
    return figure


def _errors(load: Load) -> Any:
    queues = _by_queue(load, load.errors)
    if not queues:
        return None
    figure, all_axes = _figure(len(queues), 1.5)
    highest = max(row["error_count"] for row in load.errors)
    for axes, (queue, colour, rows) in zip(all_axes, queues, strict=True):
        axes.bar([row["error_count"] for row in rows], [row["items"] for row in rows], color=colour, width=0.8)
        axes.yaxis.set_major_formatter(_plain)
        axes.grid(visible=False, axis="x")
        _name(axes, queue)
    all_axes[-1].set_xlim(0.4, max(highest, 5) + 0.6)
    all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
    all_axes[-1].set_xlabel("times aborted")
    figure.supylabel("items", fontsize=9)
    return figure


_PAINTERS: dict[str, Callable[[Load], Any]] = {
    "items": _items,
    "bytes": _bytes,
    "curve": _curve,
    "sizes": _sizes,
    "gaps": _gaps,
    "lifetimes": _lifetimes,
    "errors": _errors,
}


def _bucket(low: int) -> int:
    return low.bit_length()


def _ink(axes: Any) -> Any:
    return axes.xaxis.label.get_color()


# -- numbers in words ------------------------------------------------------------------------------------------------


def _plain(value: float, _: object = None) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.4g}{unit}"
    return f"{value:,.4g}"


def data_size(value: float, _: object = None) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"


def _size(value: float) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"


def milliseconds(value: float) -> str:
    return f"{_short(value)} ms" if value < 1000 else _seconds(value / 1000)


def _seconds(value: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= size:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value)} s"


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{value:.0f}"
