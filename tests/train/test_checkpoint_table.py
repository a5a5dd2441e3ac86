"""docs/checkpoints.md lists the faults, and every test that it names exists and cites the fault's number."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    int(match[1]): match[2]
    for line in (ROOT / "docs" / "checkpoints.md").read_text("utf-8").splitlines()
    if (match := re.fullmatch(r"\| (\d+) \|.*\| (`tests.*`) \| pass \|", line))
}


def test_the_table_is_whole() -> None:
    assert {*range(13, 28), 44, 52, 55} == set(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_every_fault_has_its_tests(number: int) -> None:
    cited = 0
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", ROWS[number]):
        (function,) = [
            node
            for node in ast.parse((ROOT / file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        text = ast.get_docstring(function) or ""
        spans = [(int(a), int(b)) for a, b in re.findall(r"(\d+) to (\d+)", text)]
        single = {int(digits) for digits in re.findall(r"\d+", text)}
        cited += number in single or any(first <= number <= last for first, last in spans)
    assert cited == len(re.findall("::", ROWS[number]))
