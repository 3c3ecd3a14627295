"""``serve``: servers with the protocols of other queues, on a kestrelpy queue.

The short options of ``serve beanstalk`` are those of beanstalkd. So a script that starts beanstalkd needs only another
command name. The long options are kestrelpy's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kestrelpy.cli import _common as common
from kestrelpy.cli import measuring
from kestrelpy.cli._common import CommandError
from kestrelpy.cli._ship_options import add_store_options, store_options
from kestrelpy.cli._signals import Interrupted, unheeded
from kestrelpy.cli._systemd import Supervisor, passed_sockets
from kestrelpy.errors import KestrelError

if TYPE_CHECKING:
    from kestrelpy.cli._systemd import PassedSocket
    from kestrelpy.metrics import MetricsServer
    from kestrelpy.server import BeanstalkServer, QueueServer
    from kestrelpy.ship import Ship, Standby

__all__ = ["add_commands"]

DEFAULT_PORT = 11300
LOCKED = 10
"""The exit status if another process has the folder open, as in beanstalkd."""
LOOK_SECONDS = 0.5
"""So often a change of a standby's state is looked for."""
_NAME = "work"
"""The name of a server's queue."""
FENCED = 11
"""The exit status if another owner has the queue in the store that it is shipped to."""

_MAX_JOB_BYTES = 1 << 30
_ROOM_BESIDE_A_JOB = 64 * 1024
"""Room in a segment in addition to the largest job. So -z alone is enough to allow large jobs, as in beanstalkd."""

_OPEN_FILES_FOR_ITSELF = 64

_DESCRIPTION = """\
A server for clients of beanstalkd. Jobs are kept in --dir. Without --dir they are in memory, and gone when the server
ends.

SIGUSR1 makes the server refuse puts. SIGTERM and Ctrl-C end it; SIGUSR2 ends it too, and hands the jobs over to a
standby. Jobs that were reserved then are ready when the server starts again. If systemd passes a
socket, the server uses it instead of an address.

With --ship the jobs are copied to a store, and outlive this machine (docs/ship.md). Secrets come from the environment.

exit status: 0 ended by a signal; 1 the server could not start, or a sync failed; 2 wrong use; 10 another process has
the jobs open; 11 another owner has them in the store.
"""


_KESTREL_DESCRIPTION = """\
A server for clients of kestrel. Queues are kept in --dir. Without --dir they are in memory, and gone when the server
ends.

SIGHUP makes the server read the queues' options in --config again. SIGTERM and Ctrl-C end it. Reads that were open then
are unread when the server starts again. If systemd passes a socket, the server uses it for the memcache protocol, or
for the text or thrift protocol if that is its name (FileDescriptorName=text).

exit status: 0 ended by a signal or a client; 1 the server could not start, or a sync failed; 2 wrong use, or an error
in --config; 10 another process has the queues open.
"""


