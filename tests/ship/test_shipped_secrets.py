"""The store's credentials are in nothing that a shipped queue says, logs or writes, also if the store refuses them."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest

from kestrelpy import JournaledQueue
from kestrelpy.ship import Ship, ShipError, queues, restore, status, verify
from tests.support.budget import takes_long
from tests.support.patience import PATIENCE
from tests.support.seaweed import Seaweed


@takes_long
def test_no_secret_is_shown(tmp_path: Path, s3: Seaweed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "s3://kestrel/secrets"
    good = s3.options()
    wrong = s3.options(secret_access_key="wrongsecret" + s3.secret[:8])
    said: list[object] = []

    def attempt(call: object) -> None:
        try:
            said.append(call())  # type: ignore[operator]
        except ShipError as error:
            said.extend([str(error), repr(error), error.__dict__, "".join(traceback.format_exception(error))])

    ship = Ship(url, interval=0, options=good)
    with JournaledQueue(tmp_path / "here", "jobs", ship=ship) as queue:
        queue.put(b"1")
        assert queue.shipping is not None
        queue.shipping.flush(PATIENCE)
        said += [repr(ship), str(ship), repr(queue.shipping), queue.shipping.status(), queue, queue.stats()]
    for options in (good, wrong):
        for call in (
            lambda options=options: JournaledQueue(tmp_path / "here", "jobs", ship=Ship(url, options=options)).close(),
            lambda options=options: restore(url, "jobs", tmp_path / f"r-{len(said)}", options=options),
            lambda options=options: status(url, "jobs", options=options),
            lambda options=options: queues(url, options=options),
            lambda options=options: verify(url, "jobs", options=options),
            lambda options=options: Ship(url, options={**options, "acces_key": s3.access_key}).open(),
        ):
            attempt(call)
    attempt(lambda: JournaledQueue(tmp_path / "here", "jobs"))
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    logged = [record.getMessage() + str(record.exc_info) for record in caplog.records]
    text = repr(said) + "".join(map(str, said)) + "".join(logged) + files.decode("latin-1")
    assert "kestrel/secrets" in text
    for secret in (s3.access_key, s3.secret, "wrongsecret"):
        assert secret not in text
