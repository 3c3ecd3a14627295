"""The rules of the house, held by a test over the source tree. The tables below are the rules.

1. Imports go down only, in the layers of ``LAYERS``, and not in a circle; what only the type checker imports too.
2. Functions fit a screen, modules a sitting.
3. What is banned outside its module is named in ``BANS``, each with what to use instead.
4. Every public name is exported and documented.
5. Links in the documents lead somewhere; the commands in them exist.
6. A private name of an object is used by its own module (``PRIVATE_USES`` has the rest). A class name is used once
   (``SAME_NAMES`` has the rest). No class is the base of one other and nothing else.
Each check is a function from source text to complaints, and is itself tested on a planted fault.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import shlex
import subprocess
import tokenize
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 650
MAX_PROSE_COLUMNS = 100
UNWRAPPED = {"locking.md", "security.md", "comparison.md", "ledger.md"}
"""Two pages that stay as they are, and two that programs write."""

TOP = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "bench",
    "contrib",
    "docs",
    "examples",
    "kestrelpy",
    "mkdocs.yml",
    "pyproject.toml",
    "tests",
}
"""All there is at the top."""

LAYERS = {
    # values, time, the ends of processes: import nothing but each other
    "_value": 0,
    "_checks": 0,
    "_platform": 0,
    "errors": 0,
    "item": 0,
    "letter": 0,
    "config": 0,
    "clock": 0,
    "codecs": 0,
    "_process": 0,
    "_tasks": 0,
    "_logging": 0,
    "_disk": 1,
    "_journal": 2,
    "_waiting": 2,
    "_reading": 3,
    "memory": 3,
    "_writing": 4,
    "inbox": 4,
    "inspection": 5,
    "ship": 5,
    "ship.standby": 8,  # it opens queues and work queues
    "queue": 6,
    "_queue_options": 6,
    "blocking": 6,
    "arrow": 6,
    "dead_queue": 6,
    # built on the public interface alone
    "work": 7,
    "spark": 7,
    "logging": 7,
    "server": 8,
    "dashboard": 8,
    "outbox": 8,
    "metrics": 8,
    "demo": 8,
    "cli": 9,
    "__main__": 10,
    "testing": 10,  # nothing above imports it
    "outbox.testing": 10,  # nor the test kit of the outbox
    "outbox.pytest_plugin": 10,
}
"""A folder, a module at the top, or one that is not of its folder's layer, and its layer. Two folders of one layer do
not import each other.
"""
LATE = {("ship", "ship.standby"), ("inspection.repair", "work.doubts"), ("_reading.burial", "inbox.moves")}
"""A package, and a module above it whose names it has all the same: it imports the module when one is first used."""
PUBLIC_ONLY = 7
"""From this layer up, private modules of the library are not imported ..."""
SHARED = {"_process", "_tasks", "_disk", "_value"}
"""... and but for what every open object has to be in, the ends of processes, how asyncio closes it, the disk that is
passed on, and the base of values.
"""
FOLDERS = {
    "_disk",
    "_journal",
    "_waiting",
    "_reading",
    "memory",
    "_writing",
    "inbox",
    "inspection",
    "arrow",
    "work",
    "ship",
    "spark",
}
PUBLIC_MODULES = {
    "",
    "arrow",
    "inspection",
    "inbox",
    "logging",
    "work",
    "ship",
    "spark",
    "server",
    "outbox",
    "metrics",
    "dashboard",
    "testing",
}
PRIVATE_ALLOWED = {"testing", "ship", "spark"}
"""... except by the fakes, by what ships a journal byte for byte, and by Spark's executors, which decode segments by
themselves.
"""


PUBLIC_IN_SPITE = {"_replace", "_asdict", "_make", "_exit", "_getframe", "_current_frames"}
"""Names of the standard library that are documented, whatever they look like."""
PRIVATE_USES = {
    "_process": ("_register_atexit",),
    "cli._records": ("_SubParsersAction",),
    # hot copies, and an item whose owner is stored as it is made
    "queue": ("_at", "_last_ms", "_marker", "_buffer", "_at", "_undo"),
    "_reading.backlog": ("_owner", "_owner"),
    "_reading.dispatch": ("_owner",),
    "_reading.reader": ("_owner",),
    # of SQLAlchemy: a second engine with the events of the first
    "outbox.database": ("_join", "_has_events"),
    # what ``Waiting`` gives to its heirs alone
    "blocking": ("_wait",),
    "memory._simple": ("_quit", "_quit", "_wait"),
    "_reading.local_source": ("_directory",),
    "testing._crash": ("_mounts",),
    "work.repair": ("_check",),
    "work.core": ("_abandon",),
}
"""By module: private names of other modules that it uses, as often as each is here. Nothing is added."""


SAME_NAMES = {
    "Job": ("kestrelpy/outbox/job.py", "kestrelpy/work/job.py"),
    "JobNotFound": ("kestrelpy/outbox/errors.py", "kestrelpy/work/errors.py"),
    "DuplicateJob": ("kestrelpy/outbox/errors.py", "kestrelpy/work/errors.py"),
    "Run": ("kestrelpy/arrow/decode.py", "kestrelpy/outbox/testing.py"),
}
"""Class names that two packages have, for two things that their users call by the same word, and the only modules that
may have them. A program imports one of the two packages; one that imports both says ``outbox.Job``.
"""


LOOPS = {
    ("_journal.view", "_sizes"),  # the file that is open is closed by its finaliser, too
    ("spark.buffer.driver_buffer", "_run"),  # on a thread of its own, where no interrupt falls
    ("work.session", "close"),  # its ``except`` is for errors of our own
}
"""Loops with a condition inside ``try`` or ``with`` that may be."""


@dataclass(frozen=True)
class Ban:
    """A name that only some modules may use: a builtin, or a module's attribute (``os.*``: any)."""

    name: str
    instead: str
    allowed_in: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()


