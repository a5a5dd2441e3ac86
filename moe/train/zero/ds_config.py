"""A DeepSpeed configuration file that a user brings along (`engine.ds_config`). Torch-free.

Its keys fall into five kinds, each in a table below:

    SAME      mean what one of our settings means: must say the same, or "auto"
    FIXED     must have one value here, for a reason
    TUNING    change speed or memory and not the mathematics: passed on; "auto" is filled in
    ANSWERED  have another answer here, so that what they say does not matter
    REFUSED   belong to something that this project does otherwise or not at all

All others are refused as unknown. A section that is switched off may say what it likes.

Source: what "auto" means is that of Hugging Face transformers, src/transformers/integrations/deepspeed.py,
HfTrainerDeepSpeedConfig.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.train.config import DType, EngineConfig, OptimConfig

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What a file is held against."""

    engine: EngineConfig
    optim: OptimConfig
    accumulation: int
    batch_size: int
    """Sequences per optimizer step."""
    num_ranks: int
    equal_ranks: bool = True
    """Whether all ranks hold as many experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """One key of a file that cannot be taken over."""

    key: str
    value: object
    rule: str
    """Begins with a verb: what it breaks."""
    way_out: str
    setting: str = ""
    """Ours that it contradicts."""


_SAME: Mapping[str, tuple[str, Callable[[Ours], object]]] = {
    "train_batch_size": ("trainer.batch_size", lambda ours: ours.batch_size),
    "train_micro_batch_size_per_gpu": (
        "trainer.batch_size / (trainer.accumulation * parallel.nproc)",
        lambda ours: ours.batch_size / (ours.accumulation * ours.num_ranks),
    ),
    "gradient_accumulation_steps": ("trainer.accumulation", lambda ours: ours.accumulation),
    "gradient_clipping": ("optim.clip_norm", lambda ours: ours.optim.clip_norm),
    "bf16.enabled": ("engine.dtype=bf16", lambda ours: ours.engine.dtype is DType.bf16),
    "zero_optimization.stage": ("engine.zero_stage", lambda ours: ours.engine.zero_stage),
    "zero_optimization.offload_optimizer.device": (
        "engine.offload_optimizer",
        lambda ours: ours.engine.offload_optimizer.value,
    ),
    "optimizer.params.lr": ("optim.lr", lambda ours: ours.optim.lr),
    "optimizer.params.betas": ("[optim.beta1, optim.beta2]", lambda ours: [ours.optim.beta1, ours.optim.beta2]),
    "optimizer.params.eps": ("optim.eps", lambda ours: ours.optim.eps),
    "optimizer.params.weight_decay": ("optim.weight_decay", lambda ours: ours.optim.weight_decay),
}

_FIXED: Mapping[str, tuple[object, str]] = {
    "optimizer.type": ("AdamW", "the optimizer is AdamW"),
    "optimizer.params.adam_w_mode": (True, "weight decay is decoupled"),
    "optimizer.params.torch_adam": (True, "engine.offload_adam names the implementation"),
    "zero_optimization.offload_param.device": ("none", "weights in host memory are not offered"),
    "zero_optimization.reduce_scatter": (True, "tested so alone"),
    "zero_optimization.round_robin_gradients": (False, "not tested with expert groups"),
    "zero_optimization.elastic_checkpoint": (False, "checkpoints are this project's own"),
    "communication_data_type": ("fp32", "gradients are reduced in fp32"),
    "data_types.grad_accum_dtype": ("fp32", "gradients are added up in fp32"),
    "prescale_gradients": (False, "gradients are plain sums"),
    "gradient_predivide_factor": (1.0, "gradients are plain sums"),
    "sparse_gradients": (False, "gradients are dense"),
    "zero_allow_untested_optimizer": (True, "the optimizer is this project's"),
    "zero_force_ds_cpu_optimizer": (False, "engine.offload_adam names the implementation"),
    "fp16.enabled": (False, "weights are fp32 or bf16 (engine.dtype)"),
    "amp.enabled": (False, "weights are fp32 or bf16 (engine.dtype)"),
    "torch_autocast.enabled": (False, "weights are fp32 or bf16 (engine.dtype)"),
    "flops_profiler.enabled": (False, "metrics.jsonl has the run's figures"),
    "comms_logger.enabled": (False, "metrics.jsonl has the bytes and seconds of dispatch"),
    "tensorboard.enabled": (False, "the run folder has TensorBoard's files when it is installed"),
    "wandb.enabled": (False, "the run folder holds everything a tracker shows"),
    "csv_monitor.enabled": (False, "metrics.jsonl holds everything"),
    "wall_clock_breakdown": (False, "metrics.jsonl has the run's figures"),
    "memory_breakdown": (False, "metrics.jsonl has the run's figures"),
    "dump_state": (False, "the run folder's config.yaml has the state"),
}

_COUNT, _SWITCH = "a whole number of elements, or auto", "true or false"
_TUNING: Mapping[str, str] = {
    "zero_optimization.reduce_bucket_size": _COUNT,
    "zero_optimization.allgather_bucket_size": _COUNT,
    "zero_optimization.sub_group_size": _COUNT,
    "zero_optimization.overlap_comm": _SWITCH,
    "zero_optimization.contiguous_gradients": _SWITCH,
    "zero_optimization.offload_optimizer.pin_memory": _SWITCH,
    "zero_optimization.stage3_prefetch_bucket_size": _COUNT,
    "zero_optimization.stage3_param_persistence_threshold": _COUNT,
    "zero_optimization.stage3_max_live_parameters": _COUNT,
    "zero_optimization.stage3_max_reuse_distance": _COUNT,
}
_NEED_EQUAL_RANKS = (
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_max_reuse_distance",
)

_ANSWERED = {
    "steps_per_print",
    "zero_optimization.allgather_partitions",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}
"""The progress line is ours; a checkpoint holds whole fp32 weights at any stage."""

_REFUSED: Mapping[str, str] = {
    "scheduler": "the learning rate follows optim.schedule, optim.warmup_steps and optim.min_lr_ratio",
    "activation_checkpointing": "engine.activation_checkpointing does this",
    "checkpoint": "checkpoints are this project's own; nothing is read from or written to DeepSpeed's",
    "load_universal_checkpoint": "checkpoints are this project's own",
    "expert_parallel": "parallel.expert lays out experts, dispatch sends tokens to them",
    "sequence_parallel_size": "parallel settings of the recipe lay out ranks",
    "tensor_parallel": "not offered",
    "pipeline": "not offered",
    "data_efficiency": "data.* says what is trained on",
    "curriculum_learning": "data.* says what is trained on",
    "elasticity": "not offered: a run resumes on another number of ranks by itself",
    "autotuning": "not offered",
    "compression_training": "not offered",
    "sparse_attention": "not offered",
    "aio": "nothing is offloaded to disks",
    "nebula": "checkpoints are this project's own",
    "zero_optimization.zenflow": "it departs from AdamW: a weight was seen 5.3 off after 3 steps",
    "zero_optimization.zero_quantized_weights": "weights are never rounded on their way",
    "zero_optimization.zero_quantized_gradients": "gradients are never rounded on their way",
    "zero_optimization.zero_hpz_partition_size": "DeepSpeed refuses it with experts",
    "zero_optimization.mics_shard_size": "not tested with expert groups",
}

# A section whose switch says so has no effect, whatever else it says.
_WITH_SWITCH = (
    "fp16",
    "amp",
    "torch_autocast",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
)
_OFF: Mapping[str, tuple[str, object]] = {
    **dict.fromkeys(_WITH_SWITCH, ("enabled", False)),
    "zero_optimization.offload_param": ("device", "none"),
    "zero_optimization.offload_optimizer": ("device", "none"),
}


def read_ds_config(path: str | Path) -> dict[str, Any]:
    """The file's content.

    Raises ValueError when it is not there, not JSON, not an object, or names a key twice.
    """
    try:
        content = json.loads(Path(path).read_text(), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("must hold a JSON object")
    return content


def conflicts(file: Mapping[str, Any], ours: Ours) -> Iterator[Conflict]:
    """Everything in the file that cannot be taken over, in its order."""
    for key, value in _leaves(file):
        if _is_off(file, key):
            continue
        if key in _SAME:
            setting, read = _SAME[key]
            if value != AUTO and value != read(ours):
                yield Conflict(
                    key=key, value=value, rule=f"must be what {setting} is ({_shown(read(ours))})", setting=setting,
                    way_out=f'make them equal, or write "{AUTO}" in the file',
                )  # fmt: skip
        elif key in _FIXED:
            needed, reason = _FIXED[key]
            if value != AUTO and not _equal(value, needed):
                yield Conflict(
                    key=key, value=value, rule=f"must be {_shown(needed)}: {reason}", way_out=f"write {_shown(needed)}"
                )
        elif key in _TUNING:
            yield from _untunable(key, value, ours)
        elif key not in _ANSWERED:
            yield _refusal(key, value)


def tuning(file: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """What DeepSpeed is told beyond our own settings: {key below zero_optimization: value} of the TUNING keys.

    hidden_size: from which Hugging Face derives "auto" sizes; an "auto" without such a rule is left to our default.
    """
    derived = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    told: dict[str, Any] = {}
    for key, value in _leaves(file):
        if key in _TUNING and not _is_off(file, key):
            name = key.removeprefix("zero_optimization.")
            said = derived.get(name, AUTO) if value == AUTO else value
            if said != AUTO:
                told[name] = said if isinstance(said, bool) else int(said)
    return told


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"names {', '.join(twice)} twice")
    return dict(pairs)


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, Mapping) and value and key not in _REFUSED:
            yield from _leaves(value, key)
        elif not isinstance(value, Mapping) or value:
            yield key, value


def _is_off(file: Mapping[str, Any], key: str) -> bool:
    """Whether the key, itself no switch, stands in a section that is switched off: left to us is off, but for offload."""
    section, _, name = key.rpartition(".")
    if section not in _OFF or name == _OFF[section][0]:
        return False
    switch, off = _OFF[section]
    place: Any = file
    for part in section.split("."):
        place = place[part]
    says = place.get(switch, off)
    return bool(says == off or (says == AUTO and switch == "enabled"))


def _untunable(key: str, value: object, ours: Ours) -> Iterator[Conflict]:
    kind = _TUNING[key]
    switch = kind is _SWITCH
    good = isinstance(value, bool) if switch else _is_count(value)
    if value != AUTO and not good:
        yield Conflict(key=key, value=value, rule=f"must be {kind}", way_out="correct it, or leave it out")
    elif ".stage3_" in key and ours.engine.zero_stage != 3:
        yield Conflict(
            key=key, value=value, rule=f"has no effect with engine.zero_stage={ours.engine.zero_stage}",
            setting="engine.zero_stage", way_out="leave it out, or set engine.zero_stage=3",
        )  # fmt: skip
    elif key in _NEED_EQUAL_RANKS and not ours.equal_ranks and value != 0:
        yield Conflict(
            key=key, value=value, setting="parallel.expert_placement",
            rule="must be 0 where ranks hold unequal numbers of experts: ranks would fetch in different orders, and wait "
            "for each other forever", way_out="write 0, or give every rank equally many experts",
        )  # fmt: skip
    elif key.endswith(".allgather_bucket_size") and value != AUTO and int(value) % 2:  # type: ignore[call-overload]
        yield Conflict(key=key, value=value, rule="must be even", way_out="add 1")


def _refusal(key: str, value: object) -> Conflict:
    for refused, reason in _REFUSED.items():
        if key == refused or key.startswith(f"{refused}."):
            return Conflict(key=key, value=value, rule=f"cannot be taken over: {reason}", way_out="leave it out")
    near = next(iter(difflib.get_close_matches(key, [*_SAME, *_FIXED, *_TUNING, *_ANSWERED], n=1)), None)
    return Conflict(
        key=key, value=value, rule="is not known here, so nobody could say what it would change",
        way_out=f"did you mean {near}? Else leave it out" if near else "leave it out",
    )  # fmt: skip


def _is_count(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value >= 0 and value == int(value)  # type: ignore[operator, call-overload]


def _equal(value: object, needed: object) -> bool:
    if isinstance(value, str) and isinstance(needed, str):
        return value.lower() == needed.lower()
    return value == needed and isinstance(value, bool) == isinstance(needed, bool)


def _shown(value: object) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value == int(value) else value)