def add_commands(commands: Any) -> None:
    """Add ``serve`` to the parser."""
    serve = commands.add_parser("serve", help="run a server with the protocol of another queue")
    protocols = serve.add_subparsers(title="protocols", metavar="PROTOCOL", dest="protocol", required=True)
    parser = protocols.add_parser(
        "beanstalk",
        help="the protocol of beanstalkd",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_serve_beanstalk)
    parser.add_argument("-b", "--dir", metavar="DIR", help="the folder of the jobs; made if it is missing")
    durability = parser.add_mutually_exclusive_group()
    durability.add_argument(
        "-f",
        "--sync-ms",
        metavar="MS",
        type=_milliseconds,
        default=50.0,
        help="the least time between two syncs (default: 50); 0: reply when the change is on disk, with one sync for "
        "all waiting clients (group commit)",
    )
    durability.add_argument("-F", "--no-sync", action="store_true", help="never sync; the system decides")
    _add_on_corruption(parser, "; a deleted job may come back, and standard error has the ids of the jobs in doubt")
    where = parser.add_argument_group("where the server listens (default: 127.0.0.1:11300)")
    where.add_argument("-l", metavar="ADDRESS", help="an address, or unix:PATH")
    where.add_argument("-p", metavar="PORT", type=_port, help="the port for -l")
    where.add_argument("--listen", metavar="HOST:PORT", action="append", help="address and port; may be repeated")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "-z", "--max-job-bytes", metavar="BYTES", type=common.positive, default=65535, help="the largest job (65535)"
    )
    limits.add_argument(
        "-s",
        "--segment-bytes",
        metavar="BYTES",
        type=common.positive,
        default=10 << 20,
        help="size of a segment (10 MiB)",
    )
    limits.add_argument("--max-jobs", metavar="N", type=common.positive, help="refuse a put if there are so many jobs")
    limits.add_argument(
        "--max-bytes", metavar="BYTES", type=common.positive, help="refuse a put beyond so many bytes of jobs"
    )
    limits.add_argument(
        "--max-tubes", metavar="N", type=common.positive, help="refuse a put, use or watch that would make more tubes"
    )
    limits.add_argument(
        "--max-attempts", metavar="N", type=common.positive, help="bury a job that was released or timed out so often"
    )
    limits.add_argument(
        "--max-connections", metavar="N", type=common.positive, help="the default is what the system allows"
    )
    _add_ship(parser)
    _add_metrics(parser)
    parser.add_argument("-u", "--user", metavar="USER", help="become this user when the addresses are bound")
    parser.add_argument("-V", "--verbose", action="count", default=0, help="no effect; accepted as by beanstalkd")
    parser.add_argument("-v", action="version", version="kestrelpy serve beanstalk", help="show the name and exit")
    parser.add_argument("-c", action="store_true", help=argparse.SUPPRESS)  # beanstalkd accepts both, without effect
    parser.add_argument("-n", action="store_true", help=argparse.SUPPRESS)

    add_kestrel(protocols)


def add_kestrel(protocols: Any) -> None:
    """Add ``serve kestrel`` to the parser."""
    parser = protocols.add_parser(
        "kestrel",
        help="the protocols of kestrel: memcache, text and thrift",
        description=_KESTREL_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_serve_kestrel)
    parser.add_argument("--dir", metavar="DIR", help="the folder of the queues; made if it is missing")
    parser.add_argument("--config", metavar="FILE", help="a TOML file; the options here win over it")
    _add_on_corruption(parser, "; standard error says which were left out")
    durability = parser.add_mutually_exclusive_group()
    durability.add_argument(
        "--sync-ms",
        metavar="MS",
        type=_milliseconds,
        default=100.0,
        help="the least time between two syncs of a queue (default: 100); 0: reply when the change is on disk, with "
        "one sync for all waiting clients (group commit)",
    )
    durability.add_argument("--no-sync", action="store_true", help="never sync; the system decides")
    where = parser.add_argument_group("where the server listens: HOST:PORT or unix:PATH")
    where.add_argument(
        "--listen", metavar="ADDRESS", action="append", help="memcache (default: 127.0.0.1:22133); may be repeated"
    )
    where.add_argument("--text", metavar="ADDRESS", action="append", help="the text protocol, usually port 2222")
    where.add_argument("--thrift", metavar="ADDRESS", action="append", help="thrift, usually port 2229")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-open-reads",
        metavar="N",
        type=common.positive,
        help="reads that one client may have open on a queue (default: 1)",
    )
    limits.add_argument(
        "--max-connections", metavar="N", type=common.positive, help="the default is what the system allows"
    )
    _add_metrics(parser)
    parser.add_argument("-u", "--user", metavar="USER", help="become this user when the addresses are bound")


