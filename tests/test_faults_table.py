"""docs/faults.md is whole, and every test that it names exists and cites its entry."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"\| (A\d\d) \| ([^|]+) \| ([^|]+) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ENTRIES = [f"A{number:02d}" for number in range(1, 48)]


def table() -> dict[str, str]:
    """Entry -> what stands in its last column; in the order of the file."""
    rows = [
        match.groups()
        for match in map(ROW.fullmatch, (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines())
        if match
    ]
    assert [entry for entry, _, _ in rows] == ENTRIES
    return {entry: answer for entry, _, answer in rows}


@cache
def cited_in(file: str) -> dict[str, str]:
    """Test function -> its docstring and parameters."""
    functions = [node for node in ast.parse((ROOT / file).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: f"{ast.get_docstring(node)} {' '.join(map(ast.unparse, node.decorator_list))}" for node in functions
    }


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_test_or_a_reason(entry: str) -> None:
    answer = table()[entry]
    named = TEST.findall(answer)
    assert answer.count("::") == len(named)
    for file, name in named:
        assert name in cited_in(file), f"{file} has no {name}"
    if named:
        assert any(re.search(rf"\b{entry}\b", cited_in(file)[name]) for file, name in named)
    else:
        assert re.match(r"(comes with|cannot happen)", answer)