PROGRAMS = ("cli", "demo", "__main__", "testing", "spark")
BANS = (
    Ban(
        "os.*",
        "kestrelpy._disk",
        ("_disk", *PROGRAMS),
        ("os.getpid", "os.register_at_fork", "os.fspath", "os.PathLike", "os.strerror"),
    ),
    Ban("open", "kestrelpy._disk", ("_disk", *PROGRAMS)),
    Ban("io.*", "kestrelpy._disk", ("_disk", *PROGRAMS)),
    Ban("shutil.*", "kestrelpy._disk", PROGRAMS),
    Ban("pathlib.*", "kestrelpy._disk, and str for paths", PROGRAMS),
    Ban("mmap.*", "kestrelpy._disk", ("_disk", *PROGRAMS)),
    Ban("fcntl.*", "Directory.lock of kestrelpy._disk"),
    Ban("time.*", "the clock that was passed in", ("clock", *PROGRAMS)),
    Ban("datetime.*", "instants in milliseconds, of the clock that was passed in", PROGRAMS),
    Ban("random.*", "what was passed in (os.urandom is in kestrelpy._disk)", PROGRAMS),
    Ban("pickle.*", "a codec that the user passes"),
    Ban("dataclasses.*", "kestrelpy._value: importing dataclasses takes long", ("_value", *PROGRAMS)),
    Ban("marshal.*", "kestrelpy._journal.format"),
    Ban("eval", "code"),
    Ban("exec", "code"),
    Ban("print", "logging, or what the function returns", PROGRAMS),
    Ban("subprocess.*", "nothing: the library starts no process", PROGRAMS),
    Ban("multiprocessing.*", "nothing: the library starts no process", PROGRAMS),
)
LET_BE = {
    ("_writing.open_journal", "os.urandom"),
    ("codecs.encryption", "os.urandom"),
    ("inbox.publishing", "os.urandom"),
    ("inbox.parts", "os.urandom"),
    ("inspection.repair", "os.urandom"),
    ("inbox.moves", "os.urandom"),
    ("ship.checking", "os.urandom"),
    ("ship.opened", "os.urandom"),
    ("ship.folder_store", "os.urandom"),
    ("ship.part_upload", "os.urandom"),
    ("ship.object_store", "datetime.timedelta"),
    *(("arrow.bounds", f"datetime.{name}") for name in ("UTC", "datetime", "timedelta")),
    ("outbox.core", "os.urandom"),
    ("logging.spool", "os.urandom"),
    ("logging.handler", "os.path"),
    ("metrics.panel", "os.path"),
    ("_disk.real", "fcntl.ioctl"),
    ("_disk.file", "fcntl.fcntl"),
}
"""Uses all the same: where the randomness comes from that the layers below are passed, how a client is told its time
limit, times that callers give, whether two paths are one folder, the attributes of files, and the sync of macOS.
"""
MAY_SLEEP = {"stress", "crash", "processes", "faults"}
"""Folders of tests, beside the unit tests, that may wait for the passing of time."""
SLEEPERS: dict[str, str] = {
    "tests/ship/test_kills.py": "kills processes at moments of their lives",
    "tests/ship/killed_owner.py": "is such a process",
    "tests/ship/takeovers.py": "does so, too, and watches others",
    "tests/ship/member.py": "is such a process, and puts at a pace",
}
"""Unit tests that may do so all the same, and why."""