def _add_ship(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shipping")
    group.add_argument("--ship", metavar="URL", help="ship the jobs to this store, such as s3://bucket/prefix")
    group.add_argument(
        "--ship-acks",
        choices=("disk", "shipped"),
        help="when to reply. disk: as without --ship (default). shipped: when the change is in the store, with one "
        "wait for all waiting clients",
    )
    group.add_argument(
        "--ship-lease",
        metavar="SECONDS",
        type=float,
        help="let a standby take the jobs over if this server has written nothing for so long (at least 5)",
    )
    group.add_argument(
        "--standby",
        action="store_true",
        help="follow the jobs of another server in --dir, and serve them when it has gone or hands them over",
    )
    add_store_options(group, "--ship-option")


def _ship_of(args: argparse.Namespace) -> Ship | None:
    """How the jobs are shipped. Raises ``CommandError``."""
    if args.ship is None:
        if args.ship_acks or args.ship_option or args.ship_lease:
            raise CommandError("--ship-acks, --ship-lease and --ship-option go with --ship", status=2)
        return None
    if args.dir is None:
        raise CommandError("--ship goes with --dir: jobs in memory are not shipped", status=2)

    from kestrelpy.ship import Ship

    try:
        return Ship(
            args.ship, acks=args.ship_acks or "disk", lease=args.ship_lease, options=store_options(args.ship_option)
        )
    except ValueError as error:
        raise CommandError(f"--ship-lease: {error}", status=2) from None


def _in_other_words(error: KestrelError) -> Exception:
    """An error of a server whose jobs are shipped, in the words of the command line; any other as it is."""
    from kestrelpy.ship import Fenced, OwnerAlive, ShippingRequired

    if isinstance(error, ShippingRequired):
        return CommandError(f"these jobs are shipped to {error.url}: use --ship, or first kestrelpy ship detach")
    return CommandError(str(error), status=FENCED) if isinstance(error, Fenced | OwnerAlive) else error


def _add_on_corruption(parser: argparse.ArgumentParser, consequence: str = "") -> None:
    parser.add_argument(
        "--on-corruption",
        choices=("raise", "quarantine"),
        default="raise",
        help="what to do if records in --dir are damaged. raise: end with an error (default). quarantine: continue "
        f"without them{consequence}",
    )


def _serve_beanstalk(args: argparse.Namespace) -> int:
    from kestrelpy.errors import QueueLocked, WrongKind
    from kestrelpy.server import serve

    systemd = Supervisor()

    def said(server: BeanstalkServer) -> None:
        for place in server.listens_at:
            _say(f"listening at {place}")
        if page is not None:
            measuring.show(page, server, "serve")
        _is_ready(systemd, server)

    def obeyed(number: signal.Signals) -> None:
        said = {
            signal.SIGUSR1: "draining: puts are refused from now on",
            signal.SIGUSR2: "stopped by SIGUSR2: handing the jobs over",
        }
        text = said.get(number, f"stopped by {number.name}")
        _say(text)
        (systemd.status if number == signal.SIGUSR1 else systemd.stopping)(text)

    if args.dir == "":  # perhaps from a shell variable that is not set
        raise CommandError("-b: the name of the folder is empty; remove -b to keep the jobs in memory", status=2)
    if args.max_job_bytes > _MAX_JOB_BYTES:
        raise CommandError(f"-z: at most {_MAX_JOB_BYTES} bytes, not {args.max_job_bytes}", status=2)
    ship = _ship_of(args)
    if args.standby and ship is None:
        raise CommandError("--standby goes with --ship", status=2)
    max_connections = args.max_connections or _room_for_connections()
    with contextlib.ExitStack() as opened:
        sockets = [one for _, one in passed_sockets(opened)] or _bound_sockets(args, opened)
        page = _page(args, opened)
        if args.user is not None:
            _become(args.user)
        try:
            serve_now = partial(
                serve,
                args.dir,
                sockets=sockets,
                sync="never" if args.no_sync else args.sync_ms / 1000 if args.sync_ms else "always",
                max_connections=max_connections,
                segment_bytes=max(args.segment_bytes, args.max_job_bytes + _ROOM_BESIDE_A_JOB),
                max_job_bytes=args.max_job_bytes,
                max_jobs=args.max_jobs,
                max_bytes=args.max_bytes,
                max_tubes=args.max_tubes,
                max_attempts=args.max_attempts,
                on_corruption=args.on_corruption,
                ship=ship,
                on_start=said,
                on_signal=obeyed,
            )
            if ship is None or not args.standby:
                serve_now()
            else:
                _follow_and_serve(args.dir, ship, serve_now, systemd)
        except QueueLocked as error:
            raise CommandError(str(error), status=LOCKED) from None
        except WrongKind:  # a ValueError too, but the folder is wrong, not the options
            raise
        except ValueError as error:  # limits that contradict each other, or a URL that is none
            raise CommandError(str(error), status=2) from None
        except KestrelError as error:
            raise _in_other_words(error) from None
    return 0


def _follow_and_serve(directory: str, ship: Ship, serve_now: Callable[..., None], systemd: Supervisor) -> None:
    """Follow the jobs until they may be taken over, and then serve them. If another one was quicker, follow on."""
    from kestrelpy.ship import Fenced, OwnerAlive, Standby

    while True:
        with (
            unheeded(signal.SIGUSR1, signal.SIGUSR2) as came,
            Standby(directory, _NAME, ship.store, options=ship.options) as standby,
        ):
            if not _wait_for_jobs(standby, came, systemd):
                return
            try:
                serve_now(open_queue=lambda _directory, **options: standby.take_over(**options))
            except (Fenced, OwnerAlive) as error:
                if standby.status().state == "taken":
                    raise
                _say(f"another one was quicker: {error}")
                continue
            return


def _wait_for_jobs(standby: Standby, unheeded_signals: list[signal.Signals], systemd: Supervisor) -> bool:
    """Wait until they may be taken over; False if a signal has come before. Says how it goes."""
    said = ""
    try:
        while True:
            is_over = standby.wait(LOOK_SECONDS)
            while unheeded_signals:
                _say(f"{unheeded_signals.pop(0).name} changes nothing: this is a standby, and has no jobs yet")
            status = standby.status()
            trouble = f": {status.last_error}" if status.state in ("away", "full", "damaged") else ""
            owner = f", whose owner is {status.owner}" if status.owner else ""
            text = f"standby, {status.state}{owner}{trouble}"
            if text != said:
                said = text
                _say(text)
                systemd.ready(text)  # to follow is its service
            systemd.beat()
            if is_over:
                return True
    except Interrupted as signal_:
        text = f"stopped by {signal.Signals(signal_.number).name}"
        _say(text)
        systemd.stopping(text)
        return False


def _is_ready(systemd: Supervisor, server: QueueServer) -> None:
    systemd.ready("listening at " + ", ".join(server.listens_at))
    systemd.beat_on(server.loop)


def _serve_kestrel(args: argparse.Namespace) -> int:
    from kestrelpy.errors import QueueLocked
    from kestrelpy.server import ConfigError, KestrelServer, run

    systemd = Supervisor()

    def said(server: KestrelServer) -> None:
        _say("listening at " + ", ".join(server.listens_at))
        if page is not None:
            measuring.show(page, server, "serve")
        _is_ready(systemd, server)

    def obeyed(number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _say(f"{number.name}: the configuration was read again, or the log says why not")
            systemd.reloaded()
        else:
            _say(f"stopped by {number.name}")
            systemd.stopping(f"stopped by {number.name}")

    if args.dir == "":
        raise CommandError(
            "--dir: the name of the folder is empty; remove --dir to keep the queues in memory", status=2
        )
    if args.config == "":
        raise CommandError("--config: the name of the file is empty", status=2)
    options = {
        "listen": args.listen,
        "text": args.text,
        "thrift": args.thrift,
        "max_open_transactions": args.max_open_reads,
        "max_connections": args.max_connections,
    }
    try:
        with contextlib.ExitStack() as opened:
            server = KestrelServer(
                args.dir,
                config=_reader_of(args.config),
                sync_journal="never" if args.no_sync else args.sync_ms / 1000,
                on_corruption=args.on_corruption,
                sockets=_by_protocol(passed_sockets(opened)),
                **{name: value for name, value in options.items() if value is not None},
            )
            room = _room_for_connections()  # it also lets the queues have as many files as the system allows
            server.max_connections = server.max_connections or room
            server.bind(lambda place, default_port: _bound_at(place, default_port, opened))
            page = _page(args, opened)
            if args.user is not None:
                _become(args.user)
            run(server, on_start=said, on_signal=obeyed)
    except QueueLocked as error:
        raise CommandError(str(error), status=LOCKED) from None
    except ConfigError as error:
        raise CommandError(f"{args.config or 'configuration'}: {error}", status=2) from None
    return 0


def _by_protocol(passed: Sequence[PassedSocket]) -> dict[str, list[socket.socket]]:
    """A socket named ``text`` or ``thrift`` is for that protocol; any other is for memcache."""
    found: dict[str, list[socket.socket]] = {}
    for name, one in passed:
        found.setdefault(name if name in ("text", "thrift") else "memcache", []).append(one)
    return found


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve the figures to Prometheus there, at /metrics; there is no password, so choose who reaches it",
    )


def _page(args: argparse.Namespace, opened: contextlib.ExitStack) -> MetricsServer | None:
    """The page of ``--metrics``, which is closed after the server."""
    return None if args.metrics is None else opened.enter_context(measuring.listening(args.metrics, "--metrics"))


def _reader_of(path: str | None) -> Any:
    """What reads the configuration, now and at each reload."""
    if path is None:
        return ""

    from kestrelpy.server import ConfigError

    def read() -> str:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except UnicodeDecodeError:
            raise ConfigError("not UTF-8") from None
        except OSError as error:
            raise ConfigError(error.strerror or str(error)) from None

    return read


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed: no reason to stop
        sys.stderr.write(f"kestrelpy serve: {what}\n")
        sys.stderr.flush()


def _milliseconds(text: str) -> float:
    try:
        return common.seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, not {text}") from None


# -- sockets -----------------------------------------------------------------------------------------------------------


def _addresses(args: argparse.Namespace) -> list[str]:
    if args.listen:
        if args.l is not None or args.p is not None:
            raise CommandError("--listen has the address and the port: remove -l and -p", status=2)
        return list(args.listen)
    host = "127.0.0.1" if args.l is None else args.l
    if host.startswith("unix:"):
        return [host]
    port = DEFAULT_PORT if args.p is None else args.p
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]


