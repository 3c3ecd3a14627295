"""The names that a power cut may leave. ``_power.py`` says which are legal when, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kestrelpy.testing._choices import Choose
from kestrelpy.testing._history import CrashingFolder, CrashingNode, NameChange, put_name


@dataclass(slots=True)
class _Unit:
    """Changes of names that are kept or lost together."""

    order: int
    makes: str | None = None
    """The path of the folder that this unit makes, if it makes one."""
    changes: list[tuple[str, NameChange]] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Earlier units that must be on disk if this unit is."""


class NameStates:
    """The sets of names that a power cut may leave."""

    def __init__(self, folders: Mapping[str, CrashingFolder], settled: set[int]) -> None:
        self._durable = {path: dict(folder.durable) for path, folder in folders.items()}
        self._new = {path for path, folder in folders.items() if folder.made}
        self._settled = set(settled)
        self._whole: dict[int, _Unit] = {}
        halves: dict[tuple[int, str], _Unit] = {}
        for path, folder in folders.items():
            if folder.made:
                self._whole[folder.made] = halves[folder.made, path] = _Unit(folder.made, makes=path)
            for change in folder.changes:
                key = (change.order, path)
                self._whole.setdefault(change.order, _Unit(change.order)).changes.append((path, change))
                halves.setdefault(key, _Unit(change.order)).changes.append((path, change))
        self._halves = sorted(halves.values(), key=_adding_first)
        self._find_needs()

    def _find_needs(self) -> None:
        """Fill ``needs``. A change needs the last change of its name. In a move, the removal needs the addition."""
        last: dict[tuple[str, str], int] = {}
        for at, unit in enumerate(self._halves):
            if at and self._halves[at - 1].order == unit.order:
                unit.needs.add(at - 1)
            for path, change in unit.changes:
                if (path, change.name) in last:
                    unit.needs.add(last[path, change.name])
                last[path, change.name] = at
            unit.needs.discard(at)

    def orders(self) -> set[int]:
        return set(self._whole)

    def prefix(self, last: int) -> dict[str, dict[str, CrashingNode]]:
        """The names that the operations up to ``last`` left. A move with one durable half is there as a whole."""
        return self._after(
            self._whole[order] for order in sorted(self._whole) if order <= last or order in self._settled
        )

    def ext4(self, choose: Choose) -> dict[str, dict[str, CrashingNode]]:
        orders = sorted(self._whole)
        count = choose.randrange(len(orders) + 1) if orders else 0
        return self.prefix(orders[count - 1] if count else 0)

    def any(self, choose: Choose) -> dict[str, dict[str, CrashingNode]]:
        kept: set[int] = set()
        for at, unit in enumerate(self._halves):
            if unit.needs <= kept and choose.randrange(2):
                kept.add(at)
        return self._after(self._halves[at] for at in sorted(kept))

    def _after(self, units: Iterable[_Unit]) -> dict[str, dict[str, CrashingNode]]:
        folders = {path: names for path, names in self._durable.items() if path not in self._new}
        changed: set[str] = set()
        for unit in units:
            if unit.makes is not None:
                folders[unit.makes] = self._durable[unit.makes]
            for path, change in unit.changes:
                if path not in folders:
                    continue  # its folder is not there
                if path not in changed:
                    folders[path] = folders[path].copy()
                    changed.add(path)
                put_name(folders[path], change)
        return folders


def _adding_first(unit: _Unit) -> tuple[int, bool]:
    return unit.order, all(change.node is None for _, change in unit.changes)
