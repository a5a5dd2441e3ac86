"""What ZeRO stage 3 is for, and what it must leave alone: weights in pieces, evaluation, generation.

That it gives the mathematics of one process is shown in tests/distributed/test_parity.py; state and refusals in
test_engines.py, saving and loading in test_checkpoint*.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.model.config import BalanceScope
from moe.schema import RunConfig
from moe.train.config import Checkpointing, EngineKind
from moe.train.zero.settings import kept_whole_elements
from moe.verify.layout import compare_traces, synthetic_batch
from moe.verify.parity import Case
from tests.distributed.test_parity import trace_on_rank
from tests.process_pool import ProcessPool
from tests.train.from_config import with_engine

Pools = Callable[[int], ProcessPool]


def batches_of(config: RunConfig, mesh: Any) -> list[Any]:
    """This rank's micro-batches of a step."""
    rows = config.trainer.batch_size // mesh.world_size // config.trainer.accumulation
    return [
        synthetic_batch(
            (micro * mesh.world_size + mesh.rank) * rows, rows, seq_len=config.data.seq_len,
            vocab_size=config.model.vocab_size, seed=0,
        )
        for micro in range(config.trainer.accumulation)
    ]  # fmt: skip


def one_step(engine: Any, mesh: Any, config: RunConfig) -> Any:
    from moe.train.step import count_step, run_step

    batches = batches_of(config, mesh)
    counts, _ = count_step(batches, mesh=mesh, stop_requested=False)
    return run_step(engine, batches, counts, mesh=mesh, moe=config.moe, lr=1e-3)


def held_elements(module: torch.nn.Module) -> dict[str, int]:
    """Elements of each weight that this rank holds beside its piece."""
    return {name: parameter.numel() for name, parameter in module.named_parameters()}


def pieces_case(config: RunConfig) -> tuple[list[dict[str, int]], dict[str, int], int]:
    """What is held after building, each backward and each step; the whole sizes; elements of all."""

    def work(engine: Any, mesh: Any, _: Any) -> Any:
        held = [held_elements(engine.module)]
        for _ in range(3):
            for batch in batches_of(config, mesh):
                engine.backward(engine.forward(batch).lm_loss_sum)
                held.append(held_elements(engine.module))
            engine.step(1e-3)
            held.append(held_elements(engine.module))
        whole = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
        for name, parameter in engine.module.named_parameters():
            copies = mesh.world_size // (mesh.expert_size if ".experts." in name else 1)
            assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // copies), name
        return held, whole, sum(whole.values())

    result: tuple[list[dict[str, int]], dict[str, int], int] = with_engine(config, work)
    return result


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("save_memory", [False, True], ids=["keep", "save_memory"])
@pytest.mark.parametrize("checkpointing", list(Checkpointing), ids=lambda kind: kind.value)
def test_weights_are_whole_only_while_they_are_used(
    checkpointing: Checkpointing, save_memory: bool, chunks: int, process_pool: Pools
) -> None:
    """After each backward and step a rank holds its pieces, and the small weights that stay whole.

    Not after forward: DeepSpeed keeps what backward needs again soon (stage3_max_reuse_distance).
    """
    config = Case(2, 2, 3, 2, checkpointing, chunks=chunks).config()
    config = replace(config, dispatch=replace(config.dispatch, save_memory=save_memory))
    for held, whole, elements in process_pool(2).run(pieces_case, config):
        limit = kept_whole_elements(elements)
        kept = {name for name, count in whole.items() if count <= limit}
        assert 0 < len(kept) < len(whole)
        for moment, now in enumerate(held):
            assert {name for name, count in now.items() if count} <= kept, f"moment {moment}"


def alone_case(config: RunConfig) -> tuple[float, list[int], float]:
    """Held-out loss, generated ids, and the norm of a step after both."""
    from moe.model.generate import generate

    def work(engine: Any, mesh: Any, _: Any) -> Any:
        one_step(engine, mesh, config)
        module = engine.module
        module.eval()
        with torch.no_grad():
            loss: Tensor = module(batches_of(config, mesh)[0]).lm_loss_sum
        torch.distributed.all_reduce(loss, group=mesh.world_group)
        ids = generate(module, [1, 2, 3], 12, temperature=0.7, seed=0, end_id=None)
        return float(loss), ids, one_step(engine, mesh, config).outcome.grad_norm

    result: tuple[float, list[int], float] = with_engine(config, work)
    return result


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_evaluation_and_generation_need_no_engine(tied: bool, process_pool: Pools) -> None:
    """The module called by itself gives what it gives at stage 1, between steps that stay the same."""
    results = []
    for stage in (1, 3):
        config = Case(2, 2, stage).config()
        config = replace(config, model=replace(config.model, tie_embeddings=tied))
        results.append(process_pool(2).run(alone_case, config)[0])
    (loss, ids, norm), (loss_3, ids_3, norm_3) = results
    assert loss_3 == pytest.approx(loss, rel=1e-5)
    assert norm_3 == pytest.approx(norm, rel=1e-5)
    assert ids_3 == ids


def test_picks_of_the_whole_step_are_counted_first(process_pool: Pools) -> None:
    """The forward before the first backward that the global-batch loss needs runs outside DeepSpeed's own."""
    import pickle

    traces = []
    for case in (Case(2, 2, 3, 2, scope=BalanceScope.global_batch), Case(1, 1, 0, 2, engine=EngineKind.torch)):
        config = replace(case, scope=BalanceScope.global_batch).config()
        traces.append(pickle.loads(process_pool(case.world_size).run(trace_on_rank, config)[0]))
    found, expected = traces
    comparison = compare_traces(expected, found, tolerance=1e-5)
    assert comparison.first is None, comparison.report()
