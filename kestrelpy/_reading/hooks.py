"""``Hooks``: calls a reader's hooks, and commits or requeues the items that it shows to them.

Rules:
1. Hooks run with no lock held. A hook that raises is logged and counted, and its item stays where it was.
2. An item is with one hook at a time, and with one call of it. ``on_expired`` never calls itself.

NOTE ON LOCKING: ``backlog.lock`` (R in docs/locking.md) guards ``failed``. Nothing here is called with it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from kestrelpy import _logging
from kestrelpy._reading.backlog import Backlog
from kestrelpy.item import Item

_RAISED: list[None] = []
"""Stands for the result of a hook that raised."""
_callers: set[int] = set()
"""The threads that run a hook."""
_in_hook: dict[tuple[int, Hooks], list[Item]] = {}
"""By thread and reader: expired items whose hook runs, or runs next. A global, as few readers have such a hook."""


def in_hook() -> bool:
    """True if this thread runs a hook of a reader. There a put waits for room only if it was told how long: the item
    that the hook has may be what takes up the room.
    """
    return bool(_callers) and threading.get_ident() in _callers


class _Caller(Protocol):
    """The owner of the hooks: a ``Dispatcher``."""

    backlog: Backlog

    def recover(self, error: BaseException, item_ids: Iterable[int] = (), expired: Iterable[Item] = ()) -> None: ...

    def notify(self) -> None: ...


class Hooks:
    """The hooks of one reader. ``errors``: how many calls have raised."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller
        self._backlog = caller.backlog
        self.errors = 0
        self.failed: dict[int, Item] = {}
        """Expired items whose hook raised. They are in the backlog's ``with_hook``, too."""

    def call(self, hook: Callable[..., object], *arguments: object) -> object:
        """Call the hook. Returns its result; ``_RAISED``, which is false, if it raised."""
        thread = threading.get_ident()
        is_first = thread not in _callers
        try:
            _callers.add(thread)
            return hook(*arguments)
        except (Exception, SystemExit):
            self.errors += 1
            _logging.exception("a hook of reader %s raised", self._backlog.full_name)
            return _RAISED
        finally:
            if is_first:
                _callers.discard(thread)

    def show_expired(self, item: Item) -> None:
        """Show an expired item to its hook, once. If the hook itself finds an expired item, by a get for example, that
        item is shown after the hook has returned: the hook never calls itself.
        """
        key = (threading.get_ident(), self)
        following = _in_hook.get(key)
        if following is not None:
            following.append(item)
            return
        items = _in_hook[key] = [item]
        try:
            while True:  # and no condition: docs/interrupts.md, rule 3
                if not items:
                    break
                self._show(items[0])
                del items[0]
        except BaseException as error:
            self._caller.recover(error, (), items)
            raise
        finally:
            _in_hook.pop(key, None)

    def _show(self, item: Item) -> None:
        backlog = self._backlog
        hook = backlog.config.on_expired  # None: the reader was renamed and configured again meanwhile
        if hook is None or self.call(hook, item) is not _RAISED:
            self.release(item)
            return
        with backlog.lock:  # the item stays here, undelivered and not done
            if backlog.with_hook.get(item.id) is item:
                self.failed[item.id] = item

    def try_failed_again(self) -> None:
        """Show the items again for which the hook raised, each by one thread. Nobody is notified if the hook took
        nothing: two producers without room would wake each other.
        """
        backlog = self._backlog
        for _ in range(len(self.failed)):
            item = None
            try:
                with backlog.lock:
                    item_id, item = next(iter(self.failed.items()), (0, None))
                    if item is not None:
                        del self.failed[item_id]
                if item is not None and backlog.with_hook.get(item.id) is item:  # else the reader was moved
                    self.show_expired(item)
                    if not backlog.may_skip_notify and backlog.with_hook.get(item.id) is not item:
                        self._caller.notify()
            except BaseException as error:
                self._caller.recover(error, (), [] if item is None else [item])
                raise

    def show_aborted(self, item: Item) -> bool:
        """Show an aborted item to its hook. If the hook takes it, it is done, and this returns true."""
        hook = self._backlog.config.on_abort
        if hook is None or not self.call(hook, item):
            return False
        self.release(item)
        return True

    def release(self, item: Item) -> None:
        """Mark an item of ``with_hook`` as done, unless the reader was closed or moved meanwhile."""
        backlog = self._backlog
        try:
            with backlog.lock:
                if backlog.with_hook.get(item.id) is item:
                    backlog.release(item.id, item.data)
                    del backlog.with_hook[item.id]
        except BaseException as error:
            self._caller.recover(error, (), [item])
            raise