PUBLIC = {
    "kestrelpy": (
        "KestrelError QueueEmpty QueueFull QueueClosed ItemTooLarge BatchTooLarge InvalidName NoDefaultReader "
        "UnknownItem QueueLocked ForkedQueue CorruptJournal UnsupportedFormat WrongKind QueueDiskFull "
        "RestoreIncomplete RepairIncomplete RepairRefused "
        "DurabilityUnknown BlockingQueue ConcurrentBlockingQueue SimpleBlockingQueue FullPolicy "
        "JournaledQueue Reader Item ReaderConfig QueueStats ReaderStats "
        "open_reader scan Record DeadLetter DeadLetters dead_letters queue_names verify VerifyReport inspect "
        "repair RepairReport RepairLoss JobDoubts UnknownReader "
        "QueueInspection Clock Codec SystemClock Damage SavedReader SegmentInfo"
    ),
    "kestrelpy.arrow": "FilesNotSeen read",
    "kestrelpy.codecs": "JSON UTF8 DecodeError WrongKey encrypted msgspec pydantic zstd",
    "kestrelpy.logging": "DurableHandler DurableListener RECORDS collect",
    "kestrelpy.inspection": "FolderWatch WatchedQueue WatchedReader",
    "kestrelpy.inbox": "Part PartWriter discard last_version pending publish put_many take_in",
    "kestrelpy.ship": (
        "Store Listed open_store check CheckReport CheckResult ShipError BadStoreURL StoreUnavailable StoreTooWeak "
        "StoreDamaged NoSuchQueue RestoreTargetExists RestoreIncomplete restore Restored "
        "Ship ShipStatus Shipping Fenced HistoryMismatch NotShipped ShippingRequired Collected "
        "status RemoteStatus queues verify RemoteReport read_log RemoteSlot drop_reader detach shipped_to "
        "Standby StandbyStatus OwnerAlive rejoin Orphan orphans"
    ),
    "kestrelpy.spark": (
        "DriverBuffer UndecodableItem archive_to_parquet LakeSummary LAKE_SCHEMA load_report LoadReport "
        "NothingToReport local_session register JavaMissing FilesNotSeen DataLoss SinkMistake"
    ),
    "kestrelpy.work": (
        "WorkQueue Session Job NewJob WorkStats TubeStats JobStats JobNotFound NotReserved DuplicateJob Draining "
        "DeadlineSoon JobTooBig TubeNotFound WorkFigures TubeJobs "
        "JobsOutside TubeOutside VisibleJob"
    ),
    "kestrelpy.metrics": "Collector MetricsServer Observation observe",
    "kestrelpy.outbox": (
        "OutboxError UnknownQueue UnknownDependency JobNotFound InvalidPayload DuplicateJob UnsupportedDatabase "
        "NotInTransaction NotSupported MissingPackage InvalidName JobTooBig ErrorWatch "
        "exponential Carrier opentelemetry Outbox QueueCount RetryStats Times Health"
    ),
    "kestrelpy.outbox.testing": "virtual VirtualOutbox Run StillWaiting ANY",
    "kestrelpy.outbox.pytest_plugin": "virtual_outbox VirtualOutboxes",
    "kestrelpy.dashboard": "DashboardMistake make_app serve",
    "kestrelpy.server": (
        "BeanstalkServer KestrelServer ConfigError QueueServer QueueProtocol Parser Connection Wait FutureWait "
        "parse_address run run_in_thread serve serve_in_thread ServedJournal ServerFigures"
    ),
    "kestrelpy.testing": "ManualClock MemoryDisk FailingDisk CrashingDisk check_blocking_queue",
}
METHODS = {
    "ConcurrentBlockingQueue": (
        "put put_nowait put_head get get_nowait get_if get_future aget aput peek flush evict_waiters qsize empty full "
        "shutdown close"
    ),
    "JournaledQueue": (
        "put put_many put_future aput sync reader drop_reader get get_nowait get_many get_future aget peek commit "
        "commit_many abort seek checkpoint flush discard_expired evict_waiters take_in stats as_blocking_queue close "
        "erase aclose qsize empty full join put_nowait"
    ),
    "Reader": (
        "get get_nowait get_many get_future aget peek commit commit_many abort seek flush discard_expired checkpoint "
        "evict_waiters close stats aclose qsize empty full join"
    ),
    "Item": "commit abort",
    "work.WorkQueue": (
        "put aput put_many put_all new_id delete kick kick_job peek peek_ready peek_delayed peek_buried peek_key "
        "peek_priorities move clear jobs pause_tube tubes stats stats_tube stats_job figures drain save_reserves sync "
        "checkpoint close aclose session"
    ),
    "work.Session": (
        "use watch ignore reserve reserve_many reserve_job reserve_future areserve delete delete_many release bury "
        "touch close adelete arelease abury aclose"
    ),
    "work.Job": "delete release bury touch adelete arelease abury",
    "outbox.Outbox": (
        "add_relay stats astats group_progress agroup_progress retry_stats aretry_stats processing_times "
        "aprocessing_times health ahealth healthy ahealthy unhealthy aunhealthy"
    ),
    "outbox.testing.VirtualOutbox": (
        "begin put consume aconsume force_retry run_once take lose_mark sweep run_due drain jobs contains assert_put"
    ),
}


# -- the tree --------------------------------------------------------------------------------------------------------


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Path from the root, text: of every module under these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, made once for all checks. They do not change it."""
    return ast.parse(source)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """They go when the last check is done: half a million objects would make each later collection slow."""
    yield
    parsed.cache_clear()


def docstring_of(source: str) -> str | None:
    """The string that a source begins with. Only its first line is looked at, not the whole of it."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            return ast.get_docstring(ast.parse(token.string))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            break
    return None


