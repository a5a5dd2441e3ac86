"""The router's share of a layer: every part is a part, and the printed sum is the sum of what stands beside it."""

import re

import pytest
import torch

from benchmarks.router import cases, main, shares


def test_the_table_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--turns", "3"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| softmax")]
    assert len(rows) == 2
    for row in rows:
        products, rest, order, together, plain = (float(re.sub(r"[ %|]", "", cell)) for cell in row[6:])
        assert together == pytest.approx(products + rest + order, abs=0.2)
        assert min(products, order, together, plain) > 0


def test_shares_are_of_the_layer() -> None:
    share = shares(cases(quick=True)[1], torch.device("cpu"), turns=3)
    assert share["layer"] == 1.0
    assert share["order"] < share["router"] < 1.0
