"""Stores that somebody else has written: damages and forgeries of the objects of a small log, by a random generator.

``accident``: an object is not what was put there, and its checksums say so. ``forgery``: the checksums are made right,
or objects stand where others should.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple, TypeAlias, cast

from kestrelpy.ship import slots as codec
from kestrelpy.ship.manifest import LogState, manifest_key
from kestrelpy.testing.stores import MemoryStore
from tests.ship.logs import mutated, resealed_manifest, resealed_slot
from tests.ship.restores import grown, small_log
from tests.ship.shipped import QUEUE, Shipper

Objects: TypeAlias = dict[str, tuple[bytes, int]]
"""Data and date, by key."""
OTHER = "other"
"""Another queue of the store, whose items are none of the first one's."""
STEP_MS = 1000
HUGE = (0, 1, (1 << 32) - 1, (1 << 62) - 1, 1 << 62, (1 << 64) - 1)


class Log(NamedTuple):
    """A log, whole. ``items``: all that are in it, by id. ``others``: those of the other queue. ``state``: what it adds
    up to.
    """

    objects: Objects
    items: dict[int, bytes]
    others: dict[int, bytes]
    state: LogState


@functools.cache
def logs() -> list[Log]:
    """Logs of a queue: beside each one there is another queue in the store."""
    made, other = [], grown(77)
    strange = {key.replace(f"{QUEUE}/", f"{OTHER}/", 1): each for key, each in dated(other).items()}
    for shipper in (small_log(), *map(grown, (1, 4, 8, 9))):
        shipper.manifest()
        made.append(Log(dated(shipper) | strange, shipper.items, other.items, shipper.state))
    return made


def dated(shipper: Shipper) -> Objects:
    """The objects of a log with dates as if its slots had been written one after another, a second apart."""
    objects = cast("MemoryStore", shipper.store).contents()
    found: Objects = {}
    for key, (data, _) in objects.items():
        number = key.rpartition("/")[2]
        found[key] = data, STEP_MS * (int(number) if number.isdigit() else 0)
    return found


def store_of(objects: Objects) -> MemoryStore:
    store = MemoryStore()
    store.replace_all(objects)
    return store


# -- what may happen to it -------------------------------------------------------------------------------------------

Damage: TypeAlias = Callable[[Objects, Random], None]
ACCIDENTS: dict[str, Damage] = {}
FORGERIES: dict[str, Damage] = {}


def accident(change: Damage) -> Damage:
    return ACCIDENTS.setdefault(change.__name__, change)


def forgery(change: Damage) -> Damage:
    return FORGERIES.setdefault(change.__name__, change)


def some(objects: Objects, random: Random, kind: str = "", queue: str = QUEUE) -> str:
    """The key of one of a queue's objects."""
    return random.choice(sorted(key for key in objects if key.startswith(f"{queue}/{kind}")) or sorted(objects))


def put(objects: Objects, key: str, data: bytes) -> None:
    objects[key] = data, objects.get(key, (b"", 0))[1]


def resealed(key: str, data: bytes) -> bytes:
    """The checksums of a slot or a manifest made right."""
    if "/log/" in key and len(data) >= 164:
        return resealed_slot(data)
    return resealed_manifest(data) if "/manifest/" in key and len(data) >= 184 else data


@accident
def flip(objects: Objects, random: Random) -> None:
    key = some(objects, random)
    data = bytearray(objects[key][0] or b"\0")
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    put(objects, key, bytes(data))


@accident
def change(objects: Objects, random: Random) -> None:
    key = some(objects, random)
    put(objects, key, mutated(objects[key][0] or b"\0", random))


@accident
def cut(objects: Objects, random: Random) -> None:
    key = some(objects, random)
    data = objects[key][0]
    put(objects, key, data[: random.randrange(len(data) + 1)])


@accident
def grow(objects: Objects, random: Random) -> None:
    key = some(objects, random)
    put(objects, key, objects[key][0] + random.choice((b"\0", bytes(4096), objects[key][0])))


@accident
def foreign(objects: Objects, random: Random) -> None:
    """In the place of an object is one of another queue, or of another kind."""
    key = some(objects, random)
    kind = key.split("/")[1]
    other = some(objects, random, random.choice((kind, "")), random.choice((QUEUE, OTHER)))
    put(objects, key, objects[other][0])


@forgery
def remove(objects: Objects, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 5))):
        del objects[some(objects, random)]


@forgery
def forge(objects: Objects, random: Random) -> None:
    """Any bytes of a slot or a manifest, and then its checksums."""
    key = some(objects, random, random.choice(("log/", "manifest/")))
    put(objects, key, resealed(key, mutated(objects[key][0] or b"\0", random)))


