"""The pages of the site that are not files of ``docs/``, and its links: a hook of mkdocs, named in ``mkdocs.yml``.

- README.md, CHANGELOG.md, CONTRIBUTING.md and tests/README.md are pages, too.
- Each ``examples/*.py`` is a page of the cookbook: its docstring, then its code. ``examples/README.md``, if there is
  one, is the first page's beginning. Without examples there is one page.
- Each public module of ``docs/api.md`` is a page of the reference, which mkdocstrings fills from the docstrings. In
  place of ``docs/api.md`` itself stands an index of all public names.
- A page of ``docs/`` that the navigation forgets is in its last section.
- What a page links to outside ``docs/`` is a page or a file of the site, so that links work here as on a code host.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests.support import api_page

ROOT = Path(__file__).parents[2]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}
"""Documents outside ``docs/``, and which page of the site each one is."""
EXAMPLES = ROOT / "examples"
INDEX = "api.md"
SHOWN = {".json", ".png", ".svg", ".txt"}
"""Files that a browser shows by itself. It is told of others that they are text."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
STYLE = """\
.md-grid { max-width: 76rem; }
"""
"""Room for tables with code in them."""
COOKBOOK_HEAD = "# Cookbook\n\nWhole programs to begin with. Each is run by the tests.\n"
LINK = re.compile(r"(\[[^\]]*\]\(|^\[[^\]]*\]: )([^)\s]+)(\)|$)", re.MULTILINE)
"""In its place, or where a page says what ``[text][name]`` leads to."""
FENCE = re.compile(r"(^(`{3,})[^\n]*\n.*?^\2`*[ ]*$)", re.DOTALL | re.MULTILINE)


def examples() -> list[Path]:
    """The programs of the cookbook."""
    return sorted(EXAMPLES.glob("[!_]*.py"))


