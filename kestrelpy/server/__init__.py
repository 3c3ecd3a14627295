"""A server with the beanstalkd protocol on a work queue. ``kestrelpy serve beanstalk`` runs it from a shell.

``BeanstalkServer`` runs in your event loop, ``serve`` in a process of its own, ``serve_in_thread`` in a thread.
docs/beanstalk-protocol.md says what is the same as in beanstalkd, what is better and what is different.
"""

from __future__ import annotations

from kestrelpy.server._process import serve, serve_in_thread
from kestrelpy.server._server import BeanstalkServer, parse_address

__all__ = ["BeanstalkServer", "parse_address", "serve", "serve_in_thread"]
