"""Spark sessions for the tests: one a worker, quiet and small; and clusters of real executor processes.

Rules:
1. All tests of a worker of pytest share one session, that of the fixture ``spark``: a session costs ten seconds of a
   processor, and the first query of each kind some more. What needs a session or a process of its own is marked
   ``slow_spark``.
2. Where no session is needed, none is asked for: readers, sinks and parts are called as Spark calls them.
3. Nothing here is quick on a machine that has other work: what must happen is waited for with ``SPARK_PATIENCE``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kestrelpy.spark import JavaMissing, local_session
from kestrelpy.spark.session import check_java
from tests.support.budget import BRIEF_JAVA, LONG, SLOW_SPARK

SPARK_PATIENCE = 240.0
"""As ``PATIENCE``, where Spark is what is waited for; less than what faulthandler allows a test."""
QUIET = {
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": BRIEF_JAVA,
}


def slow_spark(test: Any) -> Any:
    """Give a test the marks of ``SLOW_SPARK``."""
    for mark in SLOW_SPARK:
        test = mark(test)
    return test


long_spark = pytest.mark.skipif(not LONG, reason="takes minutes: KESTRELPY_SHARE=10 runs it")
"""For a test that CI has no time for."""


def need_java() -> None:
    """Without Java the tests on Spark are left out and say so; where ``CI`` is set they fail."""
    try:
        check_java()
    except JavaMissing as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The session of this test worker, on ``local[2]``."""
    need_java()
    session = local_session(master="local[2]", **QUIET)
    yield session
    session.stop()


@contextmanager
def cluster(python: str = sys.executable, **conf: object) -> Iterator[Any]:
    """A session on ``local-cluster[2,1,1024]``: two executor processes of their own. For a process that has no other
    session: tests run it in a child. ``python``: what runs Python there, and where reads are planned.
    """
    import pyspark

    os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)
    os.environ["PYSPARK_PYTHON"] = python
    settings = {**QUIET, "spark.pyspark.python": python, **conf}
    session = local_session(master="local-cluster[2,1,1024]", **settings)
    try:
        yield session
    finally:
        session.stop()
