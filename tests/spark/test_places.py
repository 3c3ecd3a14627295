"""Folders as Spark names them, and sessions that have no ``SparkContext``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkAttributeError

from kestrelpy.spark.lake.store import FileStore
from kestrelpy.spark.locations import local_folder, slots
from kestrelpy.spark.report.load_report import _place


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b:c", "/a/b:c"),
        ("file:/a b/", "/a b"),
        ("file:///a%20b", "/a%20b"),
        ("FILE:/a", "/a"),
        (Path("/a"), "/a"),
        ("a/b:c", f"{os.getcwd()}/a/b:c"),
    ],
)
def test_a_path_and_its_uri_are_one_folder(place: str, path: str) -> None:
    assert local_folder(place) == path


@pytest.mark.parametrize("place", ["s3://a/b", "hdfs:/a", "file://host/a", "file:a", "file:", "dbfs:/a"])
def test_another_place_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=r"is not a folder of this machine|is no folder: after file:"):
        local_folder(place)


def test_a_lake_goes_where_the_uri_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    FileStore(f"file:{tmp_path}/lake").put("a", b"1")
    assert (tmp_path / "lake" / "a").read_bytes() == b"1"
    assert list((tmp_path / "cwd").iterdir()) == []
    assert _place(f"file:{tmp_path}/lake", "x") == f"file://{tmp_path}/lake/x"


class Connected:
    """A session through Spark Connect, as far as it is asked."""

    def __init__(self, **settings: str) -> None:
        self.conf = {name.replace("_", "."): value for name, value in settings.items()}

    @property
    def sparkContext(self) -> Any:  # noqa: N802 - Spark's name
        raise PySparkAttributeError(
            errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": "sparkContext"}
        )


def test_without_a_context_the_settings_are_asked() -> None:
    assert slots(Connected(spark_default_parallelism="3")) == 3  # type: ignore[arg-type]
    assert slots(Connected(spark_default_parallelism="x")) == (os.cpu_count() or 2)  # type: ignore[arg-type]
    assert slots(Connected()) == (os.cpu_count() or 2)  # type: ignore[arg-type]
