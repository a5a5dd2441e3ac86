"""What a setting may be by itself, whatever the others are."""

import math
from collections.abc import Callable

from moe.schema import Problem, RunConfig

_MAX_SEED = 2**63 - 1


# One setting by itself: path -> (test, rule, way out). None passes: it means a default derived elsewhere.
_POSITIVE: tuple[Callable, str, str] = (lambda value: value >= 1, "must be at least 1", "choose 1 or more")
_NOT_NEGATIVE: tuple[Callable, str, str] = (lambda value: value >= 0, "must not be negative", "choose 0 or more")
_ABOVE_ZERO: tuple[Callable, str, str] = (lambda value: value > 0, "must be above 0", "choose a positive number")
_SHARE: tuple[Callable, str, str] = (
    lambda value: 0 <= value <= 1,
    "must lie between 0 and 1",
    "choose a share, as 0.1",
)
_DECAY: tuple[Callable, str, str] = (lambda value: 0 <= value < 1, "must be at least 0 and below 1", "choose 0.9, say")

RANGES: dict[str, tuple[Callable, str, str]] = {
    "run.dir": (
        lambda value: value.strip() and "\0" not in value,
        "must name a folder",
        "write null for runs/<recipe>-<time>",
    ),
    "model.vocab_size": (
        lambda value: value >= 300,
        "must be at least 300: 256 bytes, the special tokens and some merges",
        "choose 4096, say",
    ),
    "model.hidden_size": _POSITIVE,
    "model.num_layers": _POSITIVE,
    "model.num_dense_layers": _NOT_NEGATIVE,
    "model.intermediate_size": _POSITIVE,
    "model.num_heads": _POSITIVE,
    "model.num_kv_heads": _POSITIVE,
    "model.head_dim": (
        lambda value: value >= 2 and value % 2 == 0,
        "must be even, for rotary positions turn pairs",
        "choose an even number, or null for hidden_size / num_heads",
    ),
    "model.rope_theta": (lambda value: value > 1, "must be above 1", "choose 10000, say"),
    "model.norm_eps": _ABOVE_ZERO,
    "model.init_std": _ABOVE_ZERO,
    "moe.num_experts": _POSITIVE,
    "moe.top_k": _POSITIVE,
    "moe.moe_intermediate_size": _POSITIVE,
    "moe.num_shared_experts": _NOT_NEGATIVE,
    "moe.routed_scale": _ABOVE_ZERO,
    "moe.load_balancing_coef": _NOT_NEGATIVE,
    "moe.router_z_coef": _NOT_NEGATIVE,
    "moe.expert_bias_rate": _NOT_NEGATIVE,
    "moe.expert_bias_clamp": _NOT_NEGATIVE,
    "moe.expert_bias_freeze_after": _SHARE,
    "moe.num_groups": _POSITIVE,
    "moe.topk_groups": _POSITIVE,
    "moe.router_logit_cap": _NOT_NEGATIVE,
    "moe.router_jitter": (lambda value: 0 <= value < 1, "must be at least 0 and below 1", "choose 0.01, say"),
    "moe.router_noise": _NOT_NEGATIVE,
    "moe.router_seed": (lambda value: 0 <= value <= _MAX_SEED, "must lie between 0 and 2^63 - 1", "choose 0, say"),
    "moe.forced_skew": _NOT_NEGATIVE,
    "moe.balance.micro_batch": _NOT_NEGATIVE,
    "moe.balance.sequence": _NOT_NEGATIVE,
    "moe.balance.batch": _NOT_NEGATIVE,
    "moe.balance.global_batch": _NOT_NEGATIVE,
    "parallel.nproc": _POSITIVE,
    "parallel.expert": _POSITIVE,
    "parallel.sequence": _POSITIVE,
    "parallel.ranks_per_node": _POSITIVE,
    "dispatch.chunks": _POSITIVE,
    "dispatch.capacity_factor": (
        lambda value: 0 < value <= 1000,
        "must be above 0 and at most 1000",
        "choose 1.25, say, or null to serve every pick",
    ),
    "dispatch.min_capacity": _NOT_NEGATIVE,
    "dispatch.max_rows_per_rank": _POSITIVE,
    "guard.max_in_row": _POSITIVE,
    "guard.z_score": _NOT_NEGATIVE,
    "guard.window": (lambda value: value >= 20, "must be at least 20", "choose 100, the default"),
    "engine.zero_stage": (lambda value: value in (0, 1, 2, 3), "must be 0, 1, 2 or 3", "choose 1, the base"),
    "engine.ds_config": (
        lambda value: value.strip() and "\0" not in value,
        "must name a file",
        "write null for none",
    ),
    "optim.lr": _ABOVE_ZERO,
    "optim.beta1": _DECAY,
    "optim.beta2": _DECAY,
    "optim.eps": _ABOVE_ZERO,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.clip_norm": _NOT_NEGATIVE,
    "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.min_lr_ratio": _SHARE,
    "trainer.max_steps": _POSITIVE,
    "trainer.batch_size": _POSITIVE,
    "trainer.accumulation": _POSITIVE,
    "trainer.seed": (lambda value: 0 <= value <= _MAX_SEED, "must lie between 0 and 2^63 - 1", "choose 0, say"),
    "trainer.save_every": _NOT_NEGATIVE,
    "trainer.keep_last": _NOT_NEGATIVE,
    "trainer.keep_every": _NOT_NEGATIVE,
    "trainer.eval_every": _NOT_NEGATIVE,
    "trainer.eval_batches": _NOT_NEGATIVE,
    "trainer.resume": (
        lambda value: value.strip() and "\0" not in value,
        "must be auto, never or a checkpoint's path",
        "choose auto",
    ),
    "trainer.sample_tokens": _NOT_NEGATIVE,
    "data.sources": (
        lambda value: len(set(value)) == len(value) > 0 and all(value),
        "must name one or more different sources",
        "choose [stdlib, topics], say",
    ),
    "data.seq_len": (lambda value: value >= 8, "must be at least 8", "choose 256, say"),
    "data.heldout_fraction": (
        lambda value: 0 < value < 1,
        "must lie between 0 and 1, both excluded",
        "choose 0.03, say",
    ),
    "data.cache_dir": (
        lambda value: value.strip() and "\0" not in value,
        "must name a folder",
        "write null for the user's cache folder",
    ),
}


def out_of_range(config: RunConfig, path: str, test: Callable, rule: str, way_out: str) -> Problem | None:
    value = value_at(config, path)
    if value is None or (test(value) and not (isinstance(value, float) and not math.isfinite(value))):
        return None
    return Problem(path=path, value=value, rule=rule, way_out=way_out)


def value_at(config: RunConfig, path: str) -> object:
    """The setting at a dotted path."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
