"""The command ``export``: a queue as Parquet, as Arrow IPC, or as lines of JSON.

Rules:
1. A file is whole, or not there: it is written under another name beside its place, synced, and then gets its name.
2. At most one row group of Parquet, or one batch, is in memory.
3. pyarrow is imported only when a format needs it. Lines of JSON need no extra: they are those of ``scan --json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from kestrelpy.cli import _common, _records

if TYPE_CHECKING:
    from kestrelpy.cli._records import Commands

WRONG_USE = 2
GROUP_ROWS = 128 << 10
"""The most rows of a row group, as in a lake."""
GROUP_BYTES = 64 << 20
"""About the most bytes of a row group, before compression."""
_PIECE_BYTES = 1 << 20
_NAME_BYTES = 200


def add_commands(commands: Commands) -> None:
    """Add the parser of ``export``."""
    export = commands.add_parser(
        "export",
        help="write a queue as Parquet, Arrow or lines of JSON",
        description="Write the items of all segments that are still there, whether they were read or not, as they are "
        "in the journal. Read-only, takes no lock. parquet and arrow need the extra [arrow].",
    )
    export.add_argument("directory", metavar="DIR", help="the folder of the queue, or the URL of its store")
    export.add_argument("queue", metavar="QUEUE", help="the queue's name")
    export.add_argument(
        "--format",
        choices=("parquet", "jsonl", "arrow"),
        required=True,
        help="Parquet; JSON as scan --json writes it; Arrow IPC, as a stream, or with --output as a file",
    )
    export.add_argument("--output", metavar="FILE", help="write this file, as a whole, instead of standard output")
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    export.add_argument(
        "--text",
        action="store_true",
        help="with jsonl: contents that are UTF-8 as text, in the field text; others in data",
    )
    _records.add_range(export)
    export.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """``kestrelpy export``. An empty queue is exported, too: as no rows."""
    _check(args)
    if args.output is None:
        _write_to(args, Output(sys.stdout.buffer))
        return 0
    with whole_file(args.output, force=args.force) as file:
        output = Output(file)
        _write_to(args, output)
    print(f"{_common.binary_size(output.size)}: {args.output}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise before anything is written if the command makes no sense."""
    is_lines = args.format == "jsonl"
    if args.text and not is_lines:
        raise _common.CommandError("--text goes with --format jsonl", status=WRONG_USE)
    if args.force and args.output is None:
        raise _common.CommandError("--force goes with --output", status=WRONG_USE)
    if args.output is None and not is_lines and sys.stdout.isatty():
        message = f"{args.format} is no text for a terminal: name a file with --output, or redirect it"
        raise _common.CommandError(message, status=WRONG_USE)
    if "://" in args.directory:
        if is_lines:
            raise _common.CommandError("jsonl is exported from folders, not from stores", status=WRONG_USE)
        return
    if args.archive_dir is None:
        _common.require_queue(args.directory, args.queue)
    _common.refuse_work_queue(args.directory, args.queue)


def _write_to(args: argparse.Namespace, output: Output) -> None:
    write = _write_lines if args.format == "jsonl" else _write_batches
    try:
        write(args, output)
        output.flush()
    except BaseException:
        output.stop()
        raise


def _write_batches(args: argparse.Namespace, output: Output) -> None:
    try:
        from kestrelpy.arrow import read

        reader = read(
            args.directory,
            args.queue,
            archive=args.archive_dir,
            start_id=args.start_id,
            end_id=args.stop_id,
            start_time=args.start_time,
            end_time=args.stop_time,
        )
    except ImportError as missing:
        raise _common.CommandError(str(missing), status=WRONG_USE) from None
    _WRITERS[args.format](reader, output, args.output is not None)


class Output:
    """Bytes on their way out. ``size``: how many there were. pyarrow takes this for a file.

    After an error, or ``stop``, nothing more is written: pyarrow's writers write once more when they are deleted.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_stopped = False
        self.size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Write all of ``data``, any buffer. Raises ``OSError``, the first time."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        if self._is_stopped:
            return size
        try:
            while rest:  # with PYTHONUNBUFFERED standard output is the raw file, which may write only a part
                rest = rest[self._file.write(rest) :]
        except BaseException:
            self._is_stopped = True
            raise
        self.size += size
        return size

    def flush(self) -> None:
        """Raises ``OSError``, the first time."""
        if not self._is_stopped:
            self._file.flush()

    def stop(self) -> None:
        self._is_stopped = True

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Whoever has made the file closes it."""


@contextmanager
def whole_file(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """A new file that gets the name ``path`` at the end of the block, and is deleted if the block raises.

    ``force``: replace a file of that name. Raises ``CommandError`` if there is one, and ``OSError``.
    """
    target = os.path.realpath(path)
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if not stat.S_ISREG(mode):
            raise _common.CommandError(f"{path}: this is no file that could be replaced", status=WRONG_USE)
        if not force:
            raise _common.CommandError(f"{path} is there already; --force replaces it", status=WRONG_USE)
    folder, name = os.path.split(target)
    begins = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])  # a name may be as long as the file system takes
    temporary = os.path.join(folder, f".{begins}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, target)
        else:
            _name_new(temporary, path, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _name_new(temporary: str, path: str, target: str) -> None:
    """Give ``temporary`` the name ``target``, which nobody else has taken meanwhile."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise _common.CommandError(f"{path} is there by now; --force replaces it", status=WRONG_USE) from None
    except OSError:  # a file system without links
        os.rename(temporary, target)
        return
    os.unlink(temporary)


# -- formats ---------------------------------------------------------------------------------------------------------


def _write_lines(args: argparse.Namespace, output: Output) -> None:
    records = _records.within_range(args)
    line: Callable[[Any], str] = _records.text_json_line if args.text else _records.json_line
    lines: list[str] = []
    size = 0
    try:
        for record in records:
            lines.append(line(record))
            size += len(lines[-1])
            if size >= _PIECE_BYTES:
                output.write("".join(lines).encode("ascii"))
                lines, size = [], 0
    finally:  # what is before damage is written, as scan does
        output.write("".join(lines).encode("ascii"))


def _write_arrow(reader: Any, output: Output, is_file: bool) -> None:
    import pyarrow as pa

    writer = (pa.ipc.new_file if is_file else pa.ipc.new_stream)(output, reader.schema)
    for batch in reader:
        writer.write_batch(batch)
    writer.close()


def _write_parquet(reader: Any, output: Output, is_file: bool) -> None:
    del is_file
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = pq.ParquetWriter(
        output,
        reader.schema,
        compression="zstd",
        use_dictionary=["queue", "segment"],
        write_statistics=["id", "added", "expires", "error_count"],
    )
    for group in _groups(reader):
        writer.write_table(pa.Table.from_batches(group), GROUP_ROWS)
    writer.close()


def _groups(reader: Any) -> Iterator[list[Any]]:
    """The batches, in lists for one row group each."""
    group: list[Any] = []
    rows = size = 0
    for batch in reader:
        if group and (rows + batch.num_rows > GROUP_ROWS or size + batch.nbytes > GROUP_BYTES):
            yield group
            group, rows, size = [], 0, 0
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if group:
        yield group


_WRITERS: dict[str, Callable[[Any, Output, bool], None]] = {"arrow": _write_arrow, "parquet": _write_parquet}
