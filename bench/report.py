"""Results for people (tables) and programs (JSON), with what there is to know about the machine; no names, no paths."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measure import Result

_PACKAGES = ("kestrelpy", "queuelib", "persist-queue", "litequeue", "diskcache")


def table(result: Result) -> str:
    """A workload's rows as text."""
    workload = result.workload
    rows: list[tuple[str, ...]] = [("contender", "", "min", "median", "max", "times")]
    for row in result.rows:
        first = result.first(row.phase)
        ratio = row.ratio(first)
        figures = (min(row.samples), row.median, max(row.samples))
        times = "" if ratio is None or len(workload.contenders) == 1 else f"{ratio:.2f}"
        rows.append((row.contender, row.phase, *(_figure(one) for one in figures), times))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [f"{workload.name}: {workload.text}" + (f" ({workload.unit})" if workload.unit else "")]
    for cells in rows:
        pairs = enumerate(zip(cells, widths, strict=True))
        line = "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in pairs)
        lines.append("  " + line.rstrip())
    lines += [f"  left out: {name}, {reason}" for name, reason in result.left_out.items()]
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 0.1 else f"{value:.2f}"


def as_json(results: list[Result], *, repeats: int, scale: float, scratch: Path) -> dict[str, Any]:
    """Everything, with the machine's description."""
    return {
        "machine": machine(scratch),
        "settings": {"repeats": repeats, "scale": scale},
        "results": [
            {
                "workload": result.workload.name,
                "text": result.workload.text,
                "unit": result.workload.unit,
                "left_out": result.left_out,
                "rows": [
                    {
                        "contender": row.contender,
                        "phase": row.phase,
                        "min": min(row.samples),
                        "median": row.median,
                        "max": max(row.samples),
                        "times": row.ratio(result.first(row.phase)),
                        "samples": row.samples,
                    }
                    for row in result.rows
                ],
            }
            for result in results
        ],
    }


def machine(scratch: Path) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "file_system": _file_system(scratch),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "sqlite": sqlite3.sqlite_version,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _file_system(folder: Path) -> str:
    """The type of the file system that the queues are on."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return ""
