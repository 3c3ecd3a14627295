"""Defects that users could meet and that are fixed, each put back by one switch: the proof that the use explorer sees.

Each ``planted_*.py`` of this folder registers the defects of one area with ``defect``. What it patches is the smallest
piece of the library that brings the symptom back. ``test`` names the test that was written for the fix and fails with
the defect planted; it is the answer for those that the explorer can't find by design, which say so in ``unreachable``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """``name``: of the list of defects ("C1"). ``symptom``: what a user sees. ``test``: "file::test" from the root.
    ``unreachable``: why the explorer can't find it, if it can't.
    """

    name: str
    symptom: str
    test: str
    plant: Callable[[], AbstractContextManager[None]]
    unreachable: str = ""


DEFECTS: dict[str, Defect] = {}


def defect(
    name: str, symptom: str, *, test: str, unreachable: str = ""
) -> Callable[[Callable[[], Iterator[None]]], None]:
    """Register a generator function that patches on entering and restores on leaving, as for ``contextmanager``."""

    def note(function: Callable[[], Iterator[None]]) -> None:
        if name in DEFECTS:
            raise ValueError(f"{name} is planted twice")
        DEFECTS[name] = Defect(name, symptom, test, contextmanager(function), unreachable)

    return note
