"""The hooks of readers: what the model learns from them, and what they do (``World.act``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kestrelpy import Item
from tests.use.use_model import Put, ReaderModel

if TYPE_CHECKING:
    from tests.use.use_world import Process, World


class Hooks:
    """Makes the hooks of one world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def make(self, name: str, process: Process) -> Callable[..., Any]:
        how = getattr(self, name)
        return lambda *arguments: how(process, *arguments)

    def _enter(self, item: Item, name: str) -> tuple[ReaderModel, Put] | None:
        w = self.world
        reader = w.handles.get(id(item._owner))
        if reader is None:
            return None
        put = reader.queue.see(item.id, item.data)
        if put in reader.in_hook:
            raise w.fail(f"{name} of {reader.full_name} is called for item {item.id}, which a hook has already")
        if put in reader.done and put not in reader.optional:
            raise w.fail(f"{name} of {reader.full_name} is called for item {item.id}, which is done")
        return reader, put

    def on_expired(self, process: Process, item: Item) -> None:
        w = self.world
        entered = self._enter(item, "on_expired")
        if entered is None:
            return
        reader, put = entered
        again = put in reader.settling  # it has failed on it before, and the clock may have gone back since
        again = again or reader.queue.may_refuse  # then it is not known when a batch was taken in
        again = again or (reader.former is not None and reader.is_expired(put, w.now_ms, reader.former))
        w.require(
            again or reader.is_expired(put, w.now_ms), f"on_expired is shown item {item.id}, which has not expired"
        )
        moves = reader.moves
        reader.settling.add(put)
        reader.in_hook.add(put)
        try:
            w.act(process, "on_expired")
        finally:
            reader.in_hook.discard(put)
        if moves == reader.moves and not w.nested:
            reader.finish(put)
        else:
            reader.settling.discard(put)
            reader.doubt([put])

    def on_abort(self, process: Process, item: Item) -> bool:
        w = self.world
        entered = self._enter(item, "on_abort")
        if entered is None:
            return False
        reader, put = entered
        moves = reader.moves
        reader.open.pop(put, None)
        reader.settling.add(put)
        reader.in_hook.add(put)
        try:
            w.act(process, "on_abort")
            takes = w.rng.random() < 0.3
        finally:
            reader.in_hook.discard(put)
            reader.settling.discard(put)
        if moves != reader.moves:
            reader.doubt([put])
        elif takes:
            w.graves.taken(reader, put)
            reader.finish(put)
        return takes

    def on_delivery(self, process: Process, reader: Any, seconds: float) -> None:
        self.world.require(reader.full_name and seconds == seconds, "on_delivery is told nonsense")
        self.world.act(process, "on_delivery")

    def on_timeout(self, process: Process, reader: Any, seconds: float) -> None:
        self.world.require(reader.full_name and seconds >= 0, "on_timeout is told nonsense")
        self.world.act(process, "on_timeout")
