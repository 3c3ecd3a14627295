"""``make pipeline``: a service's queue, a query on it, a queue of alerts, a lake and a report; with kills and a proof.

    producer ---> queue "lines" ---> streaming query ---> Parquet: words per minute and file
        |               |                  |
        |               v                  '-> inbox of queue "alerts" ---> consumer ---> its ledger
        |            archive ---> lake of Parquet ---> report
        '- killed once                     '- killed once, in the middle of a batch

Each process is a module of this package. ``__main__`` starts the processes and kills two of them. ``proof`` compares
the results with the input, which plain Python counts.
"""

from __future__ import annotations

from kestrelpy.demo.pipeline._plan import ALERTS, LINES, PipelineRun

__all__ = ["ALERTS", "LINES", "PipelineRun"]
