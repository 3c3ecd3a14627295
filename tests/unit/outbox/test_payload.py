"""Payloads as JSON: what goes in comes out, equal and of the same types, or is refused with its place."""

from __future__ import annotations

import enum
import json
import math
import re
import sys
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrelpy.outbox.payload import MAX_DEPTH, JsonText, exact_json


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


class MyStr(str):
    pass


class MyInt(int):
    pass


class MyFloat(float):
    pass


class MyList(list[Any]):
    pass


class MyDict(dict[Any, Any]):
    def items(self) -> Any:
        raise LookupError("items of the user's own")


Point = namedtuple("Point", "x y")  # a tuple with names is what is asked about


def types(value: Any) -> Any:
    """The types of a value and of all that is in it, and what equality can't see of its numbers."""
    if isinstance(value, dict):
        return type(value), [(type(key), key, types(held)) for key, held in dict.items(value)]
    if isinstance(value, list):
        return type(value), [types(each) for each in value]
    return type(value), math.copysign(1, value) if type(value) is float else None


def nested(depth: int, inside: Any = None) -> Any:
    """``depth`` lists and dicts, one in the other."""
    value = inside
    for at in range(depth):
        value = [value] if at % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -7,
        10**4000,
        -(1 << 64),
        1.0,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        "",
        'a\x00b\x1f\x7f\u2028\n"\\/',
        "Grüße, 世界 \U0001f600",
        [],
        {},
        [[], {}, [{}]],
        {"": None, "a b": [1, True, 1.0, "1"]},
        {"z": 1, "a": 2},
        [True, 1, 1.0, False, 0, 0.0, -0.0],
        nested(MAX_DEPTH),
        [nested(MAX_DEPTH - 1), nested(MAX_DEPTH - 1)],
    ],
)
def test_it_comes_back(value: Any) -> None:
    text = exact_json(value)
    again = JsonText().decode(text)
    assert again == value
    assert types(again) == types(value)
    assert JsonText().decode(text.encode()) == value


def test_it_is_compact_and_readable() -> None:
    assert exact_json({"to": ["ä", 1], "n": None}) == '{"to":["ä",1],"n":null}'
    assert exact_json("\x00") == r'"\u0000"'
    assert JsonText().encode([1, 2]) == "[1,2]"


def test_a_value_may_be_there_twice() -> None:
    shared = ["x"]
    assert exact_json({"a": shared, "b": [shared, shared]}) == '{"a":["x"],"b":[["x"],["x"]]}'


CIRCULAR: list[Any] = [1]
CIRCULAR.append({"me": [CIRCULAR, CIRCULAR]})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"to": [("a", "b")]}, 'payload["to"][0] is a tuple, which JSON gives back as a list'),
        (Point(1, 2), "payload is a Point, which JSON gives back as a list"),
        ({1: "x"}, "payload has the key 1: a key must be a str"),
        ({"a": [{True: 1}]}, 'payload["a"][0] has the key True: a key must be a str'),
        ({None: 1}, "payload has the key None: a key must be a str"),
        ({1.5: 1}, "payload has the key 1.5: a key must be a str"),
        ({("a",): 1}, "payload has the key ('a',): a key must be a str"),
        ({Word.YES: 1}, "payload has the key <Word.YES: 'yes'>: a key must be a str, and not a Word"),
        ({MyStr("a"): 1}, "payload has the key 'a': a key must be a str, and not a MyStr"),
        ({1: "x", "1": "y"}, "payload has the key 1: a key must be a str"),
        ({"a": math.nan}, 'payload["a"] is nan, which JSON does not have'),
        ([-math.inf], "payload[0] is -inf, which JSON does not have"),
        ({"a": "\ud800"}, 'payload["a"] has a lone surrogate, which is no text'),
        ("\ud83d\ude00", "payload has a lone surrogate, which is no text"),
        ({"\udfff": 1}, 'payload has the key "\\udfff", with a lone surrogate, which is no text'),
        ({"a": Colour.RED}, 'payload["a"] is a Colour, which JSON gives back as an int'),
        ({"a": MyInt(1)}, 'payload["a"] is a MyInt, which JSON gives back as an int'),
        ([MyFloat(1)], "payload[0] is a MyFloat, which JSON gives back as a float"),
        ([Word.YES], "payload[0] is a Word, which JSON gives back as a str"),
        (MyStr("a"), "payload is a MyStr, which JSON gives back as a str"),
        (MyList(), "payload is a MyList, which JSON gives back as a list"),
        ({"a": OrderedDict(b=1)}, 'payload["a"] is an OrderedDict, which JSON gives back as a dict'),
        (defaultdict(list), "payload is a defaultdict, which JSON gives back as a dict"),
        ([MyDict(a=1)], "payload[0] is a MyDict, which JSON gives back as a dict"),
        ({"a": {1, 2}}, 'payload["a"] is a set, which JSON does not have'),
        ({"id": uuid.UUID(int=1)}, 'payload["id"] is a UUID, which JSON does not have'),
        ([Decimal(1)], "payload[0] is a Decimal, which JSON does not have"),
        (b"x", "payload is a bytes, which JSON does not have"),
        (object(), "payload is an object, which JSON does not have"),
        (1j, "payload is a complex, which JSON does not have"),
        ({"a": [0, 10**5000]}, 'payload["a"][1] is an int of too many digits'),
        ({10**5000: 1}, "payload has the key <int>: a key must be a str"),
        (CIRCULAR, 'payload[1]["me"][0] contains itself'),
        (nested(MAX_DEPTH + 1), f"payload is nested more than {MAX_DEPTH} deep"),
        (nested(100_000), f"payload is nested more than {MAX_DEPTH} deep"),
        ({"x" * 100: ()}, f'payload["{"x" * 40}..."] is a tuple, which JSON gives back as a list'),
        ({'a"b\n': ()}, r'payload["a\"b\n"] is a tuple, which JSON gives back as a list'),
    ],
)
def test_what_would_not_is_refused_with_its_place(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="payload") as raised:
        exact_json(value)
    assert str(raised.value) == reason
    with pytest.raises(ValueError, match="payload"):
        JsonText().encode(value)


