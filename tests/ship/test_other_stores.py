"""Second opinions: servers that others have written for their tests. Two are good enough, and one is found too weak.

gcp-storage-emulator, which ignores conditions too, is not here: it answers without an ETag, and obstore takes each of
its answers for an error.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

from kestrelpy.ship import Store, StoreTooWeak, StoreUnavailable, check, open_store
from kestrelpy.ship.checking import probe
from kestrelpy.testing.stores import check_store
from tests.support import npm
from tests.support.patience import until
from tests.support.seaweed import LOOPBACK, free_ports

BUCKET = "kestrel"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azure's emulators; it is in their documentation."""
HTTP = {"client_options": {"allow_http": True}}


def opened(url: str, **options: Any) -> Store:
    return open_store(f"{url}/place", options={**HTTP, **options})


@pytest.fixture(scope="module")
def moto() -> Iterator[Store]:
    server = pytest.importorskip("moto.server", reason="moto is not installed: the extra [dev] has it")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address=LOOPBACK, port=0, verbose=False)
    running.start()
    try:
        _, port = running.get_host_and_port()
        endpoint = f"http://{LOOPBACK}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        yield opened(f"s3://{BUCKET}", endpoint=endpoint, region="us-east-1", access_key_id="a", secret_access_key="s")
    finally:
        running.stop()


@pytest.fixture(scope="module")
def azurite() -> Iterator[Store]:
    if why := npm.missing(npm.AZURITE):
        pytest.skip(why)
    (port,) = free_ports(1)
    about = ("--location", "FOLDER", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    with npm.running(npm.AZURITE, "--blobHost", LOOPBACK, "--blobPort", str(port), *about):
        endpoint = f"http://{LOOPBACK}:{port}/{ACCOUNT}"
        until(lambda: makes_container(endpoint))
        yield opened(f"az://{BUCKET}", endpoint=endpoint, account_name=ACCOUNT, account_key=KEY)


def makes_container(endpoint: str) -> bool:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join(["PUT", *[""] * 11, *named, f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def s3rver() -> Iterator[Store]:
    if why := npm.missing(npm.S3RVER):
        pytest.skip(why)
    (port,) = free_ports(1)
    about = ("-a", LOOPBACK, "-p", str(port), "-d", "FOLDER", "--configure-bucket", BUCKET)
    with npm.running(npm.S3RVER, *about):
        store = opened(
            f"s3://{BUCKET}",
            endpoint=f"http://{LOOPBACK}:{port}",
            region="us-east-1",
            access_key_id="S3RVER",
            secret_access_key="S3RVER",
        )
        until(lambda: is_up(store))
        yield store


def is_up(store: Store) -> bool:
    try:
        store.create("started", b"")
    except StoreUnavailable:
        return False
    return True


@pytest.mark.parametrize("server", ["moto", "azurite"])
def test_a_second_opinion(server: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue(server)
    probe(store, "jobs/")
    check_store(lambda: store, races=10)
    assert store.list("") == []


def test_a_server_that_ignores_conditions_is_too_weak(s3rver: Store) -> None:
    with pytest.raises(StoreTooWeak, match="does not refuse"):
        probe(s3rver, "jobs/")
    report = check(s3rver, races=3)
    assert not report.ok
    assert "a second create is refused" in {each.name for each in report.results if not each.ok}
