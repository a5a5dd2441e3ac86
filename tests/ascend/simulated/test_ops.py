"""Every implementation that runs on an NPU, on the simulated one: outputs and gradients against float64 on the CPU."""

import re

import pytest
import torch

from backends.ops import expert_mlp, grouped_gemm, rms_norm
from tests.ascend.record import as_text, differences, record
from tests.ascend.sim.order import CALLS
from tests.ascend.standin import RECORD, recorded
from tests.backends import test_expert_mlp, test_grouped_gemm, test_rms_norm

# torch_npu 2.13 says this once of its own buffers, when its norm is first called; nothing of ours asks for such a format.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_npu(table: object) -> list[str]:
    assert isinstance(table, dict)
    return ["auto", *(name for name, implementation in table.items() if "npu" in implementation.devices)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", on_npu(grouped_gemm.IMPLEMENTATIONS))
def test_grouped_gemm_equals_float64(implementation: str, dtype: torch.dtype) -> None:
    for shape in (*test_grouped_gemm.SHAPES.values(), *test_grouped_gemm.ODD_SIZES.values()):
        test_grouped_gemm.check(implementation, shape, dtype, "npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", on_npu(expert_mlp.IMPLEMENTATIONS))
def test_expert_mlp_equals_float64(implementation: str, dtype: torch.dtype) -> None:
    for shape in test_expert_mlp.SHAPES:
        test_expert_mlp.check(implementation, shape, dtype, "npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", on_npu(rms_norm.IMPLEMENTATIONS))
def test_rms_norm_equals_float64(implementation: str, dtype: torch.dtype) -> None:
    for shape in test_rms_norm.SHAPES:
        test_rms_norm.check(implementation, shape, dtype, "npu")


def test_auto_takes_the_ascend_operators() -> None:
    before = CALLS["npu::npu_grouped_matmul"], CALLS["npu::npu_swiglu"]
    test_expert_mlp.check("auto", "even", torch.float32, "npu")
    assert CALLS["npu::npu_grouped_matmul"] >= before[0] + 6
    assert CALLS["npu::npu_swiglu"] >= before[1] + 2


def test_the_record_is_what_torch_npu_says() -> None:
    """Schemas, and the answers of its meta kernels and C++ code to our calls: what the ordinary tests go by."""
    now = record()
    stale = differences(recorded(), now)
    assert not stale, "\n".join(["tests/ascend/calls.json is old, `make record-ascend` renews it:", *stale])
    assert as_text(now) == RECORD.read_text(), "written by hand: `make record-ascend` writes it"


def test_a_record_that_is_old_is_told_from_one_that_is_not() -> None:
    """Each way in which the file may have gone stale: another version, schema, result, a call too few or too many."""
    good = recorded()
    assert differences(good, recorded()) == []
    for change, said in (
        (lambda old: old.update(torch_npu="2.12.0"), r"torch_npu: recorded from 2\.12\.0"),
        (lambda old: old["schemas"].update(npu_swiglu="npu::npu_swiglu() -> ()"), r"changed: schema of npu_swiglu: "),
        (lambda old: old["schemas"].pop("npu_swiglu"), r"not recorded: schema of npu_swiglu$"),
        (lambda old: old["calls"][0].update(result=[]), r"changed: \[\"npu_"),
        (lambda old: old["calls"].pop(), r"not recorded: \[\"npu_"),
        (lambda old: old["calls"].append({**old["calls"][0], "call": ["x"]}), r"not made any more: \[\"x\"\]"),
    ):
        old = recorded()
        change(old)
        (line,) = differences(old, good)
        assert re.search(said, line), line
