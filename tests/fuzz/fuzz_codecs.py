"""Coverage-guided fuzzing of the codecs: ``python -m tests.fuzz.fuzz_codecs SECONDS [TARGET ...]``.

Needs atheris (``pip install atheris``; a wheel for CPython 3.11 is on PyPI), which the test suite does not. Each target
runs in a process of its own for its share of the time, starts from ``corpus/TARGET`` and writes what it finds new to
``FOUND/TARGET`` (the folder ``--found``, a temporary one otherwise). Prints executions for each. ``--minimise`` then
makes ``corpus/TARGET`` the smallest set of inputs that covers as much. An input that breaks an invariant is printed as
a reproducer, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
MOST_BYTES = 1024


def fuzz(target: str, arguments: list[str]) -> None:
    """In a process of its own: does not return."""
    import atheris

    with atheris.instrument_imports(include=["kestrelpy", "json"]):
        from tests.fuzz.codec_targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[target])
    atheris.Fuzz()


def run(target: str, seconds: int, found: Path, *, minimise: bool = False) -> tuple[int, bool]:
    """Fuzz one target for so long; how many executions, and whether nothing broke."""
    for folder in (found / target, CORPUS / target):
        folder.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-max_len={MOST_BYTES}",
        f"-artifact_prefix={found}/{target}-",
        "-verbosity=0",
    ]
    command = [sys.executable, "-m", "tests.fuzz.fuzz_codecs", "--inside", target, *flags, "-print_final_stats=1"]
    done = subprocess.run(
        [*command, str(found / target), str(CORPUS / target)], capture_output=True, text=True, check=False
    )
    executions = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    if done.returncode != 0:
        print(done.stderr[-4000:], file=sys.stderr)
    elif minimise:
        shrink(target, found)
    return int(executions[1]) if executions else 0, done.returncode == 0


def shrink(target: str, found: Path) -> None:
    """Make the corpus of a target few and small inputs that reach every step from line to line that all of them do."""
    from tests.fuzz.codec_targets import TARGETS

    inputs = {path.read_bytes() for folder in (found, CORPUS) for path in (folder / target).iterdir()}
    reached: set[tuple[object, int, int]] = set()
    chosen = []
    for data in sorted(inputs, key=lambda data: (len(data), data)):
        steps = steps_of(TARGETS[target], data)
        if steps - reached:
            reached |= steps
            chosen.append(data)
    for path in (CORPUS / target).iterdir():
        if not path.name.startswith("made"):  # by hand
            path.unlink()
    for number, data in enumerate(chosen):
        (CORPUS / target / f"{number:03d}").write_bytes(data)


def steps_of(target: Callable[[bytes], None], data: bytes) -> set[tuple[object, int, int]]:
    """Which steps from line to line of the library, or of the standard library's JSON, the input takes."""
    steps: set[tuple[object, int, int]] = set()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code, last = frame.f_code, [0]
        if "kestrelpy" not in code.co_filename and "json" not in code.co_filename:
            return None

        def step(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            steps.add((code, last[0], frame.f_lineno))
            last[0] = frame.f_lineno
            return step

        return step

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the codecs.")
    parser.add_argument("seconds", type=int, help="for all targets together")
    parser.add_argument("targets", nargs="*", help="by default all")
    parser.add_argument("--found", type=Path, help="where new inputs go")
    parser.add_argument("--minimise", action="store_true", help="make the corpus new")
    options = parser.parse_args()
    from tests.fuzz.codec_targets import TARGETS

    targets = options.targets or list(TARGETS)
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        for target in targets:
            found = options.found or Path(temporary)
            count, held = run(target, max(1, options.seconds // len(targets)), found, minimise=options.minimise)
            good = good and held
            print(f"{target}: {count:,} executions{'' if held else ', BROKEN'}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main())