def test_the_name_of_the_whole_can_be_another() -> None:
    with pytest.raises(ValueError, match=r'^context\["a"\] is a tuple'):
        exact_json({"a": ()}, "context")


def test_what_shows_itself_badly() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ValueError("no")

    with pytest.raises(ValueError, match=r"payload has the key <.*Bad.*>: a key must be a str"):
        exact_json({Bad(): 1})
    with pytest.raises(ValueError, match="payload is a Bad, which JSON does not have"):
        exact_json(Bad())


def test_a_stack_that_is_nearly_full() -> None:
    """How deep the caller is decides whether a value can be checked, and never ends in another error."""

    def deep(left: int) -> str:
        return exact_json(value) if not left else deep(left - 1)

    value = nested(MAX_DEPTH)
    outcomes = set()
    for depth in range(0, sys.getrecursionlimit(), 50):
        try:
            outcomes.add(deep(depth)[:4])
        except ValueError as error:
            outcomes.add(str(error))
        except RecursionError:  # before exact_json began
            break
    assert outcomes <= {'[{"a', "payload is nested too deep for the stack of its caller"}
    assert '[{"a' in outcomes


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.characters(categories=["Cs", "Lu"])
    | st.sampled_from(
        [Colour.RED, Word.YES, MyStr("a"), MyInt(0), MyFloat(0), b"", Decimal(1), (), MyList(), MyDict()]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(
            st.text() | st.integers() | st.none() | st.booleans() | st.just(MyStr("a")), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_json_values_come_back(value: Any) -> None:
    again = json.loads(exact_json(value))
    assert again == value
    assert types(again) == types(value)


def can_come_back(value: Any) -> bool:
    """The slow truth: through the standard library and back, with the types compared."""
    try:
        again = json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except Exception:
        return False
    return bool(again == value) and types(again) == types(value)


@given(ANYTHING)
def test_any_value_is_taken_exactly_if_it_comes_back(value: Any) -> None:
    if can_come_back(value):
        assert json.loads(exact_json(value)) == value
    else:
        with pytest.raises(ValueError, match=r"^payload"):
            exact_json(value)


PLACE = re.compile(r'payload((?:\[(?:\d+|"(?:[^"\\]|\\.)*")\])*)')


@given(ANYTHING)
def test_the_place_is_that_of_the_offender(value: Any) -> None:
    """``payload...`` of the message leads to a part that is itself refused."""
    try:
        exact_json(value)
    except ValueError as error:
        place = PLACE.match(str(error))
        assert place
        part = value
        for step in re.findall(r'\[(\d+|"(?:[^"\\]|\\.)*")\]', place[1]):
            if "..." in step:
                return
            part = part[json.loads(step)]
        assert not can_come_back(part)
