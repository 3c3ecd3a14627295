"""Docstrings as the site shows them: an extension of griffe, which reads the sources for mkdocstrings.

1. The text of a docstring is what ``docs/api.md`` makes of it, without notes for maintainers.
2. Parameters that begin with an underscore are not shown.
3. A class whose ``__init__`` is made at run time (a value, a named tuple) has the signature that ``inspect`` sees.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
from typing import Any

import griffe

from tests.support import api_page


class PublicDocstrings(griffe.Extension):
    """Griffe calls one of these for each object that it reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Any object: its docstring."""
        if obj.docstring is not None:
            said = api_page.prose(inspect.cleandoc(obj.docstring.value))
            obj.docstring.value = said.replace("```python norun", "```python")

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """A function or method: its parameters."""
        for name in [each.name for each in func.parameters if each.name.startswith("_")]:
            del func.parameters[name]

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """A class, once its members are there: its ``__init__``."""
        made = _made_at_run_time().get(cls.path)
        if made is not None and "__init__" not in cls.members:
            signature = inspect.signature(made)
            cls.set_member("__init__", griffe.Function("__init__", parameters=_parameters(signature), parent=cls))


@functools.cache
def _made_at_run_time() -> dict[str, type]:
    """The public classes without an ``__init__`` in their source, by the path of their definition."""
    found = {}
    for name in api_page.MODULES:
        module = importlib.import_module(f"kestrelpy.{name}" if name else "kestrelpy")
        things = [getattr(module, each) for each in module.__all__]
        for thing in [
            each for each in things if isinstance(each, type) and not issubclass(each, Exception | enum.Enum)
        ]:
            if "__init__" not in vars(thing) or hasattr(thing, "__dataclass_fields__"):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return found


def _parameters(signature: inspect.Signature) -> griffe.Parameters:
    kinds = {each.value: each for each in griffe.ParameterKind}
    made = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for each in signature.parameters.values():
        about = None if each.annotation is each.empty else api_page.shown_annotation(each.annotation)
        default = None if each.default is each.empty else api_page.shown_default(each.default)
        made.append(griffe.Parameter(each.name, annotation=about, kind=kinds[each.kind.description], default=default))
    return griffe.Parameters(*made)
