"""``make pipeline``: a service's queue, a query on it, alerts back, a lake and a report; with kills and a proof.

    producer ---> queue "lines" ---> streaming query ---> Parquet: words per minute and file
        |               |                  |
        |               v                  '-> inbox of queue "alerts" ---> consumer ---> its ledger
        |            archive ---> lake of Parquet ---> report
        '- killed once                     '- killed once, in the middle of a batch

Each process is a module here; ``__main__`` starts them, kills two of them and has ``proof`` compare what came out with
the input, counted by plain Python.
"""

from __future__ import annotations

from kestrelpy.demo.pipeline._plan import ALERTS, LINES, PipelineRun

__all__ = ["ALERTS", "LINES", "PipelineRun"]
