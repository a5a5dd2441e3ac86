"""DeepSpeed's CPU Adam, which has to be built: against torch's AdamW, inside the engine."""

import importlib.util
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.utils.cpp_extension as cpp

from moe.errors import EnvironmentProblem
from moe.train.config import EngineConfig, Offload, OffloadAdam, OptimConfig
from moe.verify.layout import compare_traces
from moe.verify.parity import Case
from tests.distributed.test_parity import trace_on_rank
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


def why_not_built() -> str | None:
    """Why a test cannot have the op; None when it lies in torch's extension cache. A build takes a minute and more, so
    that tests never start one: `python -m tests.train.test_cpu_adam` does."""
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not on PATH, so the op cannot be built"
    built = Path(cpp._get_build_directory("cpu_adam", verbose=False)) / "cpu_adam.so"  # type: ignore[attr-defined]
    if not built.exists():
        return f"{built} is not there; `python -m tests.train.test_cpu_adam` builds it, in a minute or more"
    # The cache is the user's, not the environment's: one built beside another DeepSpeed would be built again.
    ours = Path(importlib.util.find_spec("deepspeed").origin).parent  # type: ignore[union-attr, arg-type]
    if str(ours) not in (built.parent / "build.ninja").read_text("utf-8"):
        return f"{built} is of another environment; `python -m tests.train.test_cpu_adam` builds it anew"
    return None


needs_op = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))


@needs_op
@pytest.mark.parametrize("case", [Case(2, 2, 2, 2), Case(2, 2, 3, 2)], ids=str)
def test_three_steps_equal_those_of_one_process(case: Case, process_pool: Pools) -> None:
    config = replace(case, offload=OffloadAdam.deepspeed).config()
    found = pickle.loads(process_pool(2).run(trace_on_rank, config)[0])
    expected = pickle.loads(process_pool(2).run(trace_on_rank, replace(case, offload=OffloadAdam.torch).config())[0])
    comparison = compare_traces(expected, found, tolerance=1e-5)
    assert comparison.first is None, comparison.report()


def test_an_op_that_cannot_be_built_is_named_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 6, and not DeepSpeed's own error."""
    import deepspeed.ops.adam.cpu_adam as cpu_adam
    import torch

    from moe.train.engine_deepspeed import _adam

    class NoBuilder:
        def load(self) -> None:
            raise FileNotFoundError("no compiler here")

    monkeypatch.setattr(cpu_adam, "CPUAdamBuilder", NoBuilder)
    engine = EngineConfig(zero_stage=2, offload_optimizer=Offload.cpu, offload_adam=OffloadAdam.deepspeed)
    group = {"name": "dense", "params": [torch.nn.Parameter(torch.ones(2))], "lr": OptimConfig().lr}
    with pytest.raises(EnvironmentProblem, match=r"offload_adam=deepspeed.*no compiler here.*offload_adam=torch"):
        _adam([group], engine)


if __name__ == "__main__":
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()
