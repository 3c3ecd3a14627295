"""``serve``: a server as a whole process, with signals, and a garbage collector that does not visit a million jobs.
``serve_in_thread``: a server in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kestrelpy.server._server import BeanstalkServer

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["serve", "serve_in_thread"]

_NEVER = 1_000_000_000


def serve(
    directory: str | PathLike[str] | None = None,
    *,
    on_start: Callable[[BeanstalkServer], None] | None = None,
    on_signal: Callable[[signal.Signals], None] | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT; after SIGUSR1 the server refuses puts. Call it in the main thread of a process.

    The other arguments are those of ``BeanstalkServer``. ``on_start`` is called once the server listens, ``on_signal``
    with each signal, after the server has obeyed it. Returns when the queue is closed. Raises what
    ``BeanstalkServer.start`` raises, and the error of a sync that failed.
    """
    asyncio.run(_serve(BeanstalkServer(directory, **options), on_start, on_signal))


async def _serve(
    server: BeanstalkServer,
    on_start: Callable[[BeanstalkServer], None] | None,
    on_signal: Callable[[signal.Signals], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def obey(number: signal.Signals, what: Callable[[], object]) -> None:
        what()
        if on_signal is not None:
            on_signal(number)

    # Before the start: without a handler, SIGUSR1 would end the process.
    for number, what in ((signal.SIGTERM, stop.set), (signal.SIGINT, stop.set), (signal.SIGUSR1, server.drain)):
        loop.add_signal_handler(number, obey, number, what)
    await server.start()
    try:
        _spare_the_collector()
        if on_start is not None:
            on_start(server)
        await _first(stop.wait(), server.failed())
    finally:
        await server.stop()


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
    directory: str | PathLike[str] | None = None, *, listen: str = "127.0.0.1:0", **options: Any
) -> Iterator[BeanstalkServer]:
    """A server in a thread of its own, for tests and for programs without an event loop. It stops after the block.

    Yields the server once it listens; ``addresses`` says where. The server is not thread-safe. Its ``queue`` is; make
    other calls by ``loop.call_soon_threadsafe``. Raises what ``BeanstalkServer.start`` raises.

    >>> with serve_in_thread() as server:
    ...     server.queue.put(b"hello")
    1
    """
    started: Future[tuple[BeanstalkServer, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        try:
            async with BeanstalkServer(directory, listen=listen, **options) as server:
                started.set_result((server, stop))
                await stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="beanstalk-server", daemon=True)
    thread.start()
    server, stop = started.result()
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join()
