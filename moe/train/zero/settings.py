"""What DeepSpeed is told: our settings in its words (on the data path, before the engine). Torch-free."""

from typing import Any

from moe.train.config import DType, EngineConfig, OptimConfig

BUCKET_ELEMENTS = 1 << 24
"""Largest bucket of a reduction or a gather. DeepSpeed's default of 5e8 would allocate 2 GB for any model."""
_NEVER = 10**9


def deepspeed_settings(
    optim: OptimConfig, engine: EngineConfig, accumulation: int, num_elements: int
) -> dict[str, Any]:
    """Everything that matters, explicitly: several defaults would change the mathematics (clipping defaults to 1.0).

    num_elements: parameters on this rank.
    """
    # Even, as the gather's alignment asks.
    bucket = 2 * max(1, min(BUCKET_ELEMENTS, num_elements) // 2)
    bf16 = engine.dtype is DType.bf16 and engine.zero_stage > 0
    return {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only multiplies it into counters that nobody reads
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optim.clip_norm if engine.zero_stage > 0 else 0.0,
        "gradient_allreduce_op": "sum",
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
        },
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
    }
