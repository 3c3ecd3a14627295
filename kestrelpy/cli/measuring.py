"""``metrics``: a page for Prometheus. ``serve ... --metrics`` uses the same."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kestrelpy.cli._common import CommandError, queues_in
from kestrelpy.cli._signals import Interrupted

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands
    from kestrelpy.metrics import MetricsServer
    from kestrelpy.server import QueueServer

__all__ = ["add_commands", "listening", "show"]

DEFAULT_PORT = 9464
"""The port that OpenTelemetry's exporter for Prometheus has, too."""


def add_commands(commands: Commands) -> None:
    """Add ``metrics`` to the parser."""
    parser = commands.add_parser(
        "metrics",
        help="serve the figures of a folder's queues to Prometheus",
        description="Serve http://HOST:PORT/metrics for Prometheus: the figures of all queues in DIR, whoever has them "
        "open. Read-only, takes no lock. SIGTERM and Ctrl-C end it. Needs prometheus-client: the extra [metrics].",
    )
    parser.add_argument("directory", metavar="DIR", help="the folder of the queues")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{DEFAULT_PORT}",
        help=f"where to serve it (default: 127.0.0.1:{DEFAULT_PORT}); there is no password, so choose who reaches it",
    )
    parser.set_defaults(run=run_metrics)


def run_metrics(args: argparse.Namespace) -> int:
    """``kestrelpy metrics``."""
    queues_in(args.directory)  # it says if there is no such folder
    with listening(args.listen, "--listen") as page, contextlib.suppress(Interrupted):
        show(page, args.directory, "metrics")
        threading.Event().wait()
    return 0


@contextlib.contextmanager
def listening(text: str, option: str) -> Iterator[MetricsServer]:
    """A page that listens at this address already, and serves nothing before ``show``. Raises ``CommandError``."""
    from kestrelpy.server import parse_address

    try:
        from prometheus_client import CollectorRegistry

        from kestrelpy.metrics import MetricsServer
    except ImportError as error:
        raise CommandError(f"{option}: this needs prometheus-client: pip install 'kestrelpy[metrics]'") from error
    try:
        address = parse_address(text, DEFAULT_PORT)
        if isinstance(address, str):
            raise ValueError("HOST:PORT is wanted, and no path: Prometheus has no other")
        page = MetricsServer(CollectorRegistry(), *address)
    except ValueError as error:
        raise CommandError(f"{option}: {error}", status=2) from None
    except OSError as error:
        raise CommandError(f"cannot listen at {text}: {error.strerror or error}") from None
    try:
        yield page
    finally:
        page.close()


def show(page: MetricsServer, target: str | QueueServer, command: str) -> None:
    """Serve the figures of a folder or a server from now on, and say where."""
    from kestrelpy.metrics import Collector

    page.registry.register(Collector(target))
    page.start()
    host, port = page.address
    with contextlib.suppress(OSError):  # standard error is closed: no reason to stop
        shown = f"[{host}]" if ":" in host else host
        sys.stderr.write(f"kestrelpy {command}: figures at http://{shown}:{port}/metrics\n")
        sys.stderr.flush()
