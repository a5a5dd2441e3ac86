"""What DeepSpeed is told: our settings in its words (on the data path, before the engine). Torch-free."""

from typing import Any

from moe.train.config import DType, EngineConfig, Offload, OptimConfig
from moe.train.zero.ds_config import read_ds_config, tuning

BUCKET_ELEMENTS = 1 << 24
"""Largest bucket of a reduction or a gather. DeepSpeed's default of 5e8 would allocate 2 GB for any model."""
KEPT_WHOLE_ELEMENTS = 100_000
"""Largest parameter that all ranks keep whole at stage 3: norms and routers cost little to keep, and a gather each to
fetch."""
REUSE_ELEMENTS = 10**9
"""Elements within which a weight that is used again stays whole at stage 3, as DeepSpeed has it."""
_NEVER = 10**9


def kept_whole_elements(num_elements: int) -> int:
    """Elements up to which a parameter stays whole at stage 3: of a small model few, so that it is cut at all."""
    return min(KEPT_WHOLE_ELEMENTS, num_elements // 256)


def deepspeed_settings(
    optim: OptimConfig,
    engine: EngineConfig,
    accumulation: int,
    *,
    num_elements: int,
    equal_ranks: bool = True,
    pin_memory: bool = False,
    hidden_size: int = 0,
) -> dict[str, Any]:
    """Everything that matters, explicitly: several defaults would change the mathematics (clipping defaults to 1.0).

    num_elements: parameters of the rank that has most; the same number on all, for it decides what they exchange.
    equal_ranks: whether all have as many; if not, stage 3 fetches a weight when it is needed and lets it go after use,
    for what DeepSpeed fetches ahead and keeps depends on the sizes of what a rank holds, and would not be alike.
    pin_memory: of what is offloaded; for accelerators. hidden_size: of the model, for "auto" in engine.ds_config.
    Raises ValueError when the file of engine.ds_config cannot be read; moe.rules.engine has refused what contradicts.
    """
    # Even, as the gather's alignment asks.
    bucket = 2 * max(1, min(BUCKET_ELEMENTS, num_elements) // 2)
    bf16 = engine.dtype is DType.bf16 and engine.zero_stage > 0
    offload = {"device": engine.offload_optimizer.value, "pin_memory": pin_memory}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only multiplies it into counters that nobody reads
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optim.clip_norm if engine.zero_stage > 0 else 0.0,
        # DeepSpeed 0.19.8 refuses sums at stage 3; the engine makes up for the mean there (DeepSpeedEngine).
        "gradient_allreduce_op": "sum" if engine.zero_stage < 3 else "mean",
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": bf16, "check_grad_overflow": True, "immediate_grad_update": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": engine.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "offload_optimizer": offload if engine.offload_optimizer is not Offload.none else None,
            "stage3_prefetch_bucket_size": bucket if equal_ranks else 0,
            "stage3_max_reuse_distance": REUSE_ELEMENTS if equal_ranks else 0,
            "stage3_max_live_parameters": REUSE_ELEMENTS,
            "stage3_param_persistence_threshold": kept_whole_elements(num_elements),
        },
        "zero_force_ds_cpu_optimizer": False,  # engine.offload_adam chooses
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
    if engine.ds_config is not None:
        for key, value in tuning(read_ds_config(engine.ds_config), hidden_size).items():
            section, _, name = key.rpartition(".")
            (settings["zero_optimization"][section] if section else settings["zero_optimization"])[name] = value
    return settings
