# PYTHON_ARGCOMPLETE_OK
"""The command line: ``kestrelpy``, also ``python -m kestrelpy``.

Rules:
1. The commands use the public interface of the library only.
2. A command is a function ``(args) -> int`` in the module of its group. This module also adds the command's parser.
3. Exit status: 0 done; 1 nothing was there, or damage was found, or the command was refused; 2 wrong use. After Ctrl-C,
   a closed pipe and SIGTERM it is 130, 141 and 143, without a message.
4. An error is one line on standard error, never a traceback (unless KESTRELPY_TRACEBACK is set).
5. Only ``put`` makes a queue, ``serve`` the queue of its jobs, ``restore`` and ``standby`` one that a store has. No
   other command creates a file, except ``lake`` and ``report`` in the folder that their arguments name, ``outbox init``
   the database that it is given, ``ship rejoin`` a folder beside the queue, and ``ship check`` and ``ship once``
   objects in their store.
6. What others have put is escaped before a terminal sees it. The password of a URL is never shown.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from kestrelpy.cli import (
    analysing,
    dead,
    demo,
    exporting,
    looking,
    managing,
    measuring,
    moving,
    outbox,
    repairing,
    serving,
    shipping,
    showing,
    watching,
    working,
)
from kestrelpy.cli._common import CommandError, os_error_text
from kestrelpy.cli._signals import Interrupted, unwinding
from kestrelpy.errors import InvalidName, KestrelError, NoDefaultReader

__all__ = ["build_parser", "main"]

DONE, FAILED, WRONG_USE = 0, 1, 2

_EPILOG = """\
exit status: 0 done; 1 nothing was there, or damage was found, or the command was refused (a line on standard error says
why); 2 wrong use.

  seq 1000 | kestrelpy put /tmp/queues jobs       # each line is an item
  kestrelpy get /tmp/queues jobs --max 3          # the items are committed when they are written
  kestrelpy get /tmp/queues jobs --follow         # works while another process puts
  kestrelpy stat /tmp/queues jobs
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports wrong use in one line, as all other errors are reported."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """As always; what is left over is reported by the command, with what is mostly wrong about it."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            refusing: _Parser = found.refusing
            refusing._refuse(rest, args)
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As always; ``refusing`` is the parser that something was left over for: the innermost one, of a command."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and not hasattr(found, "refusing"):
            found.refusing = self
        return found, rest

    def _refuse(self, rest: Sequence[str], args: Sequence[str]) -> NoReturn:
        """Report the ``rest`` of the arguments ``args``. An option with a slip comes first: its value is left, too."""
        options = [each.partition("=")[0] for each in rest if each.startswith("-") and each.strip("-")]
        if options:
            known = {name.strip("-"): name for name in self._option_string_actions}
            close = difflib.get_close_matches(options[0].strip("-"), known, n=1)
            hint = f": did you mean {known[close[0]]}?" if close else ""
            self.error(f"unrecognized option {options[0]}{hint}")
        comes_late = any(each.startswith("-") for each in args[: args.index(rest[0])])
        why = ": arguments without -- go before the options" if comes_late else ""
        self.error(f"unrecognized arguments: {' '.join(rest)}{why}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``args.run`` is the command's function."""
    parser = _Parser(
        prog="kestrelpy",
        description="Durable blocking queues: put and get items, look at queues and check them, from a shell.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kestrelpy {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    demo.add_commands(commands)
    looking.add_listing_commands(commands)
    moving.add_commands(commands)
    looking.add_content_commands(commands)
    exporting.add_commands(commands)
    repairing.add_commands(commands)
    watching.add_commands(commands)
    showing.add_commands(commands)
    working.add_commands(commands)
    managing.add_commands(commands)
    dead.add_commands(commands)
    analysing.add_commands(commands)
    serving.add_commands(commands)
    outbox.add_commands(commands)
    shipping.add_commands(commands)
    measuring.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. ``argv``: the arguments; ``None``: those of this process."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        _open_streams()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        from kestrelpy.cli._completion import complete

        complete(build_parser())
    try:
        args = managing.bench_arguments(arguments) or build_parser().parse_args(arguments)
    except SystemExit as done:  # argparse has written the message
        return done.code if isinstance(done.code, int) else WRONG_USE
    try:
        with unwinding():
            status: int = args.run(args)
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        _abandon_output()
        return 128 + signal.SIGPIPE
    except Interrupted as signalled:
        return 128 + signalled.number
    except CommandError as error:
        return _report(args.command, str(error), error.status)
    except InvalidName as error:
        return _report(args.command, str(error), WRONG_USE)
    except NoDefaultReader as error:  # its own text names a call: here, there is an option
        names = ", ".join(error.readers)
        text = f"queue {error.queue_name!r} has named readers ({names}) and so no default reader: use --reader NAME"
        return _report(args.command, text, WRONG_USE)
    except OSError as error:
        _abandon_output()
        return _report(args.command, os_error_text(error), FAILED)
    except KestrelError as error:
        return _report(args.command, str(error), FAILED)
    except Exception as error:
        if os.environ.get("KESTRELPY_TRACEBACK"):
            raise
        text = f"this should not happen: {type(error).__name__}: {error} (set KESTRELPY_TRACEBACK=1 to see where)"
        return _report(args.command, text, FAILED)


def _report(command: str, text: str, status: int) -> int:
    line = " ".join(text.split())
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
        sys.stderr.write(f"kestrelpy {command}: {line}\n")
        sys.stderr.flush()
    return status


def _open_streams() -> None:
    """Replace standard streams that the shell has closed (``<&-``, ``>&-``) by the null device.

    Standard output writes a character that its encoding does not have as an escape.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as above
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _abandon_output() -> None:
    """Flush standard output. If that fails, send the interpreter's last flush to the null device."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
    except AttributeError:
        return  # there is no standard output


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kestrelpy")
    except PackageNotFoundError:
        return "(not installed)"
