"""Pictures of results: ``python -m bench.plots FILE --into docs/plots``. Same results, same bytes.

Bars for rivals, on a logarithmic scale, the median with a whisker from minimum to maximum; lines along an axis or
along the time. What was not measured is not drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.report import short

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Picture:
    """One file: a phase of a workload."""

    file: str
    title: str
    workload: str
    phase: str
    unit: str = "microseconds per item"


A_JOB = "microseconds a job"
SOON = "commit to start, p50"
BARS = (
    Picture("memory", "In memory: put and get, one thread", "memory", "both"),
    Picture("put", "Durable put, 100 bytes", "put", "put"),
    Picture("put-take", "Durable put, take and commit, 100 bytes", "put-take", "both"),
    Picture("cycle", "A short durable queue: put, take and commit in turn", "cycle", "cycle"),
    Picture("batch", "By the thousand: put, take and commit", "batch", "both"),
    Picture("wake-up", "From a put to the consumer parked in get, median", "wake-up", "p50", "microseconds"),
    Picture("outbox-jobs", "Jobs that wait in PostgreSQL, through four threads", "jobs", "us a job", A_JOB),
    Picture("outbox-sqlite", "Jobs that wait in a SQLite file, through four threads", "sqlite", "us a job", A_JOB),
    Picture("outbox-latency", "From commit to the start of the handler, median", "latency", SOON, "milliseconds"),
)
LINES = (
    Picture("size", "Durable put against the size of the item", "size", "put"),
    Picture("sync", "Put that waits for the disk, against threads", "sync", "put"),
    Picture("readers", "Put against readers attached", "readers", "put"),
    Picture("behind", "Put, take and commit against items waiting", "behind", "cycle"),
    Picture("memory-threads", "In memory, against threads on each side", "memory-threads", "items/s", "items a second"),
)
SERIES = tuple(
    Picture(f"outbox-held-{file}", f"1,000 jobs/s beside a transaction that stays open: {title}", "held", phase, phase)
    for file, title, phase in (
        ("rate", "jobs started", "jobs/s"),
        ("claim", "a claim", "ms a claim"),
        ("wait", "from commit to start", "ms from commit to start, p50"),
    )
)
PARTS = ("before", "held", "after")
"""Of a series: a row each, whose samples are in the order of time."""
OURS, FLOOR, THEIRS = "#1b6ca8", "#9aa0a6", "#d98841"
WIDE, DOTS = 8.0, 100
OTHERS = ("#d98841", "#3f8f5f", "#8e5ea2", "#b5484d", "#7a6a4f")
PLAIN = {"Software": None}
"""Without the name and version of what has drawn it, which would change the bytes."""


def draw(facts: dict[str, Any], into: Path) -> list[Path]:
    """Draw everything that was measured; returns the files."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    results = {result["workload"]: result for result in facts["results"]}
    foot = _foot(facts)
    into.mkdir(parents=True, exist_ok=True)
    made = []
    for pictures, paint in ((BARS, _bars), (LINES, _lines), (SERIES, _series)):
        for picture in pictures:
            result = results.get(picture.workload, {"rows": []})
            phases = [f"{part}: {picture.phase}" for part in PARTS] if paint is _series else [picture.phase]
            rows = [row for row in result["rows"] if row["phase"] in phases]
            if not rows:
                continue
            high = 1.6 + 0.28 * len(rows) if paint is _bars else 4.8
            figure, axes = pyplot.subplots(figsize=(WIDE, high), layout="constrained")
            paint(axes, rows, picture, result)
            axes.set_title(picture.title, loc="left", fontsize=11)
            axes.spines[["top", "right"]].set_visible(False)
            figure.supxlabel(foot, fontsize=7, color="#5f6368")
            path = into / f"{picture.file}.png"
            figure.savefig(path, dpi=DOTS, metadata=PLAIN)
            pyplot.close(figure)
            made.append(path)
    return made


def _foot(facts: dict[str, Any]) -> str:
    machine, settings = facts["machine"], facts["settings"]
    small = "" if settings["scale"] == 1 else f", at a scale of {settings['scale']:g}: not to be read"
    python = f"{machine['cores']} cores of {machine['processor']}, {machine['python']}, {machine['file_system']}"
    return f"{python}; medians of {settings['repeats']}{small}"


