"""The base of the public values: immutable, compared and hashed by their fields, cheap to import.

To its users a value is a frozen dataclass. But ``dataclasses`` imports ``inspect``, ``ast`` and ``tokenize``, and
compiles source for each class: that was nearly half of the time to import the library. So a dataclass is made only when
somebody asks for what only a dataclass has. It is a twin of the value's class.
"""

from __future__ import annotations

from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from dataclasses import Field
    from typing import Self

K = TypeVar("K")
V = TypeVar("V")

set_field = object.__setattr__
"""``set_field(value, name, to)``: for a value that is made so often that its class has an ``__init__`` of its own."""


def _twin(cls: type[Value]) -> type[Any]:
    """A dataclass with the fields of ``cls``, made once."""
    if "_made" in vars(cls):
        return cls._made
    from dataclasses import field, make_dataclass  # here and not above: programs that do not use it must not pay for it

    fields = []
    for name, annotation in cls._annotated.items():
        options: dict[str, Any] = {"kw_only": name not in cls.__match_args__}
        if name in cls._defaults:
            default = cls._defaults[name]
            if type(default).__hash__ is None:  # dataclasses take it for a mutable default
                options["default_factory"] = lambda default=default: default
            else:
                options["default"] = default
        fields.append((name, annotation, field(**options)))
    cls._made = make_dataclass(cls.__qualname__, fields, frozen=True)
    return cls._made


class _OfTwin:
    """A class attribute, taken from the twin. ``Value`` itself has no fields and no such attributes."""

    def __set_name__(self, owner: type[Value], name: str) -> None:
        self._name = name

    def __get__(self, value: Value | None, cls: type[Value]) -> Any:
        if not cls._annotated:
            raise AttributeError(f"{cls.__name__} has no {self._name}")
        return getattr(_twin(cls), self._name)


class _Signature:
    """The signature of the shared ``__init__``, for ``help`` and the like."""

    def __get__(self, value: Value | None, cls: type[Value]) -> Any:
        if not cls._annotated or cls.__init__ is not Value.__init__:
            raise AttributeError(f"{cls.__name__} has an __init__ of its own")
        from inspect import signature  # here and not above: programs that do not use it must not pay for it

        return signature(_twin(cls))


@dataclass_transform(frozen_default=True)
class Value:
    """The base of values. The annotations of a class are its fields, and what it assigns to them are their defaults.

    ``class Point(Value, kw_only=True)`` has fields that are given by name. A class with ``__slots__`` has an
    ``__init__`` of its own, which uses ``set_field``. ``__post_init__`` checks a value.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()
    _annotated: ClassVar[dict[str, Any]] = {}
    _defaults: ClassVar[dict[str, Any]] = {}
    _values: ClassVar[attrgetter[Any]]
    _made: ClassVar[type[Any]]
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _OfTwin()
        __dataclass_params__ = _OfTwin()
        __signature__ = _Signature()

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        own, held = cls.__annotations__, vars(cls)
        cls._annotated = {**cls._annotated, **own}
        cls._values = attrgetter(*cls._annotated)
        if "__slots__" not in held:
            cls._defaults = {**cls._defaults, **{name: held[name] for name in own if name in held}}
        if not kw_only:
            cls.__match_args__ = (*cls.__match_args__, *own)  # type: ignore[misc]  # mypy wants a literal

    def __init__(self, *args: Any, **given: Any) -> None:
        cls = type(self)
        placed = dict(zip(cls.__match_args__, args, strict=False))
        held = {**cls._defaults, **placed, **given}
        if held.keys() != cls._annotated.keys() or len(placed) < len(args) or placed.keys() & given.keys():
            _twin(cls)(*args, **given)  # raises TypeError, and says what is wrong
        self.__dict__.update(held)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Raise an error if a field has a value that it must not have."""

    def _held(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._annotated}

    def __setattr__(self, name: str, to: object) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value) and type(other) is type(self):
            return bool(self._values(self) == self._values(other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._values(self))

    @recursive_repr()
    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={held!r}' for name, held in self._held().items())})"

    def __replace__(self, /, **changes: Any) -> Self:
        return type(self)(**{**self._held(), **changes})

    def __getstate__(self) -> dict[str, Any]:
        return self._held()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, held in state.items():
            set_field(self, name, held)


class ReadOnlyDict(dict[K, V]):
    """A mapping in a value. Like the value, it does not change, and can be hashed, copied and pickled."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("this mapping belongs to a value, and does not change")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # other dicts have none
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)
