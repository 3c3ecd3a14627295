"""Servers with the protocols of other queues, and the ground to build your own queue server on.

``BeanstalkServer`` has the protocol of beanstalkd, on a work queue; ``KestrelServer`` has the protocols of kestrel, on
journaled queues. ``kestrelpy serve`` runs them from a shell, ``serve`` in a process of their own, ``serve_in_thread``
in a thread. docs/beanstalk-protocol.md and docs/kestrel-protocol.md say what is the same as in the original, what is
better and what is different.

``QueueServer`` is the loop under it: clients, turns with one sync for all, back-pressure, signals. docs/servers.md
builds a small server on it.
"""

from __future__ import annotations

from kestrelpy.server._connection import Connection, Parser, QueueProtocol, Wait
from kestrelpy.server._future_wait import FutureWait
from kestrelpy.server._process import run, run_in_thread, serve, serve_in_thread
from kestrelpy.server._server import QueueServer, parse_address
from kestrelpy.server.beanstalk.server import BeanstalkServer
from kestrelpy.server.figures import ServedJournal, ServerFigures
from kestrelpy.server.kestrel.config import ConfigError
from kestrelpy.server.kestrel.server import KestrelServer

__all__ = [
    "BeanstalkServer",
    "ConfigError",
    "Connection",
    "FutureWait",
    "KestrelServer",
    "Parser",
    "QueueProtocol",
    "QueueServer",
    "ServedJournal",
    "ServerFigures",
    "Wait",
    "parse_address",
    "run",
    "run_in_thread",
    "serve",
    "serve_in_thread",
]
