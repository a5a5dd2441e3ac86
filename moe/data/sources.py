"""Tagged domains of text: the first station of the data path (text → tokens → shards → packed samples → batches).

A source is an iterator of documents in a fixed order. It is read more than once (to fingerprint it, to train the
tokenizer, to encode it), so it must give the same documents each time. Free of torch and tokenizers, so that a recipe
with a wrong source is refused fast.
"""

import difflib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moe.errors import DataError

TEXT_PREFIX = "text:"
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")

# Tests would be a third of the library's bytes, and installed packages are not part of it.
_STDLIB_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# This one file is the text of the source `topics`: counted twice, it would also put held-out prose into training.
_STDLIB_SKIPPED_FILES = {"pydoc_data/topics.py"}
# Generated on the machine that built Python, full of that machine's paths.
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata_", "config-")


class Document(NamedTuple):
    """One text. `name` is unique inside its domain and says where to look when something is wrong with it."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One domain."""

    domain: str
    """Tag in metrics and file names: letters, digits, '.', '_' and '-' only."""
    description: str
    documents: Callable[[list[str]], Iterator[Document]]
    """documents(skipped) yields the documents in their fixed order, and appends to `skipped` one line for each file
    that was left out because it is unreadable or not UTF-8. Empty texts are left out silently."""


def _decode(raw: bytes) -> str | None:
    """Text of a file, a byte order mark removed; None when it is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _files_below(root: Path, skipped_folders: set[str]) -> list[str]:
    """Relative POSIX names of all files below root, sorted; links to folders are not followed, dot names left out."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def _stdlib_documents(skipped: list[str]) -> Iterator[Document]:
    yield from read_python_library(Path(sysconfig.get_paths()["stdlib"]), skipped)


def read_python_library(root: Path, skipped: list[str]) -> Iterator[Document]:
    """The .py files below `root`, tests and installed packages left out, in the order of their names.

    Raises: DataError when `root` is not a folder (a Python whose library is a zip file).
    """
    if not root.is_dir():
        raise DataError(
            f"data.sources: stdlib reads Python's library as files, but {root} is not a folder (a zipped Python?); "
            "use topics or text:PATH"
        )
    for name in _files_below(root, _STDLIB_SKIPPED_FOLDERS):
        if not name.endswith(".py") or name in _STDLIB_SKIPPED_FILES or name.startswith(_STDLIB_SKIPPED_PREFIXES):
            continue
        try:
            text = _decode((root / name).read_bytes())
        except OSError as error:
            skipped.append(f"{name}: {error.strerror}")
            continue
        if text is None:
            skipped.append(f"{name}: not UTF-8")
        elif text.strip():
            yield Document(name, text)


def _topics_documents(skipped: list[str]) -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "data.sources: topics needs the module pydoc_data.topics, which this Python was packaged without; "
            "use stdlib or text:PATH"
        ) from error
    for name in sorted(topics):
        if topics[name].strip():
            yield Document(name, topics[name])


SOURCES: dict[str, Source] = {
    source.domain: source
    for source in (
        Source(
            domain="stdlib",
            description="Python source: the standard library of the running Python, tests left out (about 12 MB)",
            documents=_stdlib_documents,
        ),
        Source(
            domain="topics",
            description="English reference prose: the help topics of pydoc (about 0.5 MB)",
            documents=_topics_documents,
        ),
    )
}
"""Sources known by name. Beside these, text:PATH brings the user's own files."""


def _jsonl_documents(path: Path, name: str) -> Iterator[Document]:
    """One document per line: an object with a string field "text". Blank lines are left out."""
    rule = 'each line must be a JSON object with a string field "text"'
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON ({error}); {rule}; mend or remove the line") from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                found = f"keys {sorted(record)[:8]}" if isinstance(record, dict) else type(record).__name__
                raise DataError(f"{where} has {found}; {rule}; mend or remove the line")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where} holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character; "
                    "mend or remove the line"
                ) from error
            if text.strip():
                yield Document(f"{name}:{number}", text)


def _text_documents(path: Path, skipped: list[str]) -> Iterator[Document]:
    if path.is_dir():
        names = [name for name in _files_below(path, {"__pycache__"}) if name.lower().endswith(TEXT_SUFFIXES)]
        files = [(path / name, name) for name in names]
    else:
        files = [(path, path.name)]
    for file, name in files:
        try:
            if name.lower().endswith(".jsonl"):
                yield from _jsonl_documents(file, name)
                continue
            text = _decode(file.read_bytes())
        except OSError as error:
            skipped.append(f"{name}: {error.strerror}")
            continue
        if text is None:
            skipped.append(f"{name}: not UTF-8")
        elif text.strip():
            yield Document(name, text)


def source_problem(spec: str) -> str | None:
    """Why `spec` names no source, with a way out; None when it does. Reads no text, so a config check can afford it."""
    if spec.startswith(TEXT_PREFIX):
        path = Path(spec[len(TEXT_PREFIX) :]).expanduser()
        suffixes = ", ".join(TEXT_SUFFIXES)
        if spec == TEXT_PREFIX or not path.exists():
            return f"data.sources: {spec} does not exist; give a {suffixes} file or a folder of such files"
        if not path.is_dir() and not path.name.lower().endswith(TEXT_SUFFIXES):
            return f"data.sources: {spec} must end in one of {suffixes}; rename it, or give a folder of such files"
        return None
    if spec in SOURCES:
        return None
    near = difflib.get_close_matches(spec, SOURCES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"data.sources: {spec} is no known source; {hint}Known: {', '.join(SOURCES)}, {TEXT_PREFIX}PATH"


def open_source(spec: str) -> Source:
    """The source that a recipe names: a key of SOURCES, or text:PATH, whose domain is the file's or folder's name.

    Raises: DataError for an unknown name (with the nearest one) or a path that cannot be read as text.
    """
    problem = source_problem(spec)
    if problem is not None:
        raise DataError(problem)
    if not spec.startswith(TEXT_PREFIX):
        return SOURCES[spec]
    path = Path(spec[len(TEXT_PREFIX) :]).expanduser().resolve()
    stem = path.name if path.is_dir() else path.stem
    domain = re.sub(r"[^A-Za-z0-9._-]+", "_", stem).strip(".") or "text"
    return Source(
        domain=domain, description=f"text of {path}", documents=lambda skipped: _text_documents(path, skipped)
    )


def open_sources(specs: Sequence[str]) -> list[Source]:
    """The sources of a recipe, in its order.

    Raises: DataError for no source at all, an unknown one, or two with the same domain.
    """
    if not specs:
        raise DataError(f"data.sources is empty; name at least one of {', '.join(SOURCES)}, {TEXT_PREFIX}PATH")
    sources: dict[str, Source] = {}
    origin: dict[str, str] = {}
    for spec in specs:
        source = open_source(spec)
        if source.domain in sources:
            raise DataError(
                f"data.sources: {origin[source.domain]} and {spec} would both be the domain {source.domain}, and a "
                "domain's name must be unique; drop one, or rename the file or folder"
            )
        sources[source.domain] = source
        origin[source.domain] = spec
    return list(sources.values())
