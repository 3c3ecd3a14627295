"""The rule for the names of tubes: beanstalkd's."""

from __future__ import annotations

import re

from kestrelpy import InvalidName

_TUBE = re.compile(r"(?!-)[A-Za-z0-9\-+/;.$_()]{1,200}")


def check_tube(name: str) -> str:
    """Return ``name`` if it is a valid tube name: 1 to 200 of ``A-Z a-z 0-9 - + / ; . $ _ ( )``, no ``-`` in front.

    Raises ``InvalidName``. Source: beanstalkd's protocol.
    """
    if not isinstance(name, str) or _TUBE.fullmatch(name) is None:
        raise InvalidName(name, "a tube name has 1 to 200 of A-Z a-z 0-9 - + / ; . $ _ ( ), and no - in front")
    return name
