"""Router logits that are not finite on a device: the step stops on every rank before it changes anything."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from moe.model import router
from moe.train.mesh import build_mesh
from moe.train.step import run_step
from tests.process_pool import ProcessPool
from tests.train.test_engines import MOE, OPTIM, TORCH, counts_of, global_batch, make, share


def deferred_case(bad: float) -> str:
    """The router's own look is taken out, as on a device, and rank 1 computes a bad logit."""
    look, router.stop_if_not_finite = router.stop_if_not_finite, lambda logits_TE, layer_index: None
    try:
        mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
        engine = make(TORCH, mesh)
        if dist.get_rank() == 1:
            with torch.no_grad():
                engine.module.moe_layers()[0].router.weight[2, 3] = bad
        before = {name: state.weight.clone() for name, state in engine.parameter_states()}
        batch = global_batch(0)
        result = run_step(engine, share(batch, mesh, 1), counts_of(batch, mesh), mesh=mesh, moe=MOE, lr=OPTIM.lr)
        after = dict(engine.parameter_states())
        for name, weight in before.items():
            torch.testing.assert_close(after[name].weight, weight, rtol=0, atol=0, equal_nan=True)
        assert not result.outcome.applied
        assert result.trouble is not None
        assert (1, 0) in result.trouble.micro_steps
        return f"{result.trouble.kind}: {result.trouble.text}"
    finally:
        router.stop_if_not_finite = look


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_on_a_device_stop_all_ranks_before_the_update(
    process_pool: Callable[[int], ProcessPool], bad: float
) -> None:
    for message in process_pool(2).run(deferred_case, bad):
        assert message == "router: router logits of layers.1 are not finite on rank 1"
