"""Values of a type that the user declares, checked as they are decoded: by msgspec, or by pydantic.

Bytes that do not fit the type are one error, ``DecodeError``, whatever the library underneath raises.
"""

from __future__ import annotations

from typing import Any, Literal

from kestrelpy.codecs.errors import DecodeError


class MsgspecCodec:
    """``kestrelpy.codecs.msgspec``. Thread-safe."""

    def __init__(self, kind: Any, form: Literal["json", "msgpack"]) -> None:
        if form not in ("json", "msgpack"):
            raise ValueError(f"format must be 'json' or 'msgpack', not {form!r}")
        try:
            import msgspec
        except ImportError as missing:
            raise ImportError(
                "codecs.msgspec() needs the package msgspec: pip install 'kestrelpy[msgspec]'"
            ) from missing
        of_form = msgspec.json if form == "json" else msgspec.msgpack
        self._what = f"{form} of {_name_of(kind)}"
        self._encode = of_form.Encoder().encode
        self._decode = of_form.Decoder(kind).decode
        self._bad_value = (msgspec.MsgspecError, OverflowError, RecursionError)
        self._bad_data = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

    def encode(self, value: Any) -> bytes:
        """The bytes of ``value``. Raises ``TypeError`` or ``ValueError`` for a value that has none."""
        try:
            encoded: bytes = self._encode(value)
        except self._bad_value as error:
            raise ValueError(f"{type(value).__name__} has no {self._what}: {error}") from error
        return encoded

    def decode(self, data: bytes) -> Any:
        """The value of ``data``. Raises ``DecodeError``."""
        try:
            return self._decode(data)
        except self._bad_data as error:
            raise DecodeError(f"not {self._what}: {error}") from error

    def __repr__(self) -> str:
        return f"<codecs.msgspec: {self._what}>"


class PydanticCodec:
    """``kestrelpy.codecs.pydantic``. Thread-safe."""

    def __init__(self, model: Any) -> None:
        try:
            import pydantic
        except ImportError as missing:
            raise ImportError(
                "codecs.pydantic() needs the package pydantic: pip install 'kestrelpy[pydantic]'"
            ) from missing
        self._what = f"JSON of {_name_of(model)}"
        self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(model)
        self._bad_data = (pydantic.ValidationError, OverflowError, RecursionError)  # Overflow: of a "a{99999999999}"

    def encode(self, value: Any) -> bytes:
        """The bytes of ``value``. Raises ``ValueError`` for a value that does not fit the model."""
        try:
            # The fields go by their names, and not by their aliases: an alias may be for one direction only.
            return self._adapter.dump_json(value, by_alias=False, round_trip=True, warnings="error")
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{type(value).__name__} has no {self._what}: {error}") from error

    def decode(self, data: bytes) -> Any:
        """The value of ``data``. Raises ``DecodeError``."""
        try:
            return self._adapter.validate_json(data, by_alias=True, by_name=True)
        except self._bad_data as error:
            raise DecodeError(f"not {self._what}: {error}") from error

    def __repr__(self) -> str:
        return f"<codecs.pydantic: {self._what}>"


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "__qualname__", kind))
