"""One task: ``python call.py FOLDER MODULE FUNCTION ARGUMENT...``, arguments being whole numbers or words.

Prints what the function counted as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path


def main(folder: str, module: str, function: str, *arguments: str) -> None:
    tests = Path(__file__).parent.parent
    sys.path[:0] = [folder, str(tests), str(tests.parent)]
    logging.disable(logging.CRITICAL)
    counts = getattr(importlib.import_module(module), function)(
        *(int(argument) if argument.lstrip("-").isdigit() else argument for argument in arguments)
    )
    print(json.dumps(dict(counts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
