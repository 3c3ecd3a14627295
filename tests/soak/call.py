"""One task: ``python -m tests.soak.call MODULE FUNCTION ARGUMENT...``, arguments being whole numbers, words, or
``name=number``.

Prints what the function counted as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys


def main(module: str, function: str, *arguments: str) -> None:
    logging.disable(logging.CRITICAL)
    given = [int(argument) if argument.isdigit() else argument for argument in arguments if "=" not in argument]
    named = dict(argument.split("=") for argument in arguments if "=" in argument)
    counts = getattr(importlib.import_module(module), function)(
        *given, **{name: int(value) for name, value in named.items()}
    )
    print(json.dumps(dict(counts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
