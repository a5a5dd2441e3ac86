"""Optimizer-state bytes per rank and stage, counted in the engine and held against the formula."""

from collections.abc import Callable

import pytest
import torch

from moe.train.config import DType, EngineKind, OffloadAdam
from moe.train.mesh import build_mesh
from moe.train.optim import is_expert
from moe.train.zero.memory import MASTER_BYTES, MOMENT_BYTES, optimizer_state_bytes
from tests.process_pool import ProcessPool
from tests.train.test_engines import Kind, make

Pools = Callable[[int], ProcessPool]


def counted_case(kind: Kind) -> tuple[int, int, int, int]:
    """(bytes of masters and moments, dense parameters, expert parameters, number of parameters) on this rank."""
    mesh = build_mesh(expert_size=2, device=torch.device("cpu"))
    engine = make(kind, mesh)
    own = {id(parameter) for parameter in engine.module.parameters()}
    sizes = {n: getattr(p, "ds_numel", p.numel()) for n, p in engine.module.named_parameters()}
    found = 0
    for master, state in engine._optimizer.state.items():  # type: ignore[attr-defined]
        tensors = [state["exp_avg"], state["exp_avg_sq"]] + ([] if id(master) in own else [master])
        found += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    engine.close()
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    return found, sum(sizes.values()) - experts, experts, len(sizes)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (2, None), (3, None), (3, OffloadAdam.torch)])
def test_each_rank_holds_what_the_formula_says(
    process_pool: Pools, stage: int, offload: OffloadAdam | None, dtype: DType
) -> None:
    """Four ranks, experts on two, so that each expert has two copies. Beyond the formula lies padding alone: up to two
    elements a rank and group at stages 1 and 2, up to one a parameter at stage 3."""
    kind = Kind(EngineKind.deepspeed, stage, dtype, offload)
    for found, dense, experts, number in process_pool(4).run(counted_case, kind):
        expected = optimizer_state_bytes(
            dense=dense, experts=experts, zero_stage=stage, dtype=dtype, num_ranks=4, num_copies=2
        )
        padding = {0: 0, 1: 3 * 2, 2: 3 * 2, 3: number}[stage] * (MOMENT_BYTES + MASTER_BYTES)
        assert expected <= found <= expected + padding
        assert padding < 0.02 * expected
