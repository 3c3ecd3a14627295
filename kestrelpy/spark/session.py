"""Spark sessions: a local session that works out of the box, and the registration of kestrelpy in any session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from kestrelpy.errors import KestrelError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA = "Spark needs Java 17 or 21: install openjdk-17-jre-headless (Debian, Ubuntu), or set JAVA_HOME"


class JavaMissing(KestrelError):
    """There is no Java that Spark could run on."""


def register(spark: SparkSession) -> None:
    """Make the format ``"kestrel"`` known to a session, and let Spark push filters down to it.

    Executors import kestrelpy by its name, so it must be installed where they run.
    """
    from kestrelpy.spark.source import KestrelSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(KestrelSource)


def local_session(**conf: object) -> SparkSession:
    """A session on this machine, with the format ``"kestrel"`` registered; the existing session if there is one.

    ``conf``: settings. A keyword is the setting's name without the leading ``spark.`` and with underscores for dots. A
    dictionary can have full names: ``local_session(master="local[2]", **{"spark.sql.shuffle.partitions": 4})``. Python
    workers run this interpreter. Raises ``JavaMissing``.
    """
    check_java()
    # The setting alone does not reach the workers that plan. They run the interpreter that this variable names when the
    # SparkContext is made.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    settings = {
        "spark.master": "local[*]",
        "spark.app.name": "kestrelpy",
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
    }
    for name, value in conf.items():
        full = name if name.startswith("spark.") else f"spark.{name.replace('_', '.')}"
        settings[full] = str(value).lower() if isinstance(value, bool) else str(value)
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def check_java() -> None:
    """Raise ``JavaMissing`` if Spark could not start here. Its message is one line that says what to install."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        raise JavaMissing(_JAVA)
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    if not any(f'version "{major}' in answer.stderr + answer.stdout for major in (17, 21)):
        raise JavaMissing(f"{_JAVA}; {java} is another version")
