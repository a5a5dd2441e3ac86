"""`switchyard verify layout`: shrinking, the card, the file of a trace, and faults that a layout could bring."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError, load_config, validate
from moe.schema import RunConfig
from moe.train.config import EngineKind
from moe.verify.card import layout_card
from moe.verify.layout import compare_traces
from moe.verify.shrink import refuse_layout_dependent, shrink
from moe.verify.trace_file import load_trace, save_trace
from tests.process_pool import ProcessPool
from tests.verify.test_layout import changed, trace

Pools = Callable[[int], ProcessPool]


@pytest.mark.parametrize("recipe", ["quickstart", "tiny"])
def test_shrinking_keeps_the_layout_and_says_what_it_cut(recipe: str) -> None:
    config = load_config(["trainer.accumulation=2", "parallel.nproc=4", "parallel.expert=2"], recipe)
    small, changes = shrink(config)
    assert validate(small) == []
    assert small.parallel == config.parallel
    assert small.dispatch == config.dispatch
    assert (small.engine.kind, small.engine.zero_stage) == (config.engine.kind, config.engine.zero_stage)
    assert (small.moe.num_experts, small.moe.top_k, small.moe.router) == (
        config.moe.num_experts,
        config.moe.top_k,
        config.moe.router,
    )
    for change in changes:
        section, name = change.path.split(".")
        assert getattr(getattr(config, section), name) == change.before
        assert getattr(getattr(small, section), name) == change.after
        assert change.path in str(change)
    # Whatever differs is said.
    said = {change.path for change in changes}
    for section in ("model", "moe", "trainer", "optim", "engine", "data"):
        left, right = getattr(config, section), getattr(small, section)
        for name in left.__dataclass_fields__:
            assert getattr(left, name) == getattr(right, name) or f"{section}.{name}" in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["moe.load_balancing_coef=0", "moe.balance.micro_batch=0.01"],
            r"moe\.balance\.micro_batch .* no layout equals",
        ),
        (
            ["dispatch.capacity_factor=1.0", "dispatch.capacity_scope=local"],
            r"dispatch\.capacity_scope .* no layout equals",
        ),
        (["dispatch.max_rows_per_rank=100"], r"dispatch\.max_rows_per_rank .* no layout equals"),
    ],
)
def test_what_depends_on_the_layout_by_definition_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_layout_dependent(load_config(overrides, "quickstart"))


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    save_trace(trace(), tmp_path / "trace.safetensors")
    found = load_trace(tmp_path / "trace.safetensors")
    assert found.layout == "a layout"
    assert compare_traces(trace(), found, tolerance=0.0).first is None
    assert len(found.steps) == 2


def test_the_card_tells_verdict_figures_and_the_worst(tmp_path: Path) -> None:
    candidate = changed(1, grad_norm=6.0)
    found = compare_traces(trace(), candidate)
    card = layout_card("mine", ["a=1"], [], trace(), candidate, found)
    assert card.startswith("# DEPARTS: mine")
    assert "First departure** (1 of" in card
    assert "step 2: grad_norm: relative error 1.00e+00" in card
    assert "| 2 | 2 (0.0e+00) | 1.1 (0.0e+00) | 0.5 (0.0e+00) | 6 (1.0e+00) | sum 8, equal | sum 0, equal |" in card
    equal = layout_card("mine", [], [], trace(), trace(), compare_traces(trace(), trace()))
    assert equal.startswith("# EQUAL: mine")


def plant(fault: str, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Build one of the reported faults into this rank's code."""
    import torch.distributed as dist

    from dispatch.all_to_all import AllToAllDispatcher
    from moe.model import transformer
    from moe.model.batch import IGNORE_LABEL
    from moe.model.loss import lm_loss_sum
    from moe.model.rope import rotary_angles
    from moe.model.transformer import Transformer
    from moe.train import engine_torch, objective, parallelize
    from moe.train.objective import StepCounts, count_tokens
    from moe.verify import layout

    reduce = engine_torch.TorchEngine._reduce

    def around_reduction(before: Callable[[str, Tensor], None], after: Callable[[str, Tensor], None]) -> None:
        def patched(self: engine_torch.TorchEngine) -> None:
            gradients = {n: self._optimizer.masters[p].grad for n, p in self._parameters.items()}
            for name, gradient in gradients.items():
                before(name, gradient)
            reduce(self)
            for name, gradient in gradients.items():
                after(name, gradient)

        patch.setattr(engine_torch.TorchEngine, "_reduce", patched)

    def nothing(name: str, gradient: Tensor) -> None: ...

    match fault:
        case "A23":  # a rank's expert gradient goes missing
            around_reduction(lambda n, g: g.zero_() if ".experts.w2" in n and rank == 1 else g, nothing)  # type: ignore[arg-type, return-value]
        case "A24":  # expert gradients divided by the wrong group's size
            around_reduction(nothing, lambda n, g: g.mul_(2) if ".experts." in n else g)  # type: ignore[arg-type, return-value]
        case "A25":  # the norm counts this rank's experts alone
            norm = engine_torch.global_grad_norm
            patch.setattr(engine_torch, "global_grad_norm", lambda dense, expert, group: norm(dense, expert, None))
        case "A26":  # a router's gradient is not summed over the ranks
            kept: dict[str, Tensor] = {}
            around_reduction(
                lambda n, g: kept.update({n: g.clone()}) if n.endswith("router.weight") else None,
                lambda n, g: g.copy_(kept[n]) if n.endswith("router.weight") else None,  # type: ignore[arg-type, return-value]
            )
        case "A27":  # every rank starts its experts from the same seed
            initialise = parallelize.initialise

            def alike(module: torch.nn.Module, **settings: object) -> None:
                initialise(module, **settings)  # type: ignore[arg-type]
                for name, parameter in module.named_parameters():
                    if ".experts." in name:
                        generator = torch.Generator().manual_seed(1)
                        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)

            patch.setattr(parallelize, "initialise", alike)
        case "A28":  # each rank divides by its own tokens, then the mean over ranks is taken
            size = dist.get_world_size()

            def own_counts(batches, *, mesh, stop_requested):  # type: ignore[no-untyped-def]
                own = count_tokens(batches, mesh)
                return StepCounts(
                    labelled_tokens=own.labelled_tokens * size, valid_tokens=own.valid_tokens * size
                ), False

            patch.setattr(layout, "count_step", own_counts)
        case "A29":  # combine weights come through without their gradient
            run = AllToAllDispatcher.run

            def detached(self, x_TD, ids_TK, weights_TK, *rest, **named):  # type: ignore[no-untyped-def]
                return run(self, x_TD, ids_TK, weights_TK.detach(), *rest, **named)

            patch.setattr(AllToAllDispatcher, "run", detached)
        case "shard pools":  # a row's balance counts are those of one rank's positions
            sums = objective.balance_sums_by_scope
            patch.setattr(
                objective,
                "balance_sums_by_scope",
                lambda router, scopes, mesh, *rest: sums(router, scopes, replace(mesh, sequence_group=None), *rest),
            )
        case "shard labels":  # labels are shifted inside a rank's positions, and the one at the cut is lost
            own = Transformer._own

            def cut(self, batch):  # type: ignore[no-untyped-def]
                part = own(self, batch)
                labels_BS = part.labels_BS.clone()
                labels_BS[:, -1] = IGNORE_LABEL
                return part._replace(labels_BS=labels_BS)

            patch.setattr(Transformer, "_own", cut)
        case "shard positions":  # every rank counts positions from the first that it has
            patch.setattr(transformer, "rotary_angles", lambda p, **of: rotary_angles(p - p[:, :1], **of))
        case "A46":  # a rank's loss is the mean over its own labels: without one, 0/0

            def mean(logits_BSV, labels_BS):  # type: ignore[no-untyped-def]
                return lm_loss_sum(logits_BSV, labels_BS) / (labels_BS != IGNORE_LABEL).sum()

            patch.setattr(transformer, "lm_loss_sum", mean)
        case _:
            assert fault == "none"


