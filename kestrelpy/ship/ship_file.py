"""``jobs.ship``: the local file that says where a queue is shipped, and which part of the log is ours.

docs/format.md is the specification. The file is replaced as a whole, durably. It is not a second truth about what is
shipped: that is where the log ends.

    | KSTRLSHP | 1 2 | 0 6 | crc 4 | length 4 | body |
    body: | queue_id 16 | epoch 8 | slot 8 | restored_slot 8 | flags 1 | url_bytes 2 | nonces 2 | url | nonces x 16 |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kestrelpy._disk.interface import Directory
from kestrelpy._journal.checkpoint import replace_file
from kestrelpy._journal.file_names import ship_name
from kestrelpy.errors import CorruptJournal
from kestrelpy.ship.framed import FramedFormat

SHIP_MAGIC = b"KSTRLSHP"
SHIP_VERSION = 1
MOST_NONCES = 1000
"""More openings than that, one after another and each cut short, are not remembered."""
MAX_URL_BYTES = 0xFFFF
_BODY = struct.Struct("<16sQQQBHH")
_NONCE_BYTES = 16
_FORMAT = FramedFormat(SHIP_MAGIC, SHIP_VERSION, _BODY.size + MAX_URL_BYTES + MOST_NONCES * _NONCE_BYTES)
_TO_END, _JUMPED, _LEASE_OVER = 1, 2, 4
_FLAGS = _TO_END | _JUMPED | _LEASE_OVER


class ShipFile(NamedTuple):
    """Where a queue is shipped. ``url``: as it was given, without any option; a store without a URL has what its
    ``describe`` says. ``nonces``: of the openings that may have the log's last FENCE: of the last one that is known to
    have one, and of all that were begun after it. An epoch with one of them is ours. ``epoch``, ``slot``: of ours, the
    last ones that are known to be in the log; 0 if there are none. ``restored_slot``: the slot that the queue was
    restored from, 0 if it was not restored since; ``restored_to_end``: whether that was where the log ended.
    ``jumped``: of a work queue that another owner had, whether the ids of its jobs have jumped since. ``lease_over``: a
    standby here has seen that the lease of the log's owner was over, when the log ended with ``restored_slot``.
    """

    url: str
    queue_id: bytes
    nonces: tuple[bytes, ...] = ()
    epoch: int = 0
    slot: int = 0
    restored_slot: int = 0
    restored_to_end: bool = False
    jumped: bool = False
    lease_over: bool = False

    @property
    def slot_there(self) -> int:
        """The last slot that is known to have been in the log: ours, or the one that the queue was restored from."""
        return max(self.slot, self.restored_slot)

    def opening(self, nonce: bytes) -> ShipFile:
        """What the file says while an opening with that nonce is under way."""
        return self._replace(nonces=(*self.nonces[1 - MOST_NONCES :], nonce))

    def opened(self, nonce: bytes, epoch: int, slot: int) -> ShipFile:
        """What the file says once the FENCE of that opening is in the log, up to that slot."""
        return ShipFile(self.url, self.queue_id, (nonce,), epoch, slot, jumped=self.jumped)


def encode_ship_file(state: ShipFile) -> bytes:
    """The whole file. Raises ``ValueError`` if the URL has more than ``MAX_URL_BYTES``."""
    url = state.url.encode()
    if len(url) > MAX_URL_BYTES:
        raise ValueError(f"the store's URL has {len(url)} bytes, more than {MAX_URL_BYTES}")
    flags = state.restored_to_end * _TO_END | state.jumped * _JUMPED | state.lease_over * _LEASE_OVER
    fixed = (state.queue_id, state.epoch, state.slot, state.restored_slot, flags)
    return _FORMAT.encode(_BODY.pack(*fixed, len(url), len(state.nonces)) + url + b"".join(state.nonces))


def decode_ship_file(data: bytes) -> ShipFile | None:
    """What the file says; ``None`` unless ``data`` is exactly one of this version."""
    body = _FORMAT.body_of(data)
    if body is None or len(body) < _BODY.size:
        return None
    queue_id, epoch, slot, restored_slot, flags, url_bytes, nonces = _BODY.unpack_from(body)
    nonces_at = _BODY.size + url_bytes
    if nonces_at + nonces * _NONCE_BYTES != len(body) or flags & ~_FLAGS or nonces > MOST_NONCES:
        return None
    try:
        url = body[_BODY.size : nonces_at].decode()
    except UnicodeDecodeError:
        return None
    mine = tuple(body[at : at + _NONCE_BYTES] for at in range(nonces_at, len(body), _NONCE_BYTES))
    said = (bool(flags & flag) for flag in (_TO_END, _JUMPED, _LEASE_OVER))
    return ShipFile(url, queue_id, mine, epoch, slot, restored_slot, *said)


def read_ship_file(folder: Directory, queue: str) -> ShipFile | None:
    """What the file of ``queue`` says; ``None`` if there is none. Raises ``CorruptJournal``, ``UnsupportedFormat`` and
    ``OSError``.
    """
    name = ship_name(queue)
    data = _FORMAT.read(folder, name)
    if data is None:
        return None
    state = decode_ship_file(data)
    if state is None:
        path = f"{folder.path}/{name}"
        raise CorruptJournal(path, 0, "it does not say where the queue is shipped: detach it with ship=False")
    return state


def remove_ship_file(folder: Directory, queue: str) -> None:
    """Remove the file of ``queue``: it is shipped no more. That is on disk when this returns. Raises ``OSError``."""
    folder.unlink(ship_name(queue))
    folder.sync()


def write_ship_file(folder: Directory, queue: str, state: ShipFile) -> None:
    """Replace the file of ``queue``. It is durable when this returns. Raises ``OSError`` with the old one in place."""
    replace_file(folder, ship_name(queue), encode_ship_file(state))
