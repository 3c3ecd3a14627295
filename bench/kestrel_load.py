"""Load on a server of any protocol, from a process of its own: ``python -m bench.kestrel_load SPEC``.

One request is repeated, so many at a time on each connection; replies are counted by a mark and not read. SPEC is a
JSON object; microseconds of each request, and the share of the time that this process was busy, are printed as JSON.
Near 1, that share says that the figure is this program's, not the server's.
"""

from __future__ import annotations

import json
import select
import sys
import time

from bench.beanstalk_load import READ_BYTES, connect


def run(port: int, first: str, request: str, mark: str, connections: int, depth: int, count: int) -> dict[str, float]:
    """Send ``request`` ``count`` times over so many connections, ``depth`` at a time; ``mark`` is once in each reply.

    ``{n}`` in the request is the number of the connection, from 0. ``first`` is sent once on each connection, and has
    one ``mark`` in its reply too, if it is not empty.
    """
    counted = mark.encode("latin-1")
    sockets = [connect(port) for _ in range(connections)]
    if first:
        for one in sockets:
            one.sendall(first.encode("latin-1"))
            while counted not in one.recv(READ_BYTES):
                pass
    left = dict.fromkeys([one.fileno() for one in sockets], count // connections)
    pending = dict.fromkeys(left, 0)
    by_descriptor = {one.fileno(): one for one in sockets}
    data = {one.fileno(): request.replace("{n}", str(n)).encode("latin-1") for n, one in enumerate(sockets)}
    rest = dict.fromkeys(left, b"")
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    began, busy = time.perf_counter(), time.process_time()
    for descriptor, one in by_descriptor.items():
        pending[descriptor] = min(depth, left[descriptor])
        one.sendall(data[descriptor] * pending[descriptor])
    open_ones = len(sockets)
    while open_ones:
        for descriptor, _ in poll.poll():
            one = by_descriptor[descriptor]
            heard = one.recv(READ_BYTES)
            if not heard:
                raise ConnectionError("the server has hung up")
            heard = rest[descriptor] + heard
            done = heard.count(counted)
            rest[descriptor] = heard[len(heard) - len(counted) + 1 :] if len(counted) > 1 else b""
            pending[descriptor] -= done
            left[descriptor] -= done
            if not left[descriptor]:
                poll.unregister(descriptor)
                open_ones -= 1
            elif not pending[descriptor]:
                pending[descriptor] = min(depth, left[descriptor])
                one.sendall(data[descriptor] * pending[descriptor])
    elapsed, busy = time.perf_counter() - began, time.process_time() - busy
    for one in sockets:
        one.close()
    return {"microseconds": elapsed / (count // connections * connections) * 1e6, "busy": busy / elapsed}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