@forgery
def claim(objects: Objects, random: Random) -> None:
    """A number of a header, or a count, that is far too large or too small, and then the checksums."""
    key = some(objects, random, random.choice(("log/", "manifest/")))
    data = bytearray(objects[key][0])
    begin = 24 if "/manifest/" in key else 0
    at, size = random.choice(((16, 8), (24, 8), (64, 8), (72, 4), (76, 4), (80, 8), (88, 4), (96, 8), (104, 8),
                              (112, 8), (120, 8), (128, 4), (132, 4), (136, 4), (160, 4), (164, 4), (168, 4),
                              (172, 4), (176, 4), (180, 4)))  # fmt: skip
    data[begin + at : begin + at + size] = random.choice(HUGE).to_bytes(8, "little")[:size]
    put(objects, key, resealed(key, bytes(data)))


@forgery
def rename(objects: Objects, random: Random) -> None:
    """Readers get names that are paths."""
    for key, (data, _) in list(objects.items()):
        if key.startswith((f"{QUEUE}/log/", f"{QUEUE}/manifest/")):
            for name in (b"audit", b"spark", b"reader-1"):
                data = data.replace(
                    name, random.choice((b"../../", b"/etc/x", b"a/../x"))[: len(name)].ljust(len(name), b"x")
                )
            put(objects, key, resealed(key, data))
    chained(objects)


@forgery
def rewrite(objects: Objects, random: Random) -> None:
    """A slot is changed, and all that follow name it: there is no manifest that knows better."""
    key = some(objects, random, "log/")
    put(objects, key, resealed(key, mutated(objects[key][0] or b"\0", random)))
    for each in [each for each in objects if each.startswith(f"{QUEUE}/manifest/")]:
        del objects[each]
    chained(objects)


def chained(objects: Objects) -> None:
    """Each slot names the one before."""
    before = bytes(4)
    for key in sorted(key for key in objects if key.startswith(f"{QUEUE}/log/")):
        data = objects[key][0]
        if len(data) >= 164:
            put(objects, key, resealed_slot(data[:72] + before + data[76:]))
            before = objects[key][0][-4:]


@forgery
def copy(objects: Objects, random: Random) -> None:
    """An object of the queue, or of the other one, stands under another number, and says so."""
    kind = random.choice(("log", "manifest"))
    key = some(objects, random, f"{kind}/", random.choice((QUEUE, OTHER)))
    there = some(objects, random, f"{kind}/").rpartition("/")[2]
    number = random.choice((0, 1, random.randrange(60), codec.MOST_SLOTS, *[int(there) if there.isdigit() else 2] * 4))
    data = bytearray(objects[key][0])
    begin = 24 if kind == "manifest" else 0
    if random.random() < 0.7:
        data[begin + 16 : begin + 24] = number.to_bytes(8, "little")
    to = f"{QUEUE}/{codec.slot_key(number) if kind == 'log' else manifest_key(number)}"
    put(objects, to, resealed(to, bytes(data)))


@forgery
def exchange(objects: Objects, random: Random) -> None:
    """The queue's log is the other one's, from some slot on, or but for ``queue.json``."""
    first = random.choice((1, 1, random.randrange(1, 40)))
    for key in [key for key in objects if key.startswith((f"{QUEUE}/log/", f"{QUEUE}/manifest/"))]:
        if not key[-1].isdigit() or int(key.rpartition("/")[2]) >= first:
            del objects[key]
    for key, each in list(objects.items()):
        queue, _, key = key.partition("/")
        if queue == OTHER and (key.startswith("seg/") or (key[-1:].isdigit() and int(key.rpartition("/")[2]) >= first)):
            objects[f"{QUEUE}/{key}"] = each


@forgery
def identity(objects: Objects, random: Random) -> None:
    key = f"{QUEUE}/queue.json"
    data = objects[key][0] if key in objects else b""
    said = json.loads(data) if data[-1:] == b"}" else {"format": 1, "queue": QUEUE, "queue_id": "0" * 32, "made_ms": 1}
    said[random.choice((*said, "kind", "new"))] = random.choice(
        (None, "", "../x", "work queue", 2, 1 << 70, [], "0" * 32, 1e300)
    )
    data = json.dumps(said).encode()
    put(objects, key, random.choice((data, b"[" * 4000, data.ljust(5000), b'{"format": 2}', b"{}", b"\xff")))


STRANGE = (
    "../../x", "/etc/passwd", "..", "", "log/../../x", "log/" + "9" * 16, "manifest/" + "9" * 16, "log/" + "0" * 16,
    "manifest/" + "0" * 16, "manifest/" + "1" * 15 + "\u0661", "reader/../0000000000001", "seg/x", "in/../x.part",
    "reader/spark/" + "9" * 13, "in/" + "9" * 13 + ".batch", "x" * (1 << 20), "log/\udcff", "log/1\n", "a/" * 2000,
)  # fmt: skip


@forgery
def keys(objects: Objects, random: Random) -> None:
    """Objects with keys that nobody has made here."""
    for _ in range(5):
        below = random.choice((f"{QUEUE}/", f"{QUEUE}/", "", "../", f"{OTHER}/"))
        objects[below + random.choice(STRANGE)] = random.randbytes(20), 0


@forgery
def dates(objects: Objects, random: Random) -> None:
    for key in list(objects):
        if random.random() < 0.3:
            objects[key] = objects[key][0], random.choice((0, -1, 1 << 62, STEP_MS * random.randrange(60)))
