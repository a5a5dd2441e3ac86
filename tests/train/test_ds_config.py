"""An existing DeepSpeed configuration: taken over, filled in, or refused with both sources named."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.config import ConfigError, load_config
from moe.train.config import DType, EngineConfig, Offload, OffloadAdam, OptimConfig
from moe.train.zero.ds_config import Ours, conflicts, read_ds_config, tuning
from moe.train.zero.settings import deepspeed_settings
from moe.verify.layout import compare_traces, one_process
from moe.verify.parity import Case
from tests.distributed.test_parity import trace_on_rank
from tests.process_pool import ProcessPool

# As Hugging Face's examples have it for ZeRO-3, but for the scheduler.
TEMPLATE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
OURS = Ours(
    engine=EngineConfig(zero_stage=3, dtype=DType.bf16),
    optim=OptimConfig(),
    accumulation=2,
    batch_size=16,
    num_ranks=4,
)


def problems_of(file: dict[str, Any], ours: Ours = OURS) -> dict[str, str]:
    return {conflict.key: f"{conflict.rule}; {conflict.way_out}" for conflict in conflicts(file, ours)}


def test_the_common_template_is_taken_over_as_it_is() -> None:
    assert problems_of(TEMPLATE) == {}


def test_auto_is_what_hugging_face_makes_of_it() -> None:
    told = tuning(TEMPLATE, hidden_size=64)
    assert told == {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 10**9,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
        "stage3_max_live_parameters": 10**9,
        "stage3_max_reuse_distance": 10**9,
    }


@pytest.mark.parametrize(
    ("file", "key", "setting", "ours"),
    [
        ({"train_batch_size": 32}, "train_batch_size", "trainer.batch_size", "16"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "trainer.batch_size / ", "2"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps", "trainer.accumulation", "2"),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "optim.clip_norm", "1"),
        ({"bf16": {"enabled": False}}, "bf16.enabled", "engine.dtype=bf16", "true"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "engine.zero_stage", "3"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device", "engine.offload_optimizer", '"none"',
        ),
        ({"optimizer": {"params": {"lr": 1e-4}}}, "optimizer.params.lr", "optim.lr", "0.003"),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
            "optimizer.params.betas", r"optim.beta1, optim.beta2", "0.9, 0.95",
        ),
        ({"optimizer": {"params": {"weight_decay": 0.0}}}, "optimizer.params.weight_decay", "optim.weight_decay", "0.1"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_sources(file: dict[str, Any], key: str, setting: str, ours: str) -> None:
    (found,) = problems_of(file).items()
    assert found[0] == key
    assert setting in found[1]
    assert ours in found[1]
    assert '"auto"' in found[1]


@pytest.mark.parametrize(
    ("file", "key", "reason"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled", "weights are fp32 or bf16"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "AdamW"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "optim.schedule"),
        ({"scheduler": {}, "pipeline": {"stages": 2}}, "pipeline", "not offered"),
        ({"communication_data_type": "bf16"}, "communication_data_type", "reduced in fp32"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states", "not known"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device", "weights in host",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights", "never rounded"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "AdamW"),
        ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean gradient_clipping"),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "zero_optimization.reduce_bucket_size", "whole number"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "zero_optimization.reduce_bucket_size", "whole number"),
        ({"zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm", "true or false"),
        ({"zero_optimization": {"allgather_bucket_size": 333}}, "zero_optimization.allgather_bucket_size", "even"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_refused_with_a_reason(file: dict[str, Any], key: str, reason: str) -> None:
    (found,) = problems_of(file).items()
    assert found[0] == key
    assert reason in found[1]


def test_keys_without_effect_here_are_refused() -> None:
    stage_1 = replace(OURS, engine=EngineConfig(zero_stage=1))
    file = {"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 5}}
    assert (
        "no effect with engine.zero_stage=1"
        in problems_of(file, stage_1)["zero_optimization.stage3_max_live_parameters"]
    )
    uneven = problems_of(TEMPLATE, replace(OURS, equal_ranks=False))
    assert set(uneven) == {
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_max_reuse_distance",
    }


def test_deepspeed_is_told_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TEMPLATE))
    engine = EngineConfig(zero_stage=3, ds_config=str(path))
    told = deepspeed_settings(OptimConfig(), engine, 2, num_elements=10**6, hidden_size=64)["zero_optimization"]
    assert told["stage"] == 3
    assert told["reduce_bucket_size"] == 4096
    assert told["overlap_comm"] is True
    assert told["offload_optimizer"] is None
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    path.write_text(json.dumps(offloaded))
    engine = replace(engine, offload_optimizer=Offload.cpu)
    told = deepspeed_settings(OptimConfig(), engine, 2, num_elements=10**6, pin_memory=True)["zero_optimization"]
    assert told["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_a_run_refuses_the_file_as_it_refuses_a_setting(tmp_path: Path) -> None:
    """All problems at once, by file and key."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 7.0, "zero_optimization": {"stage": 3}}))
    with pytest.raises(ConfigError) as refused:
        load_config([f"engine.ds_config={path}"], "tiny")
    text = str(refused.value)
    assert text.startswith("2 problems")
    assert f"{path}:gradient_clipping (7.0) must be what optim.clip_norm is (1)" in text
    assert f"{path}:zero_optimization.stage (3) must be what engine.zero_stage is (1)" in text
    load_config([f"engine.ds_config={path}", "engine.zero_stage=3", "optim.clip_norm=7"], "tiny")
    with pytest.raises(ConfigError, match=r"engine\.ds_config .* has no effect with engine\.kind=torch"):
        load_config([f"engine.ds_config={path}", "engine.kind=torch"], "tiny")


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False)])
def test_buckets_and_overlap_change_nothing(
    stage: int, offload: bool, process_pool: Callable[[int], ProcessPool], tmp_path: Path
) -> None:
    """Buckets far smaller than the model, exchanges beside backward: the steps of one process all the same."""
    sizes: dict[str, Any] = {"overlap_comm": True, "reduce_bucket_size": 3000, "allgather_bucket_size": 2000}
    if stage == 3:
        sizes |= {
            "sub_group_size": 4000, "stage3_prefetch_bucket_size": 2000, "stage3_param_persistence_threshold": 40,
            "stage3_max_live_parameters": 6000, "stage3_max_reuse_distance": 3000,
        }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": sizes}))
    case = Case(4, 2, stage, 2, offload=OffloadAdam.torch if offload else None)
    config = case.config()
    tuned = replace(config, engine=replace(config.engine, ds_config=str(path)))
    found = pickle.loads(process_pool(4).run(trace_on_rank, tuned)[0])
    expected = pickle.loads(process_pool(1).run(trace_on_rank, one_process(config))[0])
    comparison = compare_traces(expected, found, tolerance=1e-5)
    assert comparison.first is None, comparison.report()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "JSON object"), ('{"a": 1, "a": 2}', "names a twice")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_ds_config(path)
