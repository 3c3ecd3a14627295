"""``docs/api.md`` from the docstrings: every public name, its signature, and what it promises.

``python -m tests.support.api_page`` writes the page; ``tests/test_docs.py`` fails where it is not what this makes.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
MODULES = (
    *("", "work", "inbox", "logging", "server", "outbox", "outbox.testing", "codecs", "testing", "ship", "arrow"),
    *("spark", "metrics", "inspection"),
)
"""The public modules that have a chapter of their own, in its order."""
WIDTH = 100
INTERNAL = {
    "BeanstalkServer": {"admit", "forget", "watch_over"},
    "Session": {"hold", "drop", "soonest", "handle", "abandon", "reset_held", "nothing_ready", "finish"},
}
"""Methods without an underscore that another module of the library calls, and users do not."""
HEAD = """# The public interface

Every public name, with its signature and its docstring. `make api` writes this page from the
docstrings, so `help()` says the same. [guide.md](guide.md) and [work.md](work.md) show how the
names are used.

Durations are seconds. Instants are milliseconds since the Unix epoch, UTC, and their names end in
`_ms`. Sizes are bytes, and their names end in `_bytes`. A timeout of `None` waits for ever, `0`
does not wait, and a negative one is a `ValueError`.
"""


def markdown() -> str:
    """The page."""
    parts = [HEAD]
    for name in MODULES:
        module = importlib.import_module(f"kestrelpy.{name}" if name else "kestrelpy")
        parts.append("\n".join(_module(module)))
    return "\n".join(parts).rstrip() + "\n"


def _module(module: ModuleType) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield prose((inspect.getdoc(module) or "").removesuffix("\n\nPYTEST_DONT_REWRITE"))
    errors = []
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            errors.append((name, thing))
        else:
            yield from _name(name, thing)
    if errors:
        yield f"### Errors of {module.__name__}\n"
        yield from (_item(_heading(name, thing), inspect.getdoc(thing) or "") for name, thing in errors)


def _heading(name: str, error: type) -> str:
    bases = ", ".join(base.__name__ for base in error.__bases__ if base is not object)
    return f"{name}({bases})"


def _name(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if isinstance(thing, type) and getattr(thing, "_is_protocol", False):
        yield prose(inspect.getdoc(thing) or "")
        yield from _members(thing)
    elif isinstance(thing, type) and not issubclass(thing, enum.Enum):
        yield f"```python norun\n{wrapped_call(name, thing)}\n```\n"
        yield prose(inspect.getdoc(thing) or "")
        yield from _members(thing)
    elif isinstance(thing, type) and issubclass(thing, enum.Enum):
        yield prose(inspect.getdoc(thing) or "")
        yield f"Members: {', '.join(f'`{each.name}`' for each in _members_of(thing))}.\n"
    elif callable(thing):
        yield f"```python norun\n{wrapped_call(name, thing)}\n```\n"
        yield prose(inspect.getdoc(thing) or "")
    else:
        yield prose(inspect.getdoc(thing) or "" if type(thing).__module__.startswith("kestrelpy") else "A constant.")


def _members_of(kind: type[enum.Enum]) -> list[enum.Enum]:
    return list(kind)


def _members(owner: type) -> Iterator[str]:
    for name, plain in members(owner):
        said = inspect.getdoc(getattr(owner, name)) or ""
        yield _item(name if isinstance(plain, property) else _call(name, plain, bound=True), said)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that users call, inherited ones of this library too: their names, and what they are."""
    seen: set[str] = set()
    for each in owner.__mro__:
        if not each.__module__.startswith("kestrelpy") or each.__name__.startswith("_"):
            continue
        for name, member in vars(each).items():
            if name in INTERNAL.get(owner.__name__, ()):
                continue
            plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if name.startswith("_") or name in seen or not (inspect.isfunction(plain) or isinstance(plain, property)):
                continue
            seen.add(name)
            yield name, plain


def _call(name: str, thing: Any, *, bound: bool = False) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    returned = (
        ""
        if isinstance(thing, type) or signature.return_annotation in (signature.empty, "None")
        else (f" -> {shown_annotation(signature.return_annotation)}")
    )
    begin = "async " if inspect.iscoroutinefunction(thing) else ""
    return f"{begin}{name}({', '.join(_parameters(parameters))}){returned}"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for each in parameters:
        if each.name.startswith("_"):
            continue
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or each.kind is each.VAR_POSITIONAL
        mark = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        about = "" if each.annotation is each.empty else f": {shown_annotation(each.annotation)}"
        if each.default is not each.empty:
            about += f"{' = ' if about else '='}{shown_default(each.default)}"
        yield f"{mark}{each.name}{about}"


def shown_annotation(annotation: Any) -> str:
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    shown = re.sub(r"ForwardRef\('(.*?)'\)", r"\1", shown)
    return re.sub(r"\b(?:typing|collections\.abc|kestrelpy(?:\.\w+)+)\.", "", shown)


def shown_default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, set | frozenset):
        return "..."  # its order is not the same in every run
    if callable(value):
        return str(getattr(value, "__name__", "..."))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def wrapped_call(name: str, thing: Any) -> str:
    """The call on as many lines as it needs."""
    call = _call(name, thing)
    if len(call) <= WIDTH:
        return call
    parameters = _parameters(list(inspect.signature(thing).parameters.values()))
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + call[call.rindex(")") :]


def _item(call: str, said: str) -> str:
    """One entry of a list: the call, and its docstring."""
    first, _, rest = prose(said).partition("\n\n")
    lead = textwrap.fill(f"- `{call}`: {' '.join(first.split())}", WIDTH, subsequent_indent="  ", **_WRAPPING)
    more = f"\n\n{textwrap.indent(rest.rstrip(), '  ')}" if rest.strip() else ""
    return f"{lead}{more}\n"


_WRAPPING: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def prose(said: str) -> str:
    """A docstring as Markdown: paragraphs wrapped, indented lines as code. Notes for maintainers are left out."""
    done = []
    for paragraph in re.split(r"\n\s*\n", said.strip()):
        if paragraph.startswith("NOTE ON LOCKING"):
            continue
        if paragraph and all(line.startswith("    ") for line in paragraph.splitlines()):
            done.append(f"```python norun\n{textwrap.dedent(paragraph)}\n```")
        elif paragraph.startswith(">>> "):
            done.append(f"```pycon\n{paragraph}\n```")
        else:
            lines = re.split(r"\n(?=- |\d+\. )", paragraph)
            done.append("\n".join(_filled(line) for line in lines))
    return "\n\n".join(done) + "\n"


def _filled(text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()), flags=re.DOTALL)
    hang = "  " if text.startswith("- ") else "   " if re.match(r"\d+\. ", text) else ""
    return textwrap.fill(text, WIDTH - 2, subsequent_indent=hang, **_WRAPPING)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
