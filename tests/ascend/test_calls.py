"""Without torch_npu: our calls of npu:: operators fit its recorded schemas and shapes, and compute what they must."""

import importlib.util
import inspect
import re

import pytest
import torch

from backends import npu_ops
from backends.ops.listing import OPS
from tests.ascend.cases import CASES, allowed_on_cpu
from tests.ascend.standin import operators, recorded

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None,
    reason="torch_npu is here: simulated/test_ops.py runs its operators themselves",
)


@pytest.mark.parametrize("op", CASES)
def test_calls_fit_the_record_and_results_float64(op: str) -> None:
    with operators(), allowed_on_cpu():
        CASES[op]("cpu")


def test_every_recorded_call_is_still_made() -> None:
    """So that the record holds nothing that nobody calls."""
    from tests.ascend.standin import calls_go_through, key

    made: set[str] = set()

    def gate(own, name, *args, **kwargs):  # type: ignore[no-untyped-def]
        made.add(key(name, args, kwargs))
        return own(name, *args, **kwargs)

    with operators(), calls_go_through(gate), allowed_on_cpu():
        for case in CASES.values():
            case("cpu")
    import json

    assert made == {json.dumps(call["call"]) for call in recorded()["calls"]}


def test_every_operator_that_the_project_calls_is_recorded() -> None:
    """An operator in npu_ops.py, or an Ascend implementation, without a case would be held to nothing."""
    called = re.findall(r'_call\(\s*"(\w+)"', inspect.getsource(npu_ops))
    assert set(called) == set(recorded()["schemas"])
    assert {name for name, table in OPS.items() if "ascend" in table} <= CASES.keys()


ROWS, WEIGHT = torch.zeros(4, 8), torch.zeros(2, 8, 16)
COUNTS = torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("rows", "weight", "counts"),
    [
        (ROWS, WEIGHT.bfloat16(), COUNTS),
        (ROWS.double(), WEIGHT.double(), COUNTS),
        (ROWS, WEIGHT, COUNTS.int()),
        (ROWS, WEIGHT, COUNTS.float()),
        (ROWS, WEIGHT, torch.tensor([1, 2, 1])),
        (ROWS[:, :7].contiguous(), WEIGHT, COUNTS),
        (ROWS.t().contiguous().t(), WEIGHT, COUNTS),
        (ROWS[:0], WEIGHT, COUNTS * 0),
        (ROWS, WEIGHT[:, :, ::2], COUNTS),
    ],
    ids=["two types", "float64", "int32 counts", "float counts", "three counts", "inner", "strided", "empty", "sliced"],
)
def test_what_torch_npu_would_pass_on_unseen_is_stopped(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
) -> None:
    """torch_npu hands most of these to the device's closed library; what that makes of them is not documented."""
    with operators(), pytest.raises(AssertionError) as caught:
        npu_ops.grouped_matmul(rows, weight, counts)
    assert "calls.json" not in str(caught.value)


def test_a_call_that_was_not_recorded_is_refused() -> None:
    with operators(), pytest.raises(AssertionError, match=r"not in tests/ascend/calls\.json"):
        npu_ops.swiglu(torch.zeros(5, 46))
