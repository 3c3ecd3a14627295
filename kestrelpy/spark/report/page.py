"""The page of a load: one HTML file that needs no other file, with a light and a dark design.

All text from the data is escaped. The charts are inside the page. The page loads nothing from other places, and forbids
the browser to do so.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from kestrelpy.spark.report.charts import CHARTS, data_size, milliseconds
from kestrelpy.spark.report.load import MOST_DRAWN, Load, Row

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>Load of {title}</title><style>
:root {{ --ground: #fff; --ink: #202124; --soft: #5f6368; --line: #d7dbdf; --band: #f5f7f8 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #17191c; --ink: #e4e6e8; --soft: #a0a6ac; --line: #3b4147; --band: #202327 }} }}
body {{ background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 62rem; padding: 1.5rem }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1.1rem; margin: 2.2rem 0 .2rem }}
p {{ margin: .3rem 0 .8rem; max-width: 46rem }} .soft {{ color: var(--soft) }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }}
th, td {{ border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; white-space: nowrap }}
th {{ color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal }}
th:first-child, td:first-child {{ text-align: left; max-width: 16rem; overflow: hidden; text-overflow: ellipsis }}
tbody tr:nth-child(even) {{ background: var(--band) }} img {{ height: auto; max-width: 100% }}
</style></head><body>
"""

Cell = Callable[[Row], str]


def page(source: str, load: Load, light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    """The whole page, as HTML. ``light`` and ``dark``: the charts by their names."""
    count = len(load.queues) + load.more_queues
    parts = [
        _HEAD.format(title=escape(source)),
        f"<h1>Load of {escape(source)}</h1>",
        f'<p class="soft">{load.items:,} items, {data_size(load.data_bytes)}, ',
        f"in {count:,} {'queue' if count == 1 else 'queues'}; ",
        f"added from {_instant(load.first_added)} to {_instant(load.last_added)}, UTC.",
    ]
    if load.more_queues:
        parts.append(f" {load.more_queues:,} queues with less data are not shown here; they are in the tables.")
    if len(load.queues) > MOST_DRAWN:
        parts.append(f" The charts show the {MOST_DRAWN} queues with the most data.")
    parts.append("</p>")
    for title, text, columns in _TABLES:
        parts.append(_table(title, text, columns, load.queues))
    for chart in CHARTS:
        if chart.name in light:
            parts.append(f"<h2>{chart.title}</h2><p>{escape(chart.text)}</p>")
            parts.append(_image(chart.title, light[chart.name], dark[chart.name]))
    parts.append("</body></html>\n")
    return "".join(parts)


def _image(title: str, light: bytes, dark: bytes) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_uri(dark)}">'
        f'<img alt="{escape(title)}" src="{_uri(light)}"></picture>'
    )


def _uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"


def _table(title: str, text: str, columns: Mapping[str, Cell], rows: list[Row]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(row))}</td>" for cell in columns.values()) + "</tr>" for row in rows
    )
    return (
        f"<h2>{title}</h2><p>{escape(text)}</p>"
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _instant(moment: Any) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _number(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else f"{row[name]:,}"


def _ratio(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else f"{row[name]:,.3g}" if row[name] < 1000 else f"{row[name]:,.0f}"


def _bytes(name: str) -> Cell:
    return lambda row: data_size(row[name])


def _duration(name: str) -> Cell:
    return lambda row: "-" if row[name] is None else milliseconds(row[name])


def _share(part: str, whole: str) -> Cell:
    return lambda row: f"{100 * row[part] / row[whole]:.3g}%"


_TABLES: tuple[tuple[str, str, dict[str, Cell]], ...] = (
    (
        "Queues",
        "The number of items, their sizes, and the time from put to expiry. Error counts are known only for items that "
        "are not done. An archive has none.",
        {
            "queue": lambda row: str(row["queue"]),
            "items": _number("items"),
            "data": _bytes("bytes"),
            "median size": _bytes("p50_bytes"),
            "99% up to": _bytes("p99_bytes"),
            "largest": _bytes("largest_bytes"),
            "may expire": _share("expiring_items", "items"),
            "median lifetime": _duration("median_lifetime_ms"),
            "aborted": _number("failed_items"),
        },
    ),
    (
        "Burstiness",
        "If items come independently of each other at a steady rate, the Fano factor (variance of the items per minute "
        "over their mean) is 1, and so is the variation of the gaps (variance over the square of the mean). Above 1, "
        "items come in bursts.",
        {
            "queue": lambda row: str(row["queue"]),
            "minutes": _number("minutes"),
            "with items": _share("busy_minutes", "minutes"),
            "items per minute": _ratio("mean_items_per_minute"),
            "busiest minute": _number("peak_items_per_minute"),
            "at": lambda row: f"{row['peak_minute']:%Y-%m-%d %H:%M}",
            "peak to mean": _ratio("peak_to_mean"),
            "Fano factor": _ratio("fano_factor"),
            "median gap": _duration("median_gap_ms"),
            "99% up to": _duration("p99_gap_ms"),
            "variation of gaps": _ratio("gap_variation"),
        },
    ),
)