def _color(name: str) -> str:
    return OURS if name.startswith("kestrelpy") else FLOOR if name.startswith("floor") else THEIRS


def _plainly(value: float, _place: int | None = None) -> str:
    """A power of ten as people write it."""
    return f"{value:,g}"


def _bars(axes: Any, rows: Rows, picture: Picture, _result: dict[str, Any]) -> None:
    """The quickest on top."""
    rows = sorted(rows, key=lambda row: -float(row["median"]))
    names, medians = [row["contender"] for row in rows], [row["median"] for row in rows]
    whiskers = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
    axes.barh(names, medians, color=[_color(name) for name in names], height=0.7)
    axes.errorbar(medians, range(len(rows)), xerr=whiskers, fmt="none", ecolor="#202124", elinewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_plainly)
    axes.set_xlim(min(row["min"] for row in rows) / 2, max(row["max"] for row in rows) * 2.5)
    axes.set_xlabel(f"{picture.unit} (logarithmic)", fontsize=9)
    for place, row in enumerate(rows):
        axes.text(row["max"] * 1.12, place, short(row["median"]), va="center", fontsize=8)
    axes.tick_params(labelsize=8)


def _lines(axes: Any, rows: Rows, picture: Picture, result: dict[str, Any]) -> None:
    """A line for each contender; one that was measured at one place is a level."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    places = sorted({row["at"] for row in rows})
    others = iter(OTHERS * len(names))
    for name in names:
        found = sorted((row for row in rows if row["contender"] == name), key=lambda row: int(row["at"]))
        color = _color(name)
        look = {"color": next(others) if color == THEIRS else color, "label": name, "linewidth": 1.6}
        look["linestyle"] = "--" if name.startswith("floor") else ":" if "put_future" in name else "-"
        if len(found) == 1 < len(places):
            axes.axhline(found[0]["median"], **look)
            continue
        at, medians = [row["at"] for row in found], [row["median"] for row in found]
        axes.fill_between(
            at, [row["min"] for row in found], [row["max"] for row in found], alpha=0.15, color=look["color"]
        )
        axes.plot(at, medians, marker="o", markersize=4, **look)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(result["axis"], fontsize=9)
    if len(names) > 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plainly)
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_ylabel(f"{picture.unit} (logarithmic)", fontsize=9)
    else:
        axes.set_ylim(bottom=0)
        axes.set_ylabel(picture.unit, fontsize=9)
    axes.tick_params(labelsize=8)


def _series(axes: Any, rows: Rows, picture: Picture, result: dict[str, Any]) -> None:
    """A line for each contender, along the time; what is held is held between the two upright lines."""
    length = next(row["median"] for row in result["rows"] if row["phase"] == "seconds a slice")
    names = list(dict.fromkeys(row["contender"] for row in rows))
    others = iter(OTHERS * len(names))
    bounds: list[float] = []
    for name in names:
        parts = {row["phase"].partition(":")[0]: row["samples"] for row in rows if row["contender"] == name}
        values = [value for part in PARTS for value in parts.get(part, ())]
        color = _color(name)
        axes.plot(
            [(place + 1) * length for place in range(len(values))],
            values,
            color=next(others) if color == THEIRS else color,
            linestyle="-" if color != FLOOR else ":" if "," in name else "--",
            linewidth=1.6,
            label=name,
        )
        before = len(parts.get("before", ()))
        bounds = bounds or [(before + 0.5) * length, (before + len(parts.get("held", ())) + 0.5) * length]
    for bound in bounds:
        axes.axvline(bound, color="#5f6368", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plainly)
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_ylabel(f"{picture.unit} (logarithmic)", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.tick_params(labelsize=8)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the results of a file; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what python -m bench --json has written")
    parser.add_argument("--into", type=Path, default=Path("docs/plots"), help="the folder (docs/plots)")
    args = parser.parse_args(argv)
    try:
        made = draw(json.loads(args.file.read_text("utf-8")), args.into)
    except ImportError as error:
        print(f"{error.name} is not installed: it comes with the bench extra", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