def _bound_sockets(args: argparse.Namespace, opened: contextlib.ExitStack) -> list[socket.socket]:
    return [one for text in _addresses(args) for one in _bound_at(text, DEFAULT_PORT, opened)]


def _bound_at(text: str, default_port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    """Sockets that are bound to this address."""
    from kestrelpy.server import parse_address

    try:
        address = parse_address(text, default_port)
        if isinstance(address, str):
            return [_bound_to_path(address, opened)]
        return _bound_to_host(*address, opened)
    except ValueError as error:
        raise CommandError(str(error), status=2) from None
    except OSError as error:
        raise CommandError(f"cannot listen at {text}: {error.strerror or error}") from None


def _bound_to_host(host: str, port: int, opened: contextlib.ExitStack) -> list[socket.socket]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        one = opened.enter_context(socket.socket(family, kind, protocol))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        bound.append(one)
    return bound


def _is_listened_on(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        return one.connect_ex(path) == 0


def _bound_to_path(path: str, opened: contextlib.ExitStack) -> socket.socket:
    """Bind to a path. Replaces a socket of an earlier server, but no other file, and no socket that a server uses."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_listened_on(path):
            os.unlink(path)
    one = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    one.bind(path)
    one.listen()  # now: opening the queue may take a while, and no server may take this for an abandoned socket
    return one


# -- the process -------------------------------------------------------------------------------------------------------


def _become(user: str) -> None:
    import pwd

    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise CommandError(f"-u: there is no user {user!r}") from None
    try:
        os.initgroups(user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    except OSError as error:
        raise CommandError(f"-u: cannot become {user}: {error.strerror}") from None


def _room_for_connections() -> int:
    """Raise the limit of open files as far as that goes. Returns it, without the files that the server needs itself."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return max(1, soft - _OPEN_FILES_FOR_ITSELF) if soft != resource.RLIM_INFINITY else 1 << 20


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"must be a port, not {text!r}")
    return int(text)
