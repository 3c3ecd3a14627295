"""The query: ``python -m kestrelpy.demo.pipeline.query FOLDER``. A Spark driver that reads lines as they are put.

Each batch overwrites its own folder of Parquet, and publishes its alerts under its batch number. So a batch that comes
again after a kill changes nothing. Exactly-once delivery needs only this, and a source that gives the same rows for the
same batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from kestrelpy.demo.pipeline._plan import ALERTS, LINES, READER, SIGNS, WORD, PipelineRun
from kestrelpy.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ITEM = "file string, line int, text string"


def run(plan: PipelineRun) -> None:
    """Run the query until the producer has put all lines and the query has read them."""
    spark = local_session(
        **{"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": False, "spark.sql.shuffle.partitions": 2}
    )
    from pyspark.sql import functions as f

    def batch(rows: DataFrame, number: int) -> None:
        (plan.root / "batch").write_text(str(number), encoding="ascii")
        parsed = rows.select("id", "added", f.from_json(rows.data.cast("string"), ITEM).alias("item"))
        lines = parsed.select("id", "added", "item.*").persist()
        per_minute = lines.groupBy(f.date_trunc("minute", lines.added).alias("minute"), "file").agg(
            f.count("*").alias("lines"), f.sum(f.regexp_count(lines.text, f.lit(WORD))).alias("words")
        )
        per_minute.coalesce(1).write.mode("overwrite").parquet(f"{plan.words}/batch={number}")
        worth = f.lit(False)
        for sign in SIGNS:
            worth = worth | lines.text.contains(sign)
        alerts = lines.where(worth).select(f.to_json(f.struct("id", "file", "line", "text")).alias("data"))
        target = alerts.coalesce(1).write.format("kestrel").mode("append").option("queue", ALERTS)
        if plan.store:
            target = target.option("txnWait", 60)  # the consumer ends when nothing is left
        target.option("txnAppId", "pipeline").option("txnVersion", number).save(plan.seen_by_spark)
        lines.unpersist()

    source = spark.readStream.format("kestrel").option("queue", LINES).option("reader", READER)
    rows = source.option("maxItemsPerTrigger", plan.max_items).load(plan.seen_by_spark)
    query = (
        rows.writeStream.foreachBatch(batch)
        .option("checkpointLocation", f"{plan.folder}/query")
        .trigger(processingTime="500 milliseconds")
        .start()
    )
    while query.isActive:
        progress = query.lastProgress
        read = progress["sources"][0]["endOffset"] if progress else None
        if read and (plan.root / "put.done").exists() and _id(read) >= plan.lines:
            break
        time.sleep(0.2)
    query.stop()
    if query.exception() is not None:
        raise SystemExit(str(query.exception()))
    (plan.root / "read.done").touch()
    spark.stop()


def _id(offset: object) -> int:
    """The id in an offset, which Spark gives as JSON text."""
    return int((json.loads(offset) if isinstance(offset, str) else offset)["id"])  # type: ignore[index]


if __name__ == "__main__":
    run(PipelineRun.load(sys.argv[1]))
