"""URLs and options of stores: what is refused is refused before anything is asked, and no secret is shown."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

import obstore.store
import pytest

from kestrelpy.ship import BadStoreURL, open_store

SECRET = "s3cr3tThatMustNotBeSeen"
BAD = {
    f"s3://user:{SECRET}@bucket/prefix": "user part",
    f"s3://{SECRET}@bucket": "user part",
    f"abfss://container:{SECRET}@account.dfs.core.windows.net": "user part",
    f"s3://bucket/prefix?X-Amz-Signature={SECRET}": "query",
    f"s3://bucket/prefix#{SECRET}": "fragment",
    f"file:///folder?{SECRET}": "query",
    f"https://{SECRET}@account.blob.core.windows.net/c": "scheme",
    "s3://bucket/../other": "'..'",
    "file:///folder/..": "'..'",
    "s3:///prefix": "no bucket",
    "s3://": "no bucket",
    "s3://-bucket": "no bucket",
    "gs://buck et/p": "no bucket",
    "abfss://account.dfs.core.windows.net/p": "no bucket",
    "ftp://bucket": "scheme",
    "bucket": "scheme",
    "/folder": "scheme",
    "file:folder": "absolute",
    "file://folder": "absolute",
    "s3://[bucket": "no URL",
    "": "scheme",
}


@pytest.mark.parametrize("url", sorted(BAD))
def test_a_bad_url(url: str) -> None:
    with pytest.raises(BadStoreURL) as caught:
        open_store(url)
    assert BAD[url] in caught.value.reason
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.__dict__}"
    assert isinstance(caught.value, ValueError)


def test_what_is_shown_of_a_url_names_the_place() -> None:
    with pytest.raises(BadStoreURL, match=r"^s3://\*\*\*@bucket/prefix: "):
        open_store(f"s3://user:{SECRET}@bucket/prefix?{SECRET}")


@pytest.mark.parametrize(
    ("url", "options", "shown"),
    [
        ("s3://bucket/prefix/", {"region": "r"}, "s3://bucket/prefix"),
        ("gs://bucket", {}, "gs://bucket"),
        ("az://container/p", {"account_name": "a"}, "az://container/p"),
        ("abfss://container@account.dfs.core.windows.net/p", {}, "abfss://container@account.dfs.core.windows.net/p"),
        ("file:///folder/of/mine/", {}, "file:///folder/of/mine"),
        ("file://localhost/folder", {}, "file:///folder"),
    ],
)
def test_a_good_url(url: str, options: Mapping[str, Any], shown: str) -> None:
    store = open_store(url, options=options)
    assert store.describe() == shown
    assert shown.rpartition("://")[2].split("@")[-1] in repr(store)


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_option": SECRET},
        {"allow_http": SECRET},
        {"secret_access_key": [SECRET]},
        {"client_options": {"no_such_option": SECRET}},
        {"region": 5, "secret_access_key": SECRET},
    ],
)
def test_unknown_options_are_named_and_not_shown(options: dict[str, Any]) -> None:
    before = repr(options)
    with pytest.raises(BadStoreURL) as caught:
        open_store("s3://bucket", options=options)
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.__context__}"
    assert all(name in str(caught.value) for name in options)
    assert repr(options) == before


def test_a_folder_has_no_options() -> None:
    with pytest.raises(BadStoreURL, match="region"):
        open_store("file:///folder", options={"region": SECRET})


def test_options_go_with_a_url() -> None:
    with pytest.raises(BadStoreURL, match="'options'"):
        open_store(obstore.store.MemoryStore(), options={"region": "r"})


@pytest.mark.parametrize("store", [None, 5, object()])
def test_what_is_no_store(store: object) -> None:
    with pytest.raises(BadStoreURL, match="'store' must be"):
        open_store(store)


def test_without_the_extra_one_line_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("obstore"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadStoreURL, match=r"pip install 'kestrelpy\[ship\]'"):
        open_store("s3://bucket")