def record_with(config: RunConfig, fault: str, folder: str) -> None:
    """In a rank: record a trace with a fault built in; rank 0 leaves it in `folder`."""
    import torch.distributed as dist

    from backends.resolve import resolve_backend
    from moe.verify.layout import record_trace

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, rank, patch)
        found = record_trace(config, backend=resolve_backend("cpu", rank), num_steps=2)
    if rank == 0:
        save_trace(found, Path(folder) / f"{fault}.safetensors")


FAULTS = {
    "none": None,
    "A23": r"gradient of layers\.\d\.moe\.experts\.w2",
    "A24": r"gradient of layers\.\d\.moe\.experts\.w\d",
    "A25": r"grad_norm",
    "A26": r"gradient of layers\.\d\.moe\.router\.weight",
    "A27": r"lm_loss|tokens_per_expert|gradient",
    "A28": r"lm_loss|balance_loss|gradient",
    "A29": r"gradient of .*",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_and_named(
    fault: str, process_pool: Pools, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A23 to A29: what a layout did to other trainers, built into the plain engine on 2 ranks with EP 2, is found, and the
    first departure names the tensor that the fault touches; without a fault nothing departs."""
    from moe.verify.layout import one_process

    config = shrink(load_config(["parallel.nproc=2", "parallel.expert=2"], "quickstart"))[0]
    config = replace(
        config,
        engine=replace(config.engine, kind=EngineKind.torch),
        moe=replace(config.moe, load_balancing_coef=0.0) if fault == "A29" else config.moe,
    )
    process_pool(2).run(record_with, config, fault, str(tmp_path))
    candidate = load_trace(tmp_path / f"{fault}.safetensors")
    oracle = tmp_path_factory.getbasetemp() / f"oracle-{config.moe.load_balancing_coef}"
    if not oracle.exists():
        oracle.mkdir()
        process_pool(1).run(record_with, one_process(config), "none", str(oracle))
    found = compare_traces(load_trace(oracle / "none.safetensors"), candidate)
    if FAULTS[fault] is None:
        assert found.first is None, found.report()
        return
    assert found.first is not None
    assert re.search(FAULTS[fault], found.first.what), found.report()
    assert found.first.where


SEQUENCE_FAULTS = {
    "none": None,
    "A26": r"gradient of layers\.\d\.moe\.router\.weight",
    "A46": r"lm_loss",
    "shard pools": r"balance_loss",
    "shard labels": r"lm_loss",
    "shard positions": r"lm_loss|tokens_per_expert",
}


@pytest.mark.parametrize("fault", SEQUENCE_FAULTS)
def test_each_fault_of_shared_rows_is_found_and_named(
    fault: str, process_pool: Pools, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A26, A46, and what else goes wrong when ranks share rows: on 2 ranks with parallel.sequence=2 alone."""
    from moe.verify.layout import one_process

    overrides = ["parallel.nproc=2", "parallel.sequence=2", "moe.balance_scope=sequence"]
    config, _ = shrink(load_config(overrides, "quickstart"))
    config = replace(config, engine=replace(config.engine, kind=EngineKind.torch))
    process_pool(2).run(record_with, config, fault, str(tmp_path))
    oracle = tmp_path_factory.getbasetemp() / "oracle-sequence"
    if not oracle.exists():
        oracle.mkdir()
        process_pool(1).run(record_with, one_process(config), "none", str(oracle))
    found = compare_traces(load_trace(oracle / "none.safetensors"), load_trace(tmp_path / f"{fault}.safetensors"))
    expected = SEQUENCE_FAULTS[fault]
    assert (found.first is None) == (expected is None), found.report()
    if expected is not None:
        assert found.first is not None
        assert re.match(f"step 1: ({expected})", found.first.what), found.report()
