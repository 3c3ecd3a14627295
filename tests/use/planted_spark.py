"""What users of the pipeline on Spark could meet, put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

from kestrelpy.inbox import ingest as intake
from tests.use.planting import defect

NEEDS_SPARK = "the explorer runs no Spark: what executors and the sink do is tried by the tests of tests/spark"


@defect(
    "D1",
    "An executor that does not see the queue's files returns no rows and no error.",
    test="tests/spark/test_executors.py::test_what_is_not_there_is_an_error",
    unreachable=NEEDS_SPARK,
)
def _not_here_is_taken_for_retired() -> Iterator[None]:
    from kestrelpy.arrow import pieces

    with patch.object(pieces, "check_retired", lambda chain, piece, folders: None):
        yield


@defect(
    "H12",
    "An executor with an older copy of the last segment returns the rows that it has, and no error.",
    test="tests/spark/test_executors.py::test_what_is_not_there_is_an_error",
    unreachable=NEEDS_SPARK,
)
def _the_last_segment_may_end_anywhere() -> Iterator[None]:
    from kestrelpy.arrow import plan

    with patch.object(plan, "_reach", lambda file, segment, watermark: watermark):
        yield


@defect(
    "D1 in the lake",
    "A conversion whose executors see another archive or lake says that all is well, and deletes the archive.",
    test="tests/spark/test_lake.py::test_tasks_that_see_another_folder_are_told",
    unreachable=NEEDS_SPARK,
)
def _what_tasks_say_is_believed() -> Iterator[None]:
    from kestrelpy.spark.lake import conversion

    with patch.object(conversion, "_check_seen", lambda archive, lake, found: None):
        yield


@defect(
    "P3",
    "A batch with an item larger than the owner takes is published, and is set aside later, unseen.",
    test="tests/unit/inbox/test_inbox.py::test_what_the_owner_does_not_take_is_not_published",
)
def _nobody_knows_what_the_owner_takes() -> Iterator[None]:
    from kestrelpy.inbox import parts, publishing

    with patch.object(parts, "limit_of", lambda *_: None), patch.object(publishing, "limit_of", lambda *_: None):
        yield


@defect(
    "P3, the count",
    "A batch that was refused shows nowhere but in the log of the owner's process.",
    test="tests/unit/inbox/test_inbox.py::test_what_nobody_has_opened_yet_has_no_limit",
)
def _refused_batches_are_not_counted() -> Iterator[None]:
    from kestrelpy._journal import file_names

    put_aside = intake.Ingest._refuse

    def silently(self: intake.Ingest, name: str, objection: str) -> None:
        put_aside(self, name, objection)
        self.refused = 0

    with patch.object(intake.Ingest, "_refuse", silently), patch.object(file_names, "refused_among", lambda *_: []):
        yield


def _as_a_relative_folder(place: str) -> str:
    return os.path.abspath(place)


@defect(
    "P1",
    "The sink writes the items of file:/dir into a folder called file: beside the driver's working folder.",
    test="tests/spark/test_sink.py::test_a_folder_may_be_written_as_spark_writes_it",
    unreachable=NEEDS_SPARK,
)
def _the_sink_knows_no_uri() -> Iterator[None]:
    from kestrelpy.spark.write import sink

    with patch.object(sink, "local_folder", _as_a_relative_folder):
        yield


@defect(
    "P2",
    "A table or a view of file:/dir, as Spark writes paths, cannot be read.",
    test="tests/spark/test_batch.py::test_a_folder_may_be_written_as_spark_writes_it",
    unreachable=NEEDS_SPARK,
)
def _the_source_knows_no_uri() -> Iterator[None]:
    from kestrelpy.spark.read import batch

    with patch.object(batch, "local_folder", _as_a_relative_folder):
        yield


@defect(
    "P4",
    "startingPosition is ignored for the first named reader of a queue.",
    test="tests/spark/test_stream.py::test_the_first_query_begins_where_it_is_told_to",
    unreachable=NEEDS_SPARK,
)
def _the_first_reader_inherits_whatever_is_said() -> Iterator[None]:
    from kestrelpy.spark.read import folder_feed

    with patch.object(folder_feed, "open_at", folder_feed.open_source):
        yield


@defect(
    "P5",
    "A wrong queue name in the sink is 'Writing job failed.', and no reason.",
    test="tests/spark/test_sink.py::test_a_name_is_checked_where_the_sink_is_made",
    unreachable=NEEDS_SPARK,
)
def _the_sink_checks_no_name() -> Iterator[None]:
    from kestrelpy.spark.write import sink

    with (
        patch.object(sink, "check_name", lambda name: name),
        patch.object(sink, "refuse_jobs_in", lambda *_: None),
    ):
        yield


@defect(
    "D2",
    "A task of the sink cannot write its part over a shared file system.",
    test="tests/spark/test_sink.py::test_tasks_may_write_over_a_network_and_the_driver_may_not",
    unreachable=NEEDS_SPARK,
)
def _parts_need_a_disk_of_their_own() -> Iterator[None]:
    from kestrelpy.inbox import parts

    inner = parts.open_inbox

    with patch.object(parts, "open_inbox", lambda path, disk, *, create: inner(path, None, create=create)):
        yield


@defect(
    "P6",
    "archive_to_parquet does not work through Spark Connect.",
    test="tests/spark/test_places.py::test_without_a_context_the_settings_are_asked",
    unreachable=NEEDS_SPARK,
)
def _a_session_has_a_context() -> Iterator[None]:
    from kestrelpy.spark import locations

    # The test asks by the name that it has imported: what it calls is changed, and not where it is found.
    asked = locations.slots.__code__
    locations.slots.__code__ = (lambda spark: int(spark.sparkContext.defaultParallelism)).__code__
    try:
        yield
    finally:
        locations.slots.__code__ = asked


@defect(
    "H12 in a scan",
    "A scan of a queue that is erased meanwhile ends as if that were all.",
    test="tests/unit/inspection/test_inspection.py::test_a_scan_of_what_is_erased_meanwhile_does_not_end_as_if_that_were_all",
)
def _a_queue_that_is_gone_was_retired() -> Iterator[None]:
    from kestrelpy._journal import catalog

    with patch.object(catalog.SegmentCatalog, "check_there", lambda self: None):
        yield


@defect(
    "H12 in a reader elsewhere",
    "A reader in another process passes over the items of a segment that is missing, in silence.",
    test="tests/unit/reading/test_detached_source.py::test_a_segment_that_is_not_there_is_told_and_not_passed_over",
    unreachable="the explorer deletes no segment by hand: that is the part of the damage tests of tests/fuzz",
)
def _what_is_not_there_was_retired() -> Iterator[None]:
    from kestrelpy._reading import detached_source

    with patch.object(detached_source.FollowingView, "last_id_without_hole", lambda self, item_id, last_id: last_id):
        yield
