"""The package: importing it loads nothing that it does not need yet, and each name is there when it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

import kestrelpy.outbox

NOT_NEEDED = ["asyncio", "json", "kestrelpy.work", "logging", "opentelemetry", "psycopg", "sqlalchemy", "tenacity"]


def test_importing_loads_no_other_package(script: Any) -> None:
    told = script(
        f"""
        import sys
        before = set(sys.modules)
        import kestrelpy.outbox
        print(*sorted(set({NOT_NEEDED}) & (set(sys.modules) - before)))
        """
    )
    assert told == ""


def test_all_names_at_once(script: Any) -> None:
    told = script(
        """
        import kestrelpy.outbox
        from kestrelpy.outbox import *
        assert set(kestrelpy.outbox.__all__) <= set(dir(kestrelpy.outbox))
        print(*set(kestrelpy.outbox.__all__) - set(globals()))
        """
    )
    assert told == ""


def test_names_of_other_packages_are_theirs() -> None:
    import kestrelpy.work

    assert kestrelpy.outbox.InvalidName is kestrelpy.InvalidName
    assert kestrelpy.outbox.JobTooBig is kestrelpy.work.JobTooBig


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"'kestrelpy\.outbox' has no attribute 'Inbox'"):
        kestrelpy.outbox.Inbox  # type: ignore[attr-defined]  # noqa: B018


def test_where_sqlalchemy_is_missing_one_line_names_the_extra(script: Any) -> None:
    told = script(
        """
        import sys
        sys.modules["sqlalchemy"] = None
        from kestrelpy.outbox import MissingPackage, Outbox
        from kestrelpy.outbox.testing import virtual
        for use in (lambda: Outbox("sqlite://"), lambda: Outbox().metadata, virtual(Outbox()).__enter__):
            try:
                use()
            except MissingPackage as missing:
                print(missing)
        """
    )
    assert told == "\n".join(["sqlalchemy is not installed: pip install kestrelpy[outbox]"] * 3)