def module_names() -> list[str]:
    """The public modules, in the order of ``docs/api.md``."""
    return [f"kestrelpy.{name}" if name else "kestrelpy" for name in api_page.MODULES]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made here into the navigation."""
    assert config.nav is not None
    named = set(re.findall(r"[\w./-]+\.md", repr(config.nav))) | {INDEX}
    forgotten = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - named)
    made = {
        "COOKBOOK": ["cookbook/index.md", *(f"cookbook/{path.stem}.md" for path in examples())],
        "REFERENCE": [{"All names": INDEX}, *({name: f"reference/{name}.md"} for name in module_names())],
        "MORE": forgotten,
    }
    filled = [{title: made.get(str(pages), pages) for title, pages in entry.items()} for entry in config.nav]
    config.nav = [entry for entry in filled if all(entry.values())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the files that pages link to."""
    index = files.get_file_from_path(INDEX)
    assert index is not None
    files.remove(index)
    pages = {INDEX: _index(), "cookbook/index.md": cookbook()}
    pages |= {moved: (ROOT / source).read_text("utf-8") for source, moved in MOVED.items()}
    pages |= {f"reference/{name}.md": _reference(name) for name in module_names()}
    pages |= {f"cookbook/{path.stem}.md": example(path) for path in examples()}
    sources = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    sources |= {source: pages[moved] for source, moved in MOVED.items()}
    sources |= {source_of(uri): text for uri, text in pages.items() if uri.startswith("cookbook/")}
    for target in sorted({each for source, text in sources.items() for each in _linked(source, text)}):
        if not place_of(target).startswith("source/"):
            continue
        if (ROOT / target).is_dir():
            pages[place_of(target)] = _listing(target)
            inside = [path for path in (ROOT / target).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
            for path in inside:
                _copy(files, config, path.relative_to(ROOT).as_posix())
        else:
            _copy(files, config, target)
    pages["site.css"] = STYLE
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their targets are here, and write fences as the site's Markdown wants them."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, uri: str) -> str:
    """A page as the site has it. Code is left alone, but for ``norun`` after its language."""
    source = source_of(uri)

    def follow(match: re.Match[str]) -> str:
        target, hash_mark, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        place = place_of(_resolved(source, target))
        return f"{match[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{hash_mark}{anchor}{match[3]}"

    parts = FENCE.split(markdown)
    for at in range(0, len(parts), 3):
        parts[at] = LINK.sub(follow, parts[at])
    whole = "".join(part for at, part in enumerate(parts) if at % 3 != 2)
    return re.sub(r"^(`{3,}[\w-]+) .*$", r"\1", whole, flags=re.MULTILINE)


def source_of(uri: str) -> str:
    """The file of the tree that a page is made from, by the page's place in the site."""
    if uri.startswith("cookbook/"):
        return "examples/README.md" if uri == "cookbook/index.md" else f"examples/{Path(uri).stem}.py"
    return next((source for source, moved in MOVED.items() if moved == uri), f"docs/{uri}")


def place_of(path: str) -> str:
    """The place in the site of a file or folder of the tree."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in ("examples", "examples/README.md"):
        return "cookbook/index.md"
    if re.fullmatch(r"examples/[^/]+\.py", path):
        return f"cookbook/{Path(path).stem}.md"
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    suffix = Path(path).suffix
    return f"source/{path}" if suffix in SHOWN else f"source/{path}.txt"


def _resolved(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _linked(source: str, text: str) -> set[str]:
    """Files and folders outside ``docs/`` to which a page links, as far as they are there."""
    bare = FENCE.sub("", text)
    found = {match[2].partition("#")[0] for match in LINK.finditer(bare) if not re.match(r"[a-z]+:|#", match[2])}
    paths = {_resolved(source, target) for target in found}
    return {path for path in paths if not path.startswith("docs/") and (ROOT / path).exists()} - {*MOVED}


def _copy(files: Files, config: MkDocsConfig, path: str) -> None:
    place = place_of(path)
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))


def _listing(folder: str) -> str:
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    to_root = posixpath.relpath(".", f"docs/source/{folder}")
    links = [f"- [{path.relative_to(ROOT / folder)}]({to_root}/{path.relative_to(ROOT)})" for path in paths]
    return f"{UNSEARCHED}# {folder}\n\n" + "\n".join(links) + "\n"


def cookbook() -> str:
    """The first page of the cookbook."""
    found = [f"- [{_title(path)}]({path.name}): {_parts(path)[0]}" for path in examples()]
    own = EXAMPLES / "README.md"
    return (
        f"{own.read_text('utf-8') if own.exists() else COOKBOOK_HEAD}\n"
        + ("\n".join(found) or "There are no programs yet.")
        + "\n"
    )


def example(path: Path) -> str:
    """The page of one program."""
    first, rest, code = _parts(path)
    said = "\n\n".join(filter(None, (f"# {_title(path)}", first, rest)))
    return f"{said}\n\n`examples/{path.name}`:\n\n`````python\n{code}\n`````\n"


def _title(path: Path) -> str:
    return path.stem.replace("_", " ").capitalize()


def _parts(path: Path) -> tuple[str, str, str]:
    """What an example says of itself in its first paragraph, in the others, and its code."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    first, _, rest = api_page.prose(ast.get_docstring(tree) or "").partition("\n\n")
    docstring = tree.body[0]
    return " ".join(first.split()), rest.strip(), "\n".join(text.splitlines()[docstring.end_lineno or 0 :]).strip("\n")


def _index() -> str:
    """All public names, each with a link to its place in the reference."""
    parts = [api_page.HEAD.replace("`make api` writes this page from the\ndocstrings, so", "It is the docstring, so")]
    for name in module_names():
        names = getattr(importlib.import_module(name), "__all__", ())
        links = [f"[`{each}`](reference/{name}.md#{name}.{each})" for each in names]
        parts.append(f"## [{name}](reference/{name}.md)\n\n{' · '.join(links)}\n")
    return UNSEARCHED + "\n".join(parts)


def _reference(name: str) -> str:
    """The page of one module: its docstring, and each of its public names for mkdocstrings to fill in."""
    module = importlib.import_module(name)
    said = (module.__doc__ or "").strip().removesuffix("PYTEST_DONT_REWRITE")
    parts = [f"# {name}\n\n{api_page.prose(said)}"]
    theirs = _from_elsewhere(module)
    for each in module.__all__:
        if each in theirs:
            parts.append(f"## `{each}` {{ #{name}.{each} }}\n\nThe same as `{theirs[each]}.{each}`.\n")
        else:
            parts.append(f"::: {name}.{each}\n    options:\n{_members(getattr(module, each))}")
    return "\n".join(parts)


def _from_elsewhere(module: ModuleType) -> dict[str, str]:
    """Names that a module has from another package, and from which."""
    imports = [each for each in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(each, ast.ImportFrom)]
    return {
        alias.name: each.module
        for each in imports
        for alias in each.names
        if each.module and not each.module.startswith("kestrelpy")
    }


def _members(thing: Any) -> str:
    """The members of a public name that the reference shows, as an option of mkdocstrings."""
    names: list[str] = []
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        names = [each.name for each in thing]
    elif isinstance(thing, type) and not issubclass(thing, Exception):
        names = [name for name, _ in api_page.members(thing)]
    return f"      members: {names}\n" if names else "      members: false\n      inherited_members: false\n"
