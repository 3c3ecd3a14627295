"""Results for people (tables) and programs (JSON), with what there is to know about the machine; no names, no paths."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measure import Result, Row

_PACKAGES = (
    "kestrelpy",
    "queuelib",
    "persist-queue",
    "litequeue",
    "diskcache",
    "culsans",
    "lmdb",
    "rocksdict",
    "redis",
    "huey",
    "procrastinate",
    "psycopg",
    "sqlalchemy",
    "dramatiq",
    "rq",
    "pyspark",
    "pyarrow",
)
_SERVERS = {"redis-server": "--version", "beanstalkd": "-v", "postgres": "--version"}
_DEBIAN = "/usr/lib/postgresql/*/bin"
"""Where Debian has the programs of PostgreSQL, which are not on the path."""


def table(result: Result) -> str:
    """A workload's rows as text."""
    workload = result.workload
    rows: list[tuple[str, ...]] = [("contender", "", "min", "median", "max", "times")]
    for row in result.rows:
        ratio = row.ratio(result.first(row))
        figures = (min(row.samples), row.median, max(row.samples))
        times = "" if ratio is None or len(workload.contenders) == 1 else f"{ratio:.2f}"
        phase = row.phase if row.at is None else f"{row.phase}, {workload.axis}: {row.at:,}"
        rows.append((row.contender, phase, *(short(one) for one in figures), times))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [f"{workload.name}: {workload.text}" + (f" ({workload.unit})" if workload.unit else "")]
    for cells in rows:
        pairs = enumerate(zip(cells, widths, strict=True))
        line = "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in pairs)
        lines.append("  " + line.rstrip())
    lines += [f"  left out: {name}, {reason}" for name, reason in result.left_out.items()]
    return "\n".join(lines) + "\n"


def short(value: float) -> str:
    """A figure for people."""
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
                **({"axis": result.workload.axis} if result.workload.axis else {}),
                "left_out": result.left_out,
                "rows": [_row(row, result) for row in result.rows],
            }
            for result in results
        ],
    }


def _row(row: Row, result: Result) -> dict[str, Any]:
    return {
        "contender": row.contender,
        "phase": row.phase,
        **({} if row.at is None else {"at": row.at}),
        "min": min(row.samples),
        "median": row.median,
        "max": max(row.samples),
        "times": row.ratio(result.first(row)),
        "samples": row.samples,
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
        "servers": {name: found for name, option in _SERVERS.items() if (found := _server_version(name, option))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _server_version(program: str, option: str) -> str:
    """The first number in what a program says of itself."""
    path = shutil.which(program) or max(glob.glob(f"{_DEBIAN}/{program}"), default=None)
    if path is None:
        return ""
    said = subprocess.run([path, option], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else ""


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
