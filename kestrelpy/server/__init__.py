"""A server with the beanstalkd protocol on a work queue; ``kestrelpy serve beanstalk`` is this from a shell.

``BeanstalkServer`` runs in an event loop of yours, ``serve`` is a whole process, ``serve_in_thread`` a thread.
docs/beanstalk-protocol.md says what is as in beanstalkd, what is better and what is different.
"""

from __future__ import annotations

from kestrelpy.server._process import serve, serve_in_thread
from kestrelpy.server._server import BeanstalkServer, parse_address

__all__ = ["BeanstalkServer", "parse_address", "serve", "serve_in_thread"]
