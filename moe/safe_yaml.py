"""Looks at a YAML file before anything loads it: a recipe holds settings, and nothing else gets through. Torch-free.

Works on the event stream, where nothing is expanded or constructed yet, so that an alias bomb or a tag costs nothing.
"""

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from moe.schema import Problem

MAX_FILE_BYTES = 64 * 1024
"""A recipe of every setting with its comment takes a tenth of this."""
MAX_DEPTH = 16
"""Settings are three levels deep."""
MAX_PROBLEMS = 20
"""Reported per file; a file with more is not meant to be one of ours."""

_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OTHER_BASE = re.compile(r"[-+]?0[xb][0-9a-fA-F_]+")
_Refuse = Callable[[int, object, str, str], None]
"""line, value, rule, way out"""
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class _Level:
    """One open mapping or sequence of the event stream."""

    is_mapping: bool
    keys: dict[str, int] = field(default_factory=dict)
    expects_key: bool = True


def read_text(path: Path, shown_as: str) -> tuple[str, list[Problem]]:
    """The file's text, or "" and the reason why it is refused; shown_as names it in messages."""

    def refused(rule: str, way_out: str, value: object = None) -> tuple[str, list[Problem]]:
        return "", [Problem(path=shown_as, value=value, rule=rule, way_out=way_out)]

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return refused("must be a regular file", "give the path of a YAML file")
        # Read by the limit, not by the size: the file may grow meanwhile.
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return refused(f"must be readable ({error.strerror})", "check the path and its permissions")
    if len(raw) > MAX_FILE_BYTES:
        return refused(
            f"must be at most {MAX_FILE_BYTES} bytes",
            "keep only what differs from the defaults",
            f"{status.st_size} bytes",
        )
    try:
        return raw.decode("utf-8"), []
    except UnicodeDecodeError as error:
        return refused(f"must be UTF-8 (byte {error.start} is not)", "save the file as UTF-8")


def check(text: str, shown_as: str) -> list[Problem]:
    """Everything in the text that a settings file may not hold.

    Refused: tags, anchors and aliases, more than one document, more than MAX_DEPTH levels, duplicate keys, a top level
    that is no mapping, and plain scalars that YAML 1.1 reads otherwise than people do (010, 0x10, 1:30).
    """
    problems: list[Problem] = []

    def refuse(line: int, value: object, rule: str, way_out: str) -> None:
        if not rule.startswith("is an anchor") or all(problem.rule != rule for problem in problems):
            problems.append(Problem(path=f"{shown_as}:{line}", value=value, rule=rule, way_out=way_out))

    levels: list[_Level] = []
    documents = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if len(problems) >= MAX_PROBLEMS:
                return problems
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    refuse(line, None, "is a second document", "keep one document in a file")
                    return problems
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                levels.pop()
                _value_ended(levels)
            elif isinstance(event, yaml.NodeEvent):
                _check_node(event, line, levels, refuse)
                if len(levels) > MAX_DEPTH:
                    refuse(line, None, f"is nested deeper than {MAX_DEPTH} levels", "settings are three levels deep")
                    return problems
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = getattr(error, "problem", None) or str(error)
        refuse(mark.line + 1 if mark else 0, None, f"is not YAML ({message})", "check indentation, colons and quotes")
    return problems


def _check_node(event: yaml.NodeEvent, line: int, levels: list[_Level], refuse: _Refuse) -> None:
    parent = levels[-1] if levels else None
    if isinstance(event, yaml.AliasEvent) or event.anchor:
        refuse(
            line, event.anchor, "is an anchor or alias, which settings do not use", "write the value, or ${section.key}"
        )
    if getattr(event, "tag", None):
        refuse(line, event.tag, "is a YAML tag, which settings do not use", "write the plain value")
    if isinstance(event, yaml.CollectionStartEvent):
        if parent is None and not isinstance(event, yaml.MappingStartEvent):
            refuse(line, None, "must be a mapping at the top", "write section: then its keys, indented")
        elif parent is not None and parent.is_mapping and parent.expects_key:
            refuse(line, None, "must not use a mapping or list as a key", "write plain names as keys")
        levels.append(_Level(is_mapping=isinstance(event, yaml.MappingStartEvent)))
        return
    if isinstance(event, yaml.ScalarEvent):
        if parent is None and event.value != "":
            refuse(line, event.value, "must be a mapping at the top", "write section: then its keys, indented")
        if parent is not None and parent.is_mapping and parent.expects_key:
            if event.value in parent.keys:
                first = parent.keys[event.value]
                refuse(line, event.value, f"is a duplicate key (first on line {first})", "keep one of the two")
            parent.keys.setdefault(event.value, line)
        elif event.implicit[0]:
            _check_plain(event.value, line, refuse)
    _value_ended(levels)


def _check_plain(value: str, line: int, refuse: _Refuse) -> None:
    if _LEADING_ZERO.fullmatch(value):
        rule, way_out = "is ambiguous: octal or decimal", f"write {value.lstrip('+-0_') or '0'}, or quote a text"
    elif _SEXAGESIMAL.fullmatch(value):
        rule, way_out = "is ambiguous: text, or a number to the base 60", "quote it if it is text"
    elif _OTHER_BASE.fullmatch(value):
        rule, way_out = "must be written in decimal", "write the decimal number, or quote a text"
    else:
        return
    refuse(line, value, rule, way_out)


def _value_ended(levels: list[_Level]) -> None:
    """A key, a value or an element is complete: in a mapping the two take turns."""
    if levels:
        levels[-1].expects_key = not levels[-1].expects_key
