"""Seeded damages to the files of a queue: what disks, copies and hands do to them. ``damage`` never changes its input.

Each takes ``(files, generator, case, other)``, where ``other`` is another queue's case, changes ``files`` in place and
does not care whether the checksums still hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tests.fuzz.reference import Case

Files = dict[str, bytes]
Maker = Callable[[Files, random.Random, Case, Case], None]
PAGE = 512
EXTREMES = [0, 1, 2, 0x7F, 0x80, 0xFF, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1]


def pick(files: Mapping[str, bytes], generator: random.Random, ending: str = "") -> str:
    """The name of one of the files, most often a segment."""
    names = sorted(name for name in files if name.endswith(ending)) or sorted(files)
    segments = [name for name in names if name.endswith(".segment")]
    return generator.choice(segments if segments and generator.random() < 0.7 else names)


def place(data: bytes, generator: random.Random) -> int:
    """An offset, nearly always in the part that is in use."""
    used = len(data.rstrip(b"\0"))
    return generator.randrange(max(1, used if generator.random() < 0.95 else len(data)))


def overwrite(files: Files, name: str, at: int, new: bytes) -> None:
    data = files[name]
    files[name] = data[:at] + new[: max(0, len(data) - at)] + data[at + len(new) :]


def flip_bits(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    for _ in range(generator.choice([1, 1, 1, 2, 8])):
        at = place(files[name], generator)
        if files[name]:
            overwrite(files, name, at, bytes([files[name][at] ^ 1 << generator.randrange(8)]))


def byte_run(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    size = generator.choice([1, 4, 32, 100, 600])
    new = generator.choice([b"\0", b"\xff", b"A"]) * size if generator.random() < 0.5 else generator.randbytes(size)
    overwrite(files, name, place(files[name], generator), new)


def zeroed_page(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    overwrite(files, name, place(files[name], generator) // PAGE * PAGE, bytes(PAGE))


def swapped_blocks(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    size = generator.choice([16, 64, PAGE])
    data = files[name]
    first, second = (place(data, generator) // size * size for _ in "12")
    overwrite(files, name, first, data[second : second + size])
    overwrite(files, name, second, data[first : first + size])


def copied_block(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    """A block written to the wrong place, of the same file or another."""
    name, source = pick(files, generator), pick(files, generator)
    size = generator.choice([16, 64, PAGE])
    data = files[source]
    at = place(data, generator) // size * size
    overwrite(files, name, place(files[name], generator) // size * size, data[at : at + size])


def inserted_bytes(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    data = files[name]
    at, source = place(data, generator), place(data, generator)
    files[name] = data[:at] + data[source : source + generator.choice([1, 8, 40, 132])] + data[at:]


def removed_bytes(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    data = files[name]
    at = place(data, generator)
    files[name] = data[:at] + data[at + generator.choice([1, 8, 40, 132, PAGE]) :]


def truncated(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    files[name] = files[name][: generator.choice([0, place(files[name], generator), place(files[name], generator)])]


def extended(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    size = generator.choice([1, 96, PAGE])
    files[name] += bytes(size) if generator.random() < 0.5 else generator.randbytes(size)


def appended_file(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name, source = pick(files, generator), pick(files, generator)
    files[name] += files[source]


def deleted_file(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    del files[pick(files, generator)]


def copied_file(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    """One file's content under the name of another of the same kind."""
    name = pick(files, generator)
    files[name] = files[pick(files, generator, name[name.rindex(".") :])]


def swapped_files(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    first = pick(files, generator)
    second = pick(files, generator, first[first.rindex(".") :])
    files[first], files[second] = files[second], files[first]


def renamed_segment(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    """A segment, or a copy of it, with another number."""
    name = pick(files, generator, ".segment")
    new = f"jobs.{generator.choice([1, 1_700_000_001_001, 1_700_000_009_999]):013d}.segment"
    if name.endswith(".segment"):
        files[new] = files[name] if generator.random() < 0.5 else files.pop(name)


def file_of_another_queue(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(files, generator)
    source = pick(other.files, generator, name[name.rindex(".") :])
    files[name] = other.files[source]


def added_file_of_another_queue(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    name = pick(other.files, generator)
    files.setdefault(name, other.files[name])


def older_version(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    """A file as it was at an earlier moment, or one that had been deleted since."""
    if case.older:
        older = generator.choice(case.older)
        if older:
            name = pick(older, generator)
            files[name] = older[name]


def extreme_field(files: Files, generator: random.Random, case: Case, other: Case) -> None:
    """A field, as it might be, set to an extreme; the checksum is not made right."""
    name = pick(files, generator)
    size = generator.choice([2, 4, 8])
    value = generator.choice(EXTREMES) & ((1 << 8 * size) - 1)
    overwrite(files, name, place(files[name], generator) // 4 * 4, value.to_bytes(size, "little"))


DAMAGES: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        flip_bits, byte_run, zeroed_page, swapped_blocks, copied_block, inserted_bytes, removed_bytes, truncated,
        extended, appended_file, deleted_file, copied_file, swapped_files, renamed_segment, file_of_another_queue,
        added_file_of_another_queue, older_version, extreme_field,
    )
}  # fmt: skip


FOREIGN = (file_of_another_queue.__name__, added_file_of_another_queue.__name__)


def damage(case: Case, other: Case, generator: random.Random) -> tuple[str, Files]:
    """One damage, or two; what it was, and the files after it.

    Another queue's file stays as it is: with its header gone nothing says whose it is.
    """
    files = dict(case.files)
    kinds = [generator.choice(list(DAMAGES)) for _ in range(1 if generator.random() < 0.8 else 2)]
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if kind not in FOREIGN] or ["flip_bits"]
    for kind in kinds:
        if files:
            DAMAGES[kind](files, generator, case, other)
    return kinds[0] if len(kinds) == 1 else "two damages", files
