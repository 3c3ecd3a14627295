"""A second reader of slots and manifests, written from ``docs/format.md`` alone: ``struct`` and ``zlib``, slow, clear.

It shares no line with the library, so where the two agree, the page, the library and this file say the same.

1. ``read_slot`` and ``read_manifest`` tell what is in an object, as a dictionary with the page's names. They raise
   ``Bad`` for anything that the page does not allow.
2. ``add_up`` goes through a log from slot 1 and says what its manifest is. It raises ``Bad`` at a slot that may not
   follow the one before.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

LARGEST = (1 << 62) - 1
MOST = 64 * 1024 * 1024
FENCE, DATA, SEAL, CLOSE = 1, 2, 3, 4
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"


class Bad(Exception):
    """The bytes are not what the page says."""


def need(is_so: bool, what: str) -> None:
    if not is_so:
        raise Bad(what)


class Bytes:
    """Bytes that are taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        need(self.at + size <= len(self.data), "too short")
        self.at += size
        return self.data[self.at - size : self.at]

    def u(self, bits: int) -> int:
        return int.from_bytes(self.take(bits // 8), "little")

    def number(self) -> int:
        value = self.u(64)
        need(value <= LARGEST, "too large")
        return value

    def end(self) -> None:
        need(self.at == len(self.data), "bytes are left")

    @property
    def left(self) -> int:
        return len(self.data) - self.at


# -- what the page says elsewhere ------------------------------------------------------------------------------------


def segment_header(data: bytes) -> dict[str, Any] | None:
    """The header of a segment; ``None`` if it is damaged."""
    try:
        need(len(data) == 96 and zlib.crc32(data[:92]) == int.from_bytes(data[92:], "little"), "crc")
        b = Bytes(data)
        need((b.take(8), b.u(16), b.u(16)) == (b"KSTRLSEG", 1, 96), "magic")
        found: dict[str, Any] = {"marker": b.u(32), "queue_id": b.take(16)}
        for name in ("number", "first_id", "base_items", "base_bytes"):
            found[name] = b.number()
        for name in ("previous_number", "previous_last_id", "previous_end"):
            found[name] = b.number()
        need(found["marker"] != 0 and found["first_id"] > found["previous_last_id"], "ids")
    except Bad:
        return None
    return found


def segment_footer(data: bytes) -> dict[str, Any]:
    crc, length, last_id, _, kind, _, marker = struct.unpack("<IIQ6sHII", data[:32])
    need(crc == zlib.crc32(data[4:]) and length == 64 and kind == 8 and marker != 0, "no footer")
    b = Bytes(data[32:])
    first_id, items, data_bytes = b.u(64), b.u(64), b.u(64)
    b.take(16)
    records_end, number = b.u(64), b.u(64)
    need(b.take(8) == b"KSTRLEND" and items == last_id + 1 - first_id, "footer")
    need(max(first_id, last_id, records_end, number) <= LARGEST and 96 <= records_end >= data_bytes, "footer")
    return {"marker": marker, "first_id": first_id, "last_id": last_id, "records_end": records_end, "number": number}


def legal(name: bytes) -> str:
    need(all(chr(each) in LETTERS for each in name) and len(name) <= 100 and name[:1] != b"-", "name")
    return name.decode("ascii")


def checkpoint(body: bytes, queue_id: bytes) -> dict[str, Any]:
    b = Bytes(body)
    found: dict[str, Any] = {"queue_id": b.take(16), "head": b.number(), "watermark": b.number()}
    found["released_items"], found["released_bytes"] = b.number(), b.number()
    found["hint"] = (b.u(64), b.u(64), b.u(64))
    found["durable_head"], found["flags"] = b.u(64), b.u(16)
    name_bytes, spans, errors = b.u(16), b.u(32), b.u(32)
    need(b.left == name_bytes + 16 * spans + 12 * errors, "the parts do not fill the body")
    found["name"] = legal(b.take(name_bytes))
    found["spans"] = [(b.number(), b.number()) for _ in range(spans)]
    every = [(b.u(64), b.u(32)) for _ in range(errors)]
    found["errors"] = [each for each in every if each[0]]  # id 0: what the reader was moved past
    floor = found["head"]
    for first, last in found["spans"]:
        need(floor < first <= last, "spans")
        floor = last
    found["highest"] = floor
    need(found["flags"] in (0, 2) and found["queue_id"] in (queue_id, bytes(16)), "flags, queue")
    return found


def ledger_record(body: bytes) -> None:
    b = Bytes(body)
    kind = b.u(8)
    need(kind in (1, 2, 3), "kind of record")
    if kind == 2:
        b.take(32)
        b.number()
        need(b.number() > 0, "first_id")
        for _ in range(3):
            b.number()
    elif kind == 3:
        b.take(16)
        b.number()
        b.number()
    else:
        b.number()
    try:
        b.take(b.left).decode()
    except UnicodeDecodeError:
        raise Bad("app_id") from None


# -- the parts of a slot ---------------------------------------------------------------------------------------------


def ledger(data: bytes) -> dict[str, Any] | None:
    if not data:
        return None
    b = Bytes(data)
    found = {"taken": b.number(), "records": data[8:]}
    while b.left:
        crc, length = b.u(32), b.u(32)
        body = b.take(length)
        need(crc == zlib.crc32(body, length), "crc of a record")
        ledger_record(body)
    return found


def checkpoints(data: bytes, queue_id: bytes) -> list[dict[str, Any]]:
    b, found = Bytes(data), []
    while b.left:
        kind, body = b.u(8), b.take(b.u(32))
        need(kind in (0, 1), "kind of checkpoint")
        found.append(checkpoint(body, queue_id) if kind == 0 else {"dropped": legal(body)})
    return found


def segment(b: Bytes) -> dict[str, Any]:
    key = b.take(b.u(16))
    found: dict[str, Any] = {"file_bytes": b.number(), "crc": b.u(32)}
    header, footer = b.take(96), b.take(96)
    found |= {"header_bytes": header, "footer_bytes": footer}
    found |= {"header": segment_header(header), "footer": segment_footer(footer)}
    need(key[:4] == b"seg/" and key[-8:] == b".segment", "key")
    fields = key[4:-8].split(b"-")
    need(len(fields) == 3, "key")
    number, epoch, nonce = fields
    need(number.isdigit() and epoch.isdigit() and epoch[:1] != b"0" and int(epoch) <= LARGEST, "key")
    need(len(number) == 13 or (13 < len(number) <= 19 and number[:1] != b"0"), "key")
    need(len(nonce) == 8 and all(each in b"0123456789abcdef" for each in nonce), "key")
    need(0 < int(number) == found["footer"]["number"] and found["footer"]["first_id"] > 0, "number")
    need(found["footer"]["records_end"] + 96 <= found["file_bytes"], "size")
    for name in ("number", "marker", "first_id"):
        need(found["header"] is None or found["header"][name] == found["footer"][name], f"another {name}")
    return found | {"key": key.decode("ascii")}


def slot_header(data: bytes) -> dict[str, Any]:
    need(len(data) == 160 and zlib.crc32(data[:156]) == int.from_bytes(data[156:], "little"), "crc of the header")
    b = Bytes(data)
    need((b.take(8), b.u(16)) == (b"KSTRLSLT", 1), "magic, version")
    found: dict[str, Any] = {"kind": b.u(16)}
    need(b.u(32) == 160 and found["kind"] in (FENCE, DATA, SEAL, CLOSE), "kind")
    found |= {"slot": b.number(), "epoch": b.number(), "nonce": b.take(16), "queue_id": b.take(16)}
    found |= {"written_ms": b.u(64), "crc_before": b.u(32), "lease_ms": b.u(32)}
    found |= {"number": b.number(), "marker": b.u(32), "segment_crc": b.u(32), "offset": b.number()}
    found |= {"length": b.number(), "first_id": b.number(), "last_id": b.number()}
    found |= {"checkpoints": b.u(32), "ledger": b.u(32), "note": b.u(32)}
    need(b.take(16) == bytes(16), "unused bytes")
    found["end"] = found["offset"] + found["length"]
    found["size"] = 164 + sum(found[name] for name in ("length", "checkpoints", "ledger", "note"))
    need(found["size"] <= MOST and found["end"] <= LARGEST, "size")
    check_header(found)
    return found


def check_header(found: dict[str, Any]) -> None:
    kind, first_id, last_id = found["kind"], found["first_id"], found["last_id"]
    need(1 <= found["slot"] < 10**16 and found["epoch"] >= 1 and first_id >= 1, "numbers from 1 on")
    if found["number"] == 0:
        need(found["marker"] == found["segment_crc"] == found["end"] == 0, "a place in no segment")
    else:
        need(found["marker"] != 0 and found["end"] >= 96, "inside the header")
    if kind == DATA and found["length"]:
        need(found["number"] != 0, "bytes of no segment")
        need(found["offset"] >= 96 or found["offset"] == 0, "inside the header")
        need(first_id <= last_id + (found["offset"] == 0), "ids")
    elif kind in (DATA, CLOSE):
        need(found["length"] == 0 and first_id == last_id + 1, "no bytes, and ids")
    elif kind == FENCE:
        need(found["length"] == 0 and first_id > last_id, "a FENCE")
    else:
        need(found["length"] == 0 and found["number"] != 0 and first_id <= last_id + 1, "a SEAL")


def read_slot(data: bytes) -> dict[str, Any]:
    """The slot that is all of ``data``."""
    found = slot_header(data[:160])
    need(found["size"] == len(data), "the size is the sum of the lengths")
    need(zlib.crc32(data[:156] + data[160:-4]) == int.from_bytes(data[-4:], "little"), "crc")
    b = Bytes(data[160:-4])
    saved: dict[str, Any] = {"header": found, "frames": b.take(found["length"])}
    saved["checkpoints"] = checkpoints(b.take(found["checkpoints"]), found["queue_id"])
    saved["ledger"] = ledger(b.take(found["ledger"]))
    note = saved["note"] = b.take(found["note"])
    b.end()
    if found["kind"] == FENCE:
        need(len(note) <= 200, "the owner's name")
        try:
            note.decode()
        except UnicodeDecodeError:
            raise Bad("the owner's name") from None
    elif found["kind"] == DATA:
        need(not note or (len(note) == 8 and 0 < int.from_bytes(note, "little") <= LARGEST), "what is forgotten")
    elif found["kind"] == CLOSE:
        need(note in (b"\0", b"\1"), "handed over")
    else:
        n = Bytes(note)
        sealed = saved["segment"] = segment(n)
        n.end()
        footer = sealed["footer"]
        for mine, its in [("offset", "records_end"), *((name, name) for name in ("number", "marker"))]:
            need(found[mine] == footer[its], mine)
        need((found["first_id"], found["last_id"]) == (footer["first_id"], footer["last_id"]), "ids")
        need(sealed["header"] is None or sealed["header"]["queue_id"] == found["queue_id"], "queue_id")
    return saved | {"crc": int.from_bytes(data[-4:], "little")}


# -- what slots add up to --------------------------------------------------------------------------------------------


def read_manifest(data: bytes) -> dict[str, Any]:
    """The manifest that is all of ``data``: what is in it, and not whether slots can add up to it."""
    need(len(data) <= MOST, "size")
    b = Bytes(data)
    need((b.take(8), b.u(16), b.take(6)) == (b"KSTRLMAN", 2, bytes(6)), "magic, version")
    crc, length = b.u(32), b.u(32)
    need(length == b.left and zlib.crc32(data[24:], length) == crc, "crc")
    found: dict[str, Any] = {"header": slot_header(b.take(160)), "crc": b.u(32)}
    fences, segments, tail, states_bytes, ledger_bytes = (b.u(32) for _ in range(5))
    found["fences"] = [b.number() for _ in range(fences)]
    found["segments"] = [segment(b) for _ in range(segments)]
    found["tail"] = [(b.number(), b.number(), b.number()) for _ in range(tail)]
    found["checkpoints"] = checkpoints(b.take(states_bytes), found["header"]["queue_id"])
    found["ledger"] = ledger(b.take(ledger_bytes))
    b.end()
    need(not any("dropped" in each for each in found["checkpoints"]), "a dropped reader")
    return found


def add_up(log: list[bytes]) -> dict[str, Any]:
    """What the manifest of the last of these slots says. They are all from slot 1 on."""
    at: dict[str, Any] = {"fences": [], "segments": [], "tail": [], "checkpoints": {}, "ledger": None, "crc": 0}
    at["header"] = dict.fromkeys(("slot", "epoch", "number", "marker", "segment_crc", "end", "last_id", "kind"), 0)
    for data in log:
        follow(at, read_slot(data))
    return at | {"checkpoints": [at["checkpoints"][name] for name in sorted(at["checkpoints"])]}


def follow(at: dict[str, Any], slot: dict[str, Any]) -> None:
    new, old = slot["header"], at["header"]
    need(new["slot"] == old["slot"] + 1 and new["crc_before"] == at["crc"], "order")
    if new["kind"] == FENCE:
        need(new["epoch"] == old["epoch"] + 1 and new["queue_id"] == old.get("queue_id", new["queue_id"]), "a FENCE")
        at["fences"].append(new["slot"])
    else:
        for name in ("epoch", "queue_id", "nonce", "lease_ms"):
            need(new[name] == old.get(name), name)
        need(new["written_ms"] >= old["written_ms"] and old["kind"] != CLOSE, "written_ms, or closed")
    if new["kind"] == SEAL:
        follow_seal(at, slot)
    elif new["length"]:
        follow_data(at, slot)
    else:
        for name in ("number", "marker", "segment_crc", "end", "last_id"):
            need(new[name] == old[name], f"{name} stays")
    follow_rest(at, slot)
    at["header"], at["crc"] = new, slot["crc"]


def follow_link(at: dict[str, Any], slot: dict[str, Any], header: dict[str, Any]) -> None:
    """A segment begins."""
    need(header["queue_id"] == slot["header"]["queue_id"], "queue_id")
    if at["segments"]:
        footer = at["segments"][-1]["footer"]
        need(header["number"] > footer["number"] == header["previous_number"], "number")
        need(header["previous_last_id"] == footer["last_id"], "ids")
        need(header["previous_end"] == footer["records_end"], "end")


def follow_data(at: dict[str, Any], slot: dict[str, Any]) -> None:
    new, old, crc = slot["header"], at["header"], 0
    if at["tail"]:
        need((new["number"], new["marker"], new["offset"]) == (old["number"], old["marker"], old["end"]), "place")
        need(new["first_id"] == old["last_id"] + 1, "ids")
        crc = old["segment_crc"]
    else:
        header = segment_header(slot["frames"][:96])
        need(new["offset"] == 0 and header is not None, "a segment without its beginning")
        assert header is not None
        for name in ("number", "marker", "first_id"):
            need(new[name] == header[name], name)
        follow_link(at, slot, header)
    need(zlib.crc32(slot["frames"], crc) == new["segment_crc"], "segment_crc")
    at["tail"].append((new["slot"], new["offset"], new["first_id"]))


def follow_seal(at: dict[str, Any], slot: dict[str, Any]) -> None:
    new, old = slot["header"], at["header"]
    header = slot["segment"]["header"]
    if at["tail"]:
        need((new["number"], new["marker"]) == (old["number"], old["marker"]), "another segment")
        need(new["first_id"] == at["tail"][0][2] and new["last_id"] >= old["last_id"], "ids")
        same = (new["segment_crc"], new["last_id"]) == (old["segment_crc"], old["last_id"])
        need(new["offset"] > old["end"] or (new["offset"] == old["end"] and same), "the end")
    elif header is not None:
        follow_link(at, slot, header)
    else:
        need(new["number"] > old["number"] and new["first_id"] > old["last_id"], "order")
    at["segments"].append(slot["segment"])
    at["tail"] = []


def follow_rest(at: dict[str, Any], slot: dict[str, Any]) -> None:
    last_id = slot["header"]["last_id"]
    for state in slot["checkpoints"]:
        if "dropped" in state:
            at["checkpoints"].pop(state["dropped"], None)
        else:
            need(max(state["highest"], state["watermark"]) <= last_id, "ahead of the log")
            at["checkpoints"][state["name"]] = state
    if slot["ledger"] is not None:
        need(at["ledger"] is None or at["ledger"]["taken"] <= slot["ledger"]["taken"], "taken")
        at["ledger"] = slot["ledger"]
    if slot["header"]["kind"] == DATA and slot["note"]:
        below = int.from_bytes(slot["note"], "little")
        gone = [each for each in at["segments"][:-1] if each["footer"]["number"] < below]
        heads = [state["head"] for state in at["checkpoints"].values()]
        need(not any(head < each["footer"]["last_id"] for each in gone for head in heads), "a reader needs it")
        at["segments"] = [each for each in at["segments"] if each not in gone]
