"""``python -m bench.crash``: kill, cut the power, count, and write the table."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.crash import __doc__ as how
from bench.crash import ends, page, rounds
from bench.crash.peers import PEERS, Peer
from bench.report import _version, machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``argv`` asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.crash", description=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="rounds that end with SIGKILL, for each (100)")
    parser.add_argument("--cuts", type=int, default=100, help="rounds that end with a power cut (100); needs root")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", metavar="NAMES", help="libraries with one of these in their names, with commas between"
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts there; - for standard output, no table")
    parser.add_argument("--write", metavar="FILE", help="write the page of the documents there")
    parser.add_argument("--dir", metavar="DIR", help="put the queues there (default: where temporary files go)")
    args = parser.parse_args(argv)
    if min(args.kills, args.cuts) < 0:
        parser.error("--kills and --cuts must not be negative")
    wanted = args.only.split(",") if args.only else [""]
    chosen = [peer for peer in PEERS if any(part in peer.name for part in wanted)]
    if not chosen:
        parser.error(f"no library of that name; there are {', '.join(peer.name for peer in PEERS)}")
    facts = measure(chosen, args)
    if args.json == "-":
        print(json.dumps(facts, indent=1))
    else:
        print(page.text(facts), end="")
        if args.json:
            Path(args.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if args.write:
        Path(args.write).write_text(page.page(facts), encoding="utf-8")
    return 0


def measure(chosen: Sequence[type[Peer]], args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all that are chosen and installed, with what there is to know about the machine."""
    left_out = {} if args.cuts else {"cut": "none were asked for"}
    if not args.kills:
        left_out["kill"] = "none were asked for"
    if args.cuts and (reason := ends.reason_no_cuts()):
        left_out["cut"] = reason
    peers = []
    with tempfile.TemporaryDirectory(prefix="kestrelpy-crash-", dir=args.dir) as folder:
        about = machine(Path(folder))
        for peer in chosen:
            results: dict[str, Counter[str]] = {}
            reason = ""
            try:
                peer.load()
            except ImportError as error:
                reason = f"{error.name} is not installed"
            else:
                results = {
                    end: _rounds(peer, end, Path(folder), args) for end in ("kill", "cut") if end not in left_out
                }
            peers.append(
                {
                    "name": peer.name,
                    "version": version_of(peer),
                    "settings": peer.settings,
                    "promise": peer.promise,
                    "left_out": reason,
                    "results": {end: {name: counts[name] for name in counts} for end, counts in results.items()},
                }
            )
    settings = {"kills": args.kills, "cuts": args.cuts, "seed": args.seed}
    today = datetime.date.today().isoformat()
    return {"machine": about, "date": today, "settings": settings, "left_out": left_out, "peers": peers}


def version_of(peer: type[Peer]) -> str:
    """As installed; of what runs from its source tree, as that has it."""
    if not peer.package:
        return f"Python {sys.version.split()[0]}"
    if peer.package == "kestrelpy":
        return str(import_module("kestrelpy").__version__)
    return _version(peer.package)


def _rounds(peer: type[Peer], end: str, scratch: Path, args: argparse.Namespace) -> Counter[str]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        place = Path(folder)
        with nullcontext(ends.Kill(place)) if end == "kill" else ends.cuts(place) as chosen:
            counts = rounds.run(peer, chosen, args.kills if end == "kill" else args.cuts, args.seed)
    return Counter({name: counts[name] for name in (*page.COLUMNS, "rounds", "stopped by itself")})


if __name__ == "__main__":
    sys.exit(main())