def module_of(path: str) -> str:
    """``kestrelpy/cli/demo.py``: ``cli.demo``. ``kestrelpy/__init__.py``: empty."""
    name = path.removeprefix("kestrelpy/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__").removesuffix("__init__")


def area_of(module: str) -> str:
    """What the tables know a module by: its first part."""
    return module.partition(".")[0]


def _without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but not those that only the type checker sees."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children: list[ast.AST] = list(node.orelse)
        else:
            yield node
            children = list(ast.iter_child_nodes(node))
        left += reversed(children)


def imported(source: str, known: set[str]) -> dict[str, int]:
    """The modules of kestrelpy that a source imports, for types too, and where. ``""`` is the package itself."""
    found: dict[str, int] = {}
    for node in ast.walk(parsed(source)):
        names = []
        line: int = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("kestrelpy.") in known else node.module for name in inside]
        for name in names:
            if name == "kestrelpy" or name.startswith("kestrelpy."):
                found.setdefault(name.removeprefix("kestrelpy").removeprefix("."), line)
    return found


# -- the checks: complaints about sources ----------------------------------------------------------------------------


def layer_complaints(path: str, source: str, known: set[str]) -> list[str]:
    """Imports that go up, or to where this module has no business."""
    module = module_of(path)
    if not module:
        return [
            f"{path}:{line}: the package must not import kestrelpy.{name}: importing it would cost or pull in too much"
            for name, line in imported(source, known).items()
            if LAYERS.get(area_of(name), 0) >= PUBLIC_ONLY
        ]
    area = area_of(module)
    if area not in LAYERS:
        return [f"{path}: {area} is not in LAYERS of tests/test_tidy.py: say which layer it belongs to"]
    layer = LAYERS.get(module, LAYERS[area])
    complaints = []
    for name, line in imported(source, known).items():
        other = area_of(name)
        its_layer = LAYERS.get(name, LAYERS.get(other, 0))
        if (module, name) in LATE:
            continue
        is_public_face = name in PUBLIC_MODULES or other in ("errors", "item", "letter", "config", "clock", "codecs")
        if its_layer > layer or (its_layer == layer and other != area and {other, area} & FOLDERS):
            complaints.append(f"{path}:{line}: {area} of layer {layer} imports {name} of layer {its_layer}")
        elif not name and layer < PUBLIC_ONLY:
            complaints.append(f"{path}:{line}: import the module that has it, not the package: that is a cycle")
        elif (
            layer >= PUBLIC_ONLY
            and other not in (area, "cli", "demo", "spark")
            and not is_public_face
            and not {module, area} & PRIVATE_ALLOWED
            and other not in SHARED
        ):
            complaints.append(f"{path}:{line}: {area} is built on the public interface: import {name}'s from kestrelpy")
    return complaints


