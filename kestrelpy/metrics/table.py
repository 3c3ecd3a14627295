"""The metrics by name: what each one is, and its labels. docs/metrics.md says the same at greater length."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["METRICS", "RESERVED", "Metric"]

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class Metric(NamedTuple):
    """One metric. ``kind``: as Prometheus has it. ``unit``: as OpenTelemetry has it (UCUM)."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    help: str


_QUEUE, _READER = ("queue",), ("queue", "reader")

METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "kestrel_up", GAUGE, _QUEUE, "1", "1 if the queue can be used and read, 0 if it is in trouble or closed."
        ),
        Metric(
            "kestrel_info", GAUGE, ("queue", "kind", "version"), "1", "The kind of the queue, and kestrelpy's version."
        ),
        Metric("kestrel_items", GAUGE, _READER, "{item}", "Items that the reader has not done: unread and open ones."),
        Metric("kestrel_open_items", GAUGE, _READER, "{item}", "Items that consumers of the reader have open."),
        Metric("kestrel_bytes", GAUGE, _READER, "By", "Bytes of the items that the reader has not done."),
        Metric(
            "kestrel_oldest_item_age_seconds",
            GAUGE,
            _READER,
            "s",
            "Seconds since the reader's next item was put, 0 if there is none.",
        ),
        Metric(
            "kestrel_lag_bytes",
            GAUGE,
            _READER,
            "By",
            "Bytes that were put and that the reader has not done; in a folder, of readers that nobody has open, too.",
        ),
        Metric("kestrel_waiting_consumers", GAUGE, _READER, "{consumer}", "Consumers that wait in line for an item."),
        Metric("kestrel_waiting_producers", GAUGE, _QUEUE, "{producer}", "Producers that wait in line for room."),
        Metric("kestrel_put_total", COUNTER, _QUEUE, "{item}", "Items, or jobs, that were put."),
        Metric("kestrel_delivered_total", COUNTER, _READER, "{item}", "Deliveries of items to consumers."),
        Metric("kestrel_committed_total", COUNTER, _READER, "{item}", "Items that consumers have committed."),
        Metric("kestrel_aborted_total", COUNTER, _READER, "{item}", "Deliveries that consumers have aborted."),
        Metric("kestrel_expired_total", COUNTER, _READER, "{item}", "Items that have expired unread."),
        Metric(
            "kestrel_discarded_total", COUNTER, _READER, "{item}", "Items that were dropped for room, or by request."
        ),
        Metric("kestrel_skipped_total", COUNTER, _READER, "{item}", "Items that a reader that lagged was moved past."),
        Metric("kestrel_dead_total", COUNTER, _READER, "{item}", "Items that died after too many deliveries."),
        Metric(
            "kestrel_dead_letter_failures_total", COUNTER, _READER, "{move}", "Moves of dead items that have failed."
        ),
        Metric(
            "kestrel_dead_too_large", GAUGE, _READER, "{item}", "Dead items that are too large for their other queue."
        ),
        Metric("kestrel_refused_total", COUNTER, _QUEUE, "{put}", "Puts that were refused for want of room."),
        Metric("kestrel_timeouts_total", COUNTER, _READER, "{get}", "Gets that found no item in time."),
        Metric("kestrel_journal_bytes", GAUGE, _QUEUE, "By", "Size of the segments that are kept."),
        Metric("kestrel_segments", GAUGE, _QUEUE, "{segment}", "Segments that are kept."),
        Metric(
            "kestrel_pending_batches",
            GAUGE,
            _QUEUE,
            "{batch}",
            "Batches in the inbox that no owner has ingested yet; of a name that is no queue, too.",
        ),
        Metric("kestrel_unsynced_items", GAUGE, _QUEUE, "{item}", "Items that a power cut could take."),
        Metric("kestrel_sync_seconds", HISTOGRAM, _QUEUE, "s", "How long syncs of the journal took."),
        Metric(
            "kestrel_checkpoint_failures_total", COUNTER, _READER, "{save}", "Saves of a reader's place that failed."
        ),
        Metric("kestrel_quarantined_total", COUNTER, _QUEUE, "{range}", "Damaged ranges that were skipped."),
        Metric("kestrel_hook_errors_total", COUNTER, _READER, "{call}", "Calls of the reader's hooks that raised."),
        Metric("kestrel_jobs", GAUGE, ("queue", "tube", "state"), "{job}", "Jobs of a tube that are in a state."),
        Metric("kestrel_job_reservations_total", COUNTER, _QUEUE, "{job}", "Reservations of jobs."),
        Metric("kestrel_job_timeouts_total", COUNTER, _QUEUE, "{job}", "Reservations that ran out of time."),
        Metric("kestrel_server_connections", GAUGE, (), "{connection}", "Clients that are connected to the server."),
        Metric("kestrel_server_commands_total", COUNTER, ("command",), "{command}", "Commands of clients."),
    )
}
"""All metrics, in the order in which a page has them."""

DIRECTORY = "directory"
"""The label that tells queues of different folders apart, if a collector has several folders."""
RESERVED = {DIRECTORY, "le"}.union(*(metric.labels for metric in METRICS.values()))
"""Labels that are not the user's."""
