"""One setting at a time: which type stands at a path, does a value fit it, what was probably meant. Pure, torch-free.

Stricter than YAML or OmegaConf alone: nothing is converted that could have meant something else. 1e3 is a whole number,
8.5 and "8" are not; 010 is nothing at all; true is no number.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from moe.schema import RunConfig

MAX_INTEGER = 2**63 - 1
MAX_LIST_LENGTH = 1024

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LEADING_ZERO = re.compile(r"[-+]?0+[0-9_]+")
_NONE = type(None)


class Refused(Exception):
    """A value does not fit its setting."""

    def __init__(self, rule: str, way_out: str) -> None:
        super().__init__(f"{rule}; {way_out}")
        self.rule = rule
        self.way_out = way_out


def annotation_at(path: str) -> Any:
    """Type of the setting at a dotted path (a dataclass for a section), or None when there is none."""
    annotation: Any = RunConfig
    for name in path.split("."):
        if not dataclasses.is_dataclass(annotation):
            return None
        annotation = typing.get_type_hints(annotation).get(name)
        if annotation is None:
            return None
    # The recipe's name is given by the first argument alone.
    return None if path == "recipe" else annotation


def known_paths() -> list[str]:
    """Every setting and section of a run, in order."""
    return list(_paths_below(RunConfig, ""))


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in nested mappings that is not a mapping."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nearest_path(path: str) -> str | None:
    """The setting that was probably meant: written alike, or of the same last name in another section."""
    paths = [path_ for path_ in known_paths() if "." in path_]
    last = path.rsplit(".", 1)[-1]
    by_name = [candidate for candidate in paths if candidate.rsplit(".", 1)[-1] == last]
    if by_name:
        return nearest(path, by_name) or by_name[0]
    if near := nearest(path, paths):
        return near
    names = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(paths)}
    found = nearest(last, list(names))
    return names[found] if found else nearest(path, known_paths())


def nearest(text: str, known: Sequence[str]) -> str | None:
    """The known name most like a text, or None when none is near."""
    # difflib takes quadratic time; nobody's typing error is this long.
    return next(iter(difflib.get_close_matches(text[:100], known, n=1, cutoff=0.6)), None)


def is_number_for_text(annotation: Any, written: str) -> bool:
    """Whether a text setting got something that a parser takes for a number, so that its spelling would be lost."""
    return _inner(annotation) is str and _NUMBER.fullmatch(written) is not None


def coerce(annotation: Any, value: Any) -> Any:
    """The value as its setting's type.

    annotation: int, float, bool, str, an Enum (chosen by member name), list of these, or one of them | None.
    Raises Refused.
    """
    inner, optional = _inner(annotation), inner_allows_none(annotation)
    if value is None:
        if optional:
            return None
        raise Refused("must not be null", f"give {_described(inner)}, or leave the setting out")
    # A plain text setting may well say None; anywhere else it is Python's word for null.
    if value == "None" and (optional or inner is not str):
        hint = "write null for no value" if optional else f"give {_described(inner)}, or leave the setting out"
        raise Refused('is the text "None", which YAML does not read as "no value"', hint)
    if isinstance(value, str) and "\x85" in value:
        raise Refused(
            "must not hold the character U+0085 (next line): YAML files do not keep it", "use \\n in its place"
        )
    if typing.get_origin(inner) is list:
        if not isinstance(value, list | tuple):
            raise Refused("must be a list", f"write [{value}]" if isinstance(value, str) else "write [a, b]")
        if len(value) > MAX_LIST_LENGTH:
            raise Refused(f"must have at most {MAX_LIST_LENGTH} elements", "shorten it")
        [element] = typing.get_args(inner)
        return [coerce(element, item) for item in value]
    if isinstance(inner, type) and issubclass(inner, Enum):
        return _to_enum(inner, value)
    return {bool: _to_bool, int: _to_int, float: _to_float, str: _to_text}[inner](value)


def inner_allows_none(annotation: Any) -> bool:
    """Whether an annotation is `X | None`."""
    return _NONE in typing.get_args(annotation)


def _inner(annotation: Any) -> Any:
    """X of `X | None`."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next(part for part in typing.get_args(annotation) if part is not _NONE)
    return annotation


def _paths_below(section: type, prefix: str) -> Iterator[str]:
    for name, annotation in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(annotation):
            yield from _paths_below(typing.cast(type, annotation), f"{prefix}{name}.")


def _described(inner: Any) -> str:
    if isinstance(inner, type) and issubclass(inner, Enum):
        return f"one of {', '.join(inner.__members__)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(inner, "a list")


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused("must be true or false", "write true or false")
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, str):
        _refuse_number_text(value, "a whole number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused("must be a whole number", "write one, as 8")
    if value != int(value):
        raise Refused("must be a whole number", f"choose {math.floor(value)} or {math.ceil(value)}")
    if abs(value) > MAX_INTEGER:
        raise Refused("must fit into 64 bits", "choose a smaller number")
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, str):
        _refuse_number_text(value, "a number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused("must be a number", "write one, as 0.1 or 1e-3")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Refused("must be a finite number", "write one, as 0.1 or 1e-3")
    return number


def _refuse_number_text(value: str, wanted: str) -> None:
    if _LEADING_ZERO.fullmatch(value):
        plain = value.lstrip("+-0_") or "0"
        raise Refused(f"must be {wanted} without leading zeros: octal or decimal is ambiguous", f"write {plain}")
    if _NUMBER.fullmatch(value):
        raise Refused(f"must be {wanted}, not a quoted text", "leave the quotes out")
    raise Refused(f"must be {wanted}", "write one, as 8" if wanted == "a whole number" else "write one, as 0.1 or 1e-3")


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("must be a text", f'quote it: "{value}"')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("must be UTF-8", "write it in UTF-8") from None
    return value


def _to_enum(kind: type[Enum], value: Any) -> Enum:
    names = list(kind.__members__)
    if isinstance(value, str) and value in names:
        return kind[value]
    near = nearest(str(value).lower(), names)
    raise Refused(f"must be one of {', '.join(names)}", f"did you mean {near}?" if near else "choose one of them")