def late_complaints(path: str, source: str) -> list[str]:
    """Modules of ``LATE`` that a package imports as it is imported."""
    late = [name for module, name in LATE if module == module_of(path)]
    complaints, tree = [], parsed(source)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported(ast.unparse(node), set(late))
            complaints += [f"{path}:{node.lineno}: import {name} when it is used" for name in late if name in names]
    return complaints


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Import cycles, one complaint for each that a search in depth runs into."""
    complaints, done = [], set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            complaints.append(" imports ".join((*trail[trail.index(module) :], module)))
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return complaints


def private_uses(source: str) -> Iterator[tuple[str, int]]:
    """Private attributes of objects that this module does not define, each with its line."""
    tree = parsed(source)
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                names = [part.target] if isinstance(part, ast.AnnAssign) else getattr(part, "targets", [])
                own.update(name.id for name in names if isinstance(name, ast.Name))
                if any(isinstance(name, ast.Name) and name.id == "__slots__" for name in names):
                    own.update(str(each.value) for each in ast.walk(part) if isinstance(each, ast.Constant))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        is_private = re.match("_[^_]", node.attr) and not _is_self(node.value)
        if is_private and node.attr not in own | PUBLIC_IN_SPITE:
            yield node.attr, node.lineno


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_complaints(path: str, source: str) -> list[str]:
    """Private names of others that are used here, and not let be."""
    allowed = Counter(PRIVATE_USES.get(module_of(path), ()))
    complaints = []
    for name, line in private_uses(source):
        if allowed[name] < 1:
            complaints.append(f"{path}:{line}: {name} is private to another module")
        allowed[name] -= 1
    return complaints + [f"{path}: PRIVATE_USES lets {name} be, which is not used" for name in +allowed]


def loop_complaints(path: str, source: str) -> list[str]:
    """Loops with a condition inside ``try`` or ``with``: docs/interrupts.md, rule 3."""
    complaints = []

    def visit(node: ast.AST, name: str, *, guarded: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, guarded = node.name, False
        if (
            isinstance(node, ast.While)
            and guarded
            and not isinstance(node.test, ast.Constant)
            and (module_of(path), name) not in LOOPS
        ):
            complaints.append(f"{path}:{node.lineno}: a loop with a condition, in a try or with")
        inner = node.body if isinstance(node, ast.Try | ast.With) else []
        for child in ast.iter_child_nodes(node):
            visit(child, name, guarded=guarded or child in inner)

    visit(parsed(source), "", guarded=False)
    return complaints


def heir_complaints(found: list[tuple[str, str]]) -> list[str]:
    """Classes that exist to be the base of one other class: never made, in no ``__all__``. That is one class in two."""
    where: dict[str, str] = {}
    heirs: dict[str, list[str]] = {}
    used: set[str] = set()
    for path, source in found:
        tree = parsed(source)
        used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
        where |= {
            node.name: path for node in tree.body if isinstance(node, ast.ClassDef)
        }  # no stand-ins of old Pythons
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    name = ast.unparse(base).partition("[")[0]
                    heirs.setdefault(name, []).append(node.name)
            elif isinstance(node, ast.Call):
                used.add(ast.unparse(node.func).partition("[")[0])
    return [
        f"{where[name]}: {name} has one heir, {mine[0]}, and is nothing else: make them one class"
        for name, mine in heirs.items()
        if len(mine) == 1 and name in where and name not in used
    ]


def class_complaints(found: list[tuple[str, str]]) -> list[str]:
    """Names that more than one class has."""
    classes: dict[str, list[str]] = {}
    for path, source in found:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(path)
    return [
        f"{name} is a class in each of {', '.join(paths)}"
        for name, paths in classes.items()
        if len(paths) > 1 and tuple(sorted(paths)) != SAME_NAMES.get(name)
    ]


def length_complaints(path: str, source: str) -> list[str]:
    """Functions and modules that are too long."""
    complaints = []
    lines = source.count("\n")
    if lines > MAX_MODULE_LINES:
        complaints.append(f"{path}: {lines} lines, more than {MAX_MODULE_LINES}")
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {size} lines, more than {MAX_FUNCTION_LINES}")
    return complaints


def uses(source: str) -> Iterator[tuple[str, int]]:
    """What a source uses of modules (``os.stat``) and of builtins (``open``), and where."""
    modules: dict[str, str] = {}
    tree = list(_without_type_checking(parsed(source)))
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}", node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno


def ban_complaints(path: str, source: str) -> list[str]:
    """Uses of what is banned here."""
    module = module_of(path)
    complaints = []
    for name, line in uses(source):
        for ban in BANS:
            is_meant = name == ban.name or (ban.name.endswith(".*") and name.startswith(ban.name[:-1]))
            if not is_meant or name in ban.exceptions or (module, name) in LET_BE:
                continue
            if area_of(module) not in ban.allowed_in:
                complaints.append(f"{path}:{line}: {name} is not for this module; use {ban.instead}")
    return complaints


def sleep_complaints(path: str, source: str) -> list[str]:
    """Unit tests that wait for time to pass."""
    imports_it = "sleep" in source and re.search(r"import\b.*\btime\b|from time\b", source)
    if set(Path(path).parts) & MAY_SLEEP or path in SLEEPERS or not imports_it:
        return []
    return [
        f"{path}:{line}: no time.sleep in unit tests; use kestrelpy.testing.ManualClock, or an Event"
        for name, line in uses(source)
        if name == "time.sleep"
    ]


PATCHED_TIME = re.compile(r"""(?:setattr|patch\.object)\((?:\w+\.)*time, ["']|patch\(["']time\.""")


def patched_time_complaints(path: str, source: str) -> list[str]:
    """Tests that change the time of the whole process: what runs in the background then sleeps by it, and for hours."""
    lines = source.splitlines()
    return [
        f"{path}:{number}: patches time for all threads of the process; replace the module's own name `time`"
        for number, line in enumerate(lines, 1)
        if PATCHED_TIME.search(line) and path not in ("tests/unit/test_clock.py", "tests/test_tidy.py")
    ]


def wrap_complaints(path: Path) -> list[str]:
    """Lines of prose that are too long. Tables, code, pictures, and lists that a program writes are left alone."""
    complaints, is_code = [], False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        is_code ^= line.startswith("```")
        is_long = len(line) > MAX_PROSE_COLUMNS and " " in line.strip()
        if is_long and not is_code and not line.startswith(("```", "|", "    ", "![")):
            complaints.append(f"{path.name}:{number}: {len(line)} columns, more than {MAX_PROSE_COLUMNS}")
    return complaints


def heading_anchor(heading: str) -> str:
    """The anchor that a heading of a Markdown page has."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def link_complaints(path: str, text: str) -> list[str]:
    """Links of a Markdown page that lead nowhere in this tree."""
    complaints = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / path).parent / name if name else ROOT / path
        if not file.exists():
            complaints.append(f"{path}: {target} leads nowhere")
        elif anchor and file.suffix == ".md":
            anchors = {heading_anchor(h) for h in re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)}
            if anchor not in anchors:
                complaints.append(f"{path}: {target} names no heading")
    return complaints


def documented_files(text: str) -> set[str]:
    """Files of the tree that a page mentions in code marks."""
    return set(re.findall(r"`((?:kestrelpy|tests|docs|bench)/[\w./-]+\.(?:py|md))`", text))


def command_complaints(path: str, text: str, targets: set[str], commands: set[str]) -> list[str]:
    """``make`` and ``kestrelpy`` commands of a page that do not exist."""
    named = {
        "make": (targets, r"(?:^|[`$] ?)make ([a-z][\w-]*)"),
        "kestrelpy": (commands, r"(?:^|[`$|] ?|python -m )kestrelpy ([a-z][\w-]*)"),
    }
    return [
        f"{path}: there is no {program} {command}"
        for program, (there, pattern) in named.items()
        for command in re.findall(pattern, text, re.MULTILINE)
        if command not in there
    ]


def parse_complaints(path: str, text: str) -> list[str]:
    """``kestrelpy`` command lines in shell blocks that the parser refuses."""
    from kestrelpy.cli import build_parser

    complaints = []
    for block in re.findall(r"^```(?:console|sh|bash)\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(r"(?:^|\| ?|\$ )kestrelpy ([^|>&;\n]*)", block, re.MULTILINE):
            words = shlex.split(line, comments=True)
            if words[0] == "bench":
                continue
            try:
                build_parser().parse_args(words)
            except SystemExit as stop:
                if stop.code:
                    complaints.append(f"{path}: kestrelpy {line.strip()}: this is refused")
    return complaints


def pages() -> list[tuple[str, str]]:
    """The documents."""
    fixed = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]
    paths = [*fixed, *sorted((ROOT / "docs").rglob("*.md"))]
    return [(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths if path.exists()]


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def commands() -> set[str]:
    """The commands of the command line."""
    from kestrelpy.cli import build_parser

    subparsers = build_parser()._subparsers
    assert subparsers is not None
    actions = subparsers._group_actions
    return {name for action in actions for name in (action.choices or ())}


# -- the tree is tidy ------------------------------------------------------------------------------------------------


def _fail_with(complaints: list[str]) -> None:
    if complaints:
        pytest.fail("\n" + "\n".join(complaints), pytrace=False)


def test_imports_go_down_only() -> None:
    found = list(sources("kestrelpy"))
    known = {module_of(path) for path, _ in found}
    _fail_with([one for path, source in found for one in layer_complaints(path, source, known)])


def test_there_is_no_import_cycle() -> None:
    found = list(sources("kestrelpy"))
    known = {module_of(path) for path, _ in found}
    graph = {module_of(path): set(imported(source, known)) - {"", module_of(path)} for path, source in found}
    for package, module in LATE:
        graph[package].remove(module)
    _fail_with(cycles(graph))


def test_what_is_imported_late_is_imported_late() -> None:
    _fail_with([one for path, source in sources("kestrelpy") for one in late_complaints(path, source)])
    path, early = "kestrelpy/ship/__init__.py", "from kestrelpy.ship.standby import Standby\n"
    assert late_complaints(path, early)
    assert late_complaints(path, "from kestrelpy.ship import standby\n")
    assert not late_complaints(path, f"if TYPE_CHECKING:\n    {early}\ndef f():\n    {early}")


def test_private_names_are_used_by_their_own_module() -> None:
    _fail_with([one for path, source in sources("kestrelpy") for one in private_complaints(path, source)])


def test_no_class_is_the_base_of_one_other_and_nothing_else() -> None:
    _fail_with(heir_complaints(list(sources("kestrelpy"))))


def test_a_class_name_is_used_once() -> None:
    _fail_with(class_complaints(list(sources("kestrelpy"))))


def test_loops_that_an_interrupt_may_leave_have_no_condition() -> None:
    found = [(path, source) for path, source in sources("kestrelpy") if area_of(module_of(path)) not in PROGRAMS[:4]]
    _fail_with([one for path, source in found for one in loop_complaints(path, source)])


def test_functions_and_modules_are_short() -> None:
    found = sources("kestrelpy", "bench", "examples")
    _fail_with([one for path, source in found for one in length_complaints(path, source)])


def test_nothing_is_used_outside_its_module() -> None:
    _fail_with([one for path, source in sources("kestrelpy") for one in ban_complaints(path, source)])


def test_unit_tests_do_not_sleep() -> None:
    _fail_with([one for path, source in sources("tests") for one in sleep_complaints(path, source)])


def test_no_test_changes_the_time_of_the_process() -> None:
    _fail_with([one for path, source in sources("tests") for one in patched_time_complaints(path, source)])


def test_every_module_says_what_it_is() -> None:
    found = sources("kestrelpy", "bench", "tests", "examples")
    _fail_with([f"{path}: no docstring" for path, text in found if text.strip() and not docstring_of(text)])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_exported_and_documented(name: str) -> None:
    module = importlib.import_module(name)
    complaints = []
    for public in PUBLIC[name].split():
        if public not in getattr(module, "__all__", ()):
            complaints.append(f"{name} does not export {public}")
        elif not _documentation(module, public):
            complaints.append(f"{name}.{public} has no docstring")
    missing = [extra for extra in getattr(module, "__all__", ()) if not hasattr(module, extra)]
    complaints += [f"{name} exports {extra} and does not have it" for extra in missing]
    _fail_with(complaints)


@pytest.mark.parametrize("name", METHODS)
def test_public_methods_are_there_and_documented(name: str) -> None:
    module, _, of_module = f"kestrelpy.{name}".rpartition(".")
    made = getattr(importlib.import_module(module), of_module)
    complaints = []
    for method in METHODS[name].split():
        if not callable(getattr(made, method, None)):
            complaints.append(f"{name} has no {method}")
        elif not inspect.getdoc(getattr(made, method)):
            complaints.append(f"{name}.{method} has no docstring")
    _fail_with(complaints)


def _documentation(module: types.ModuleType, name: str) -> str | None:
    made = getattr(module, name)
    is_of_its_own = inspect.isclass(made) or inspect.isfunction(made)
    return made.__doc__ if is_of_its_own else inspect.getdoc(made)


def test_prose_is_wrapped() -> None:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    _fail_with([one for path in paths if path.name not in UNWRAPPED for one in wrap_complaints(path)])


def test_links_are_alive() -> None:
    _fail_with([one for path, text in pages() for one in link_complaints(path, text)])


def test_files_that_pages_mention_exist() -> None:
    found = [(path, name) for path, text in pages() for name in documented_files(text)]
    _fail_with([f"{path}: there is no {name}" for path, name in sorted(found) if not (ROOT / name).exists()])


def test_documented_commands_exist() -> None:
    targets, there = make_targets(), commands()
    _fail_with([one for path, text in pages() for one in command_complaints(path, text, targets, there)])
    _fail_with([one for path, text in pages() for one in parse_complaints(path, text)])


# -- the checks see what they are for --------------------------------------------------------------------------------

KNOWN = {
    "",
    "outbox",
    "outbox.testing",
    "testing",
    "errors",
    "_disk",
    "_disk.real",
    "_journal",
    "_journal.journal",
    "_waiting.line",
    "queue",
    "cli",
    "cli._unread",
}
JOURNAL = "kestrelpy/_journal/journal.py"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (JOURNAL, "from kestrelpy.queue import JournaledQueue\n"),
        (JOURNAL, "from kestrelpy import queue\n"),
        (JOURNAL, "def late():\n    import kestrelpy.queue\n"),
        ("kestrelpy/queue.py", "from kestrelpy import JournaledQueue\n"),
        ("kestrelpy/queue.py", "from kestrelpy.testing import ManualClock\n"),
        ("kestrelpy/cli/demo.py", "from kestrelpy._journal import journal\n"),
        (JOURNAL, "from kestrelpy._waiting.line import Line\n"),
        ("kestrelpy/_disk/real.py", "if TYPE_CHECKING:\n    from kestrelpy.queue import JournaledQueue\n"),
        ("kestrelpy/nobody.py", ""),
        ("kestrelpy/__init__.py", "from kestrelpy.cli import main\n"),
        ("kestrelpy/outbox/outbox.py", "from kestrelpy.testing import ManualClock\n"),
        ("kestrelpy/outbox/outbox.py", "from kestrelpy.outbox.testing import virtual\n"),
    ],
)
def test_an_import_that_goes_up_is_seen(path: str, source: str) -> None:
    assert layer_complaints(path, source, KNOWN)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kestrelpy/queue.py", "from kestrelpy._journal import journal\nfrom kestrelpy.errors import QueueEmpty\n"),
        ("kestrelpy/cli/demo.py", "from kestrelpy import JournaledQueue\nfrom kestrelpy.cli import _unread\n"),
        ("kestrelpy/testing/_failing.py", "from kestrelpy._disk import real\n"),
        ("kestrelpy/__init__.py", "from kestrelpy.queue import JournaledQueue\n"),
        ("kestrelpy/outbox/testing.py", "from kestrelpy.testing import ManualClock\n"),
    ],
)
def test_an_import_that_goes_down_is_fine(path: str, source: str) -> None:
    assert not layer_complaints(path, source, KNOWN)


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a imports b imports c imports a"]
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_private_uses_are_seen() -> None:
    source = "class A:\n    def f(self, other):\n        self._mine = other._mine\n        other._theirs.x()\n"
    assert private_complaints("kestrelpy/x.py", source) == ["kestrelpy/x.py:4: _theirs is private to another module"]
    allowed = "def f(queue):\n    return queue._wait, queue._wait\n"
    assert "kestrelpy/blocking.py:2" in private_complaints("kestrelpy/blocking.py", allowed)[0]
    assert "which is not used" in private_complaints("kestrelpy/blocking.py", "pass\n")[0]


def test_a_loop_with_a_condition_is_seen() -> None:
    loop = "def f(x):\n    {}:\n        while x:\n            pass\n    finally:\n        pass\n"
    assert "kestrelpy/x.py:3" in loop_complaints("kestrelpy/x.py", loop.format("try"))[0]
    assert not loop_complaints("kestrelpy/x.py", loop.format("try").replace("while x", "while True"))
    assert not loop_complaints("kestrelpy/x.py", "while x:\n    with y:\n        pass\n")


def test_a_base_of_one_class_is_seen() -> None:
    base = "class _Base:\n    pass\n"
    one = ("a.py", base + "class A(_Base):\n    pass\n")
    assert heir_complaints([one]) == ["a.py: _Base has one heir, A, and is nothing else: make them one class"]
    assert not heir_complaints([one, ("b.py", "class B(_Base[int]):\n    pass\n")])
    assert not heir_complaints([one, ("b.py", "thing = _Base()\n")])
    assert not heir_complaints([one, ("b.py", "__all__ = ['_Base']\n")])


def test_a_class_name_that_is_used_twice_is_seen() -> None:
    assert not class_complaints([("a.py", "class A: ..."), ("b.py", "class B: ...")])
    assert "A is a class in each of a.py, b.py" in class_complaints(
        [("a.py", "class A: ..."), ("b.py", "class A: ...")]
    )
    two = [(path, "class DuplicateJob: ...") for path in SAME_NAMES["DuplicateJob"]]
    assert not class_complaints(two)
    assert class_complaints([*two, ("c.py", "class DuplicateJob: ...")])
    assert class_complaints([two[0], ("c.py", "class DuplicateJob: ...")])


def test_long_ones_are_seen() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert "f has 71 lines" in length_complaints("x.py", long_function)[0]
    assert "651 lines" in length_complaints("x.py", "pass\n" * 651)[0]
    assert not length_complaints("x.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.stat('x')\n",
        "from os import stat\n",
        "import os as system\nsystem.unlink('x')\n",
        "open('x')\n",
        "import time\ntime.time()\n",
        "from time import monotonic\n",
        "import pickle\npickle.loads(b'')\n",
        "import mmap\nmmap.mmap(-1, 1)\n",
    ],
)
def test_banned_uses_are_seen(source: str) -> None:
    assert ban_complaints(JOURNAL, source)


def test_what_is_allowed_is_allowed() -> None:
    assert not ban_complaints("kestrelpy/_disk/real.py", "import os\nos.stat('x')\nopen('x')\n")
    assert not ban_complaints("kestrelpy/queue.py", "import os\nos.getpid()\nself.open('x')\n")
    assert not ban_complaints("kestrelpy/clock.py", "import time\ntime.monotonic()\n")


def test_a_sleeping_test_is_seen() -> None:
    assert sleep_complaints("tests/test_x.py", "import time\ntime.sleep(1)\n")
    assert sleep_complaints("tests/test_x.py", "import time as t\nt.sleep(1)\n")
    assert sleep_complaints("tests/test_x.py", "def test_x():\n    from time import sleep\n")
    assert not sleep_complaints("tests/stress/test_x.py", "import time\ntime.sleep(1)\n")


def test_a_patched_time_is_seen() -> None:
    assert patched_time_complaints("tests/test_x.py", 'monkeypatch.setattr(_top.time, "monotonic", now)\n')
    assert patched_time_complaints("tests/test_x.py", 'with patch.object(time, "monotonic", now):\n')
    assert patched_time_complaints("tests/test_x.py", 'with mock.patch("time.time", now):\n')
    assert not patched_time_complaints("tests/test_x.py", 'monkeypatch.setattr(_top, "time", clock)\n')


def test_a_module_without_a_docstring_is_seen() -> None:
    assert docstring_of("#!/bin/python\n\n# so\n'''It is.\n\nSo.'''\nimport x\n") == "It is.\n\nSo."
    assert not docstring_of("import x\n'It is not.'\n")
    assert not docstring_of('""\nimport x\n')
    assert not docstring_of("b'It is not.'\n")


def test_long_prose_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * 20}\n| {'cell ' * 30}|\n```\n{'code ' * 30}\n```\n")
    assert wrap_complaints(page) == []
    page.write_text(f"short\n{'word ' * 21}\n")
    assert "page.md:2" in wrap_complaints(page)[0]


def test_dead_links_and_commands_are_seen() -> None:
    assert link_complaints("docs/x.md", "see [there](nowhere.md)")
    assert not link_complaints("docs/x.md", "see [there](https://example.org/) and [format](format.md)")
    assert link_complaints("docs/x.md", "see [there](format.md#no-such-heading)")
    assert not link_complaints("docs/x.md", "see [there](format.md#what-it-costs)")
    assert command_complaints("x.md", "run `make coffee`", {"demo"}, set())
    assert command_complaints("x.md", "$ kestrelpy brew x", set(), {"put"})
    assert not command_complaints("x.md", "you can make do, and `kestrelpy put d q`", set(), {"put"})
    assert parse_complaints("x.md", "```sh\nkestrelpy get d q --no-such-option\n```\n")
    assert not parse_complaints("x.md", "```console\n$ seq 3 | kestrelpy put d q  # three\n```\n")


def test_nothing_lies_about_at_the_top() -> None:
    """A queue that somebody tried out here was once committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    assert {path.split("/")[0] for path in listed.stdout.splitlines()} == TOP
