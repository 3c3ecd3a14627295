"""``run``: a server as a whole process, with signals, and a garbage collector that does not visit a million jobs.
``run_in_thread``: a server in a thread. ``serve`` and ``serve_in_thread`` make one of the library's servers first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from kestrelpy.server._server import QueueServer
from kestrelpy.server.beanstalk.server import BeanstalkServer
from kestrelpy.server.kestrel.server import KestrelServer

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["run", "run_in_thread", "serve", "serve_in_thread"]

_NEVER = 1_000_000_000
_logger = logging.getLogger("kestrelpy.server")
S = TypeVar("S", bound=QueueServer)


def serve(
    directory: str | PathLike[str] | None = None,
    *,
    protocol: str = "beanstalk",
    on_start: Callable[[Any], None] | None = None,
    on_signal: Callable[[signal.Signals], None] | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT, as ``run`` does. Call it in the main thread of a process.

    ``protocol`` is ``"beanstalk"`` or ``"kestrel"``. ``directory`` and the other arguments are those of
    ``BeanstalkServer`` or ``KestrelServer``, ``on_start`` and ``on_signal`` those of ``run``. At SIGUSR1 a beanstalk
    server refuses puts from then on, and at SIGUSR2 it ends and hands its jobs over to a standby; at SIGHUP a kestrel
    server reads its configuration again. Raises as ``run``, and ``ValueError`` for another protocol.
    """
    run(_server_class(protocol)(directory, **options), on_start=on_start, on_signal=on_signal)


def _server_class(protocol: str) -> Callable[..., QueueServer]:
    if protocol == "beanstalk":
        return BeanstalkServer
    if protocol == "kestrel":
        return KestrelServer
    raise ValueError(f"protocol must be 'beanstalk' or 'kestrel', not {protocol!r}")


def run(
    server: S,
    *,
    on_start: Callable[[S], None] | None = None,
    on_signal: Callable[[signal.Signals], None] | None = None,
) -> None:
    """Run ``server`` until SIGTERM or SIGINT, or until it ends by itself. Call it in the main thread of a process.

    The logger ``kestrelpy.server`` says at ``INFO`` where the server listens, each signal, and the end. ``on_start`` is
    called once the server listens, ``on_signal`` with each signal, after the server has obeyed it.
    Returns when the queues are closed. Raises what ``QueueServer.start`` raises, and the error of a sync that failed.
    """
    asyncio.run(_run(server, on_start, on_signal))


async def _run(
    server: S,
    on_start: Callable[[S], None] | None,
    on_signal: Callable[[signal.Signals], None] | None,
) -> None:
    loop, name = asyncio.get_running_loop(), type(server).__name__
    stop = asyncio.Event()

    def obey(number: signal.Signals, what: Callable[[], object]) -> None:
        _logger.info("%s: got %s", name, number.name)
        what()
        if on_signal is not None:
            on_signal(number)

    # Before the start: without a handler, SIGUSR1 and SIGHUP would end the process.
    signals = {signal.SIGTERM: stop.set, signal.SIGINT: stop.set, **server.on_signals()}
    for number, what in signals.items():
        loop.add_signal_handler(number, obey, number, what)
    await server.start()
    try:
        _spare_the_collector()
        _logger.info("%s: listening at %s", name, ", ".join(server.listens_at))
        if on_start is not None:
            on_start(server)
        await _first(stop.wait(), server.ended())
    finally:
        await server.stop()
        _logger.info("%s: stopped", name)


async def _first(*awaitables: Any) -> None:
    """Wait for the first of these; raises what it raises."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def _spare_the_collector() -> None:
    """Keep the garbage collector from visiting the jobs.

    A full collection visits every object. With a million jobs it stops all clients for a second, and it finds nothing,
    because neither jobs nor connections (see ``_break_cycles``) are in reference cycles. So the objects made by the
    opening are frozen, and the oldest generation is not collected any more. The two young generations still are: they
    free the cycles of exceptions.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


@contextlib.contextmanager
def serve_in_thread(
    directory: str | PathLike[str] | None = None,
    *,
    protocol: str = "beanstalk",
    listen: str = "127.0.0.1:0",
    **options: Any,
) -> Iterator[Any]:
    """A server in a thread of its own, as ``run_in_thread``.

    ``directory``, ``protocol`` and the other arguments are those of ``serve``. It listens at ``listen``, by default at
    a free port of this machine.

    Yields the server: a ``BeanstalkServer``, whose ``queue`` is thread-safe, or a ``KestrelServer``.

    >>> with serve_in_thread() as server:
    ...     server.queue.put(b"hello")
    1
    """
    with run_in_thread(_server_class(protocol)(directory, listen=listen, **options)) as server:
        yield server


@contextlib.contextmanager
def run_in_thread(server: S) -> Iterator[S]:
    """Run ``server`` in a thread of its own, for tests and for programs without an event loop, until the block ends.

    Yields the server once it listens; ``addresses`` says where. The server is not thread-safe: make calls by
    ``loop.call_soon_threadsafe``. Raises what ``QueueServer.start`` raises.
    """
    started: Future[asyncio.Event] = Future()

    async def main() -> None:
        stop = asyncio.Event()
        try:
            async with server:
                started.set_result(stop)
                await stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="queue-server", daemon=True)
    thread.start()
    stop = started.result()
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join()
