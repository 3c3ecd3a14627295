"""What a work queue writes: to bytes and back, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.work import records
from kestrelpy.work.records import BURIED, CARRIED, DELAYED, PUT, READY, Origin, State, Totals, TubeFigures

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 2**32, allow_nan=False)
names = st.text("abcABC019-+/;.$_()", min_size=1, max_size=200)
keys = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
states = st.builds(
    State, st.sampled_from([READY, DELAYED, BURIED]), u32, seconds, u64, u32, u32, u32, u32, u32, u64,
    st.integers(0, 0xFFFF),
)  # fmt: skip
origins = st.builds(Origin, u64, names, keys, u32, seconds, seconds, u64, u64)


@given(origins, st.binary(max_size=200), states)
def test_a_carried_job_comes_back_whole(origin: Origin, body: bytes, state: State) -> None:
    data = records.encode_put(origin, body, state)
    assert data[0] == CARRIED
    head, found = records.split_carried(data)
    assert found == state
    assert records.job_of(data) == origin.job_id
    _, tube_bytes, key_bytes, priority, job_id, added_ms, delay, ttr, expires_ms = records.unpack_put(head)
    key_at = len(head) - key_bytes
    tube_at = key_at - tube_bytes
    key = head[key_at:].decode() if key_bytes else None
    assert Origin(job_id, head[tube_at:key_at].decode(), key, priority, delay, ttr, added_ms, expires_ms) == origin
    assert head[records.PUT_BYTES : tube_at] == body


@given(u64, names, states)
def test_a_state_comes_back_whole(job_id: int, tube: str, state: State) -> None:
    data = records.encode_state(job_id, tube, state)
    assert records.decode_state(data) == (job_id, tube, state)
    assert records.job_of(data) == job_id


@given(names, u64, u64, u64, seconds, u64)
def test_a_tube_comes_back_whole(name: str, jobs: int, deletes: int, pauses: int, pause: float, until: int) -> None:
    figures = TubeFigures(name, jobs, deletes, pauses, pause, until)
    assert records.decode_tube(records.encode_tube(figures)) == figures


@given(u64, u64, u64, u64)
def test_totals_come_back_whole(last_id: int, jobs: int, timeouts: int, burials: int) -> None:
    totals = Totals(last_id, jobs, timeouts, burials)
    assert records.decode_totals(records.encode_totals(totals)) == totals


def test_what_is_no_record_is_refused() -> None:
    state = records.encode_state(1, "tube", State(READY, 1, 0.0, 0, 0, 0, 0, 0, 0, 0))
    whole = [
        (records.decode_state, state),
        (records.decode_tube, records.encode_tube(TubeFigures("tube", 1, 2, 3, 0.0, 0))),
        (records.decode_totals, records.encode_totals(Totals(1, 2, 3, 4))),
        (records.decode_gone, records.pack_gone(records.GONE, 0, 7)),
    ]
    for decode, data in whole:
        for length in range(len(data)):
            with pytest.raises(ValueError, match=r"."):
                decode(data[:length])
    wrong = bytearray(state)
    wrong[10] = 2  # reserved: no state to come back to
    with pytest.raises(ValueError, match="no state 2"):
        records.decode_state(bytes(wrong))
    with pytest.raises(ValueError, match="shorter"):
        records.split_carried(bytes([CARRIED]))


def test_the_layout_is_as_documented() -> None:
    """Bytes of version 1; never edited."""
    origin = Origin(7, "mail", "k", 65536, 1.5, 60.0, 1_700_000_000_000, 0)
    state = State(DELAYED, 5, 2.0, 1_700_000_002_000, 1, 2, 3, 4, 5, 6, 9)
    assert records.encode_put(origin, b"hi").hex() == (
        "0104010000000100070000000000000000 68e5cf8b010000".replace(" ", "")
        + "000000000000f83f0000000000004e400000000000000000"
        + "6869" + "6d61696c" + "6b"
    )  # fmt: skip
    assert records.encode_state(7, "mail", state).hex() == (
        "03040700000000000000" + "010900050000000000000000000040d06fe5cf8b010000"
        + "0100000002000000030000000400000005000000" + "0600000000000000" + "6d61696c"
    )  # fmt: skip
    assert records.pack_gone(records.GONE, 1, 7).hex() == "04010700000000000000"
    assert PUT == 1
