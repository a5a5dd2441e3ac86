"""What a run is made of beside model and data: plain dataclasses that `moe.config` composes. Torch-free."""

from dataclasses import dataclass
from enum import Enum


class EngineKind(Enum):
    """Who owns the step."""

    deepspeed = "deepspeed"
    torch = "torch"


class DType(Enum):
    """Type of the weights a forward pass uses; masters and moments are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"


class Checkpointing(Enum):
    """Which activations backward computes again."""

    none = "none"
    full = "full"


class Offload(Enum):
    """Where masters and moments live."""

    none = "none"
    cpu = "cpu"


class OffloadAdam(Enum):
    """Who updates them when they live in host memory."""

    torch = "torch"
    deepspeed = "deepspeed"


class ScheduleKind(Enum):
    """Shape of the learning rate after warm-up."""

    cosine = "cosine"
    constant = "constant"


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work. Never changes the mathematics."""

    nproc: int = 1
    """Processes that `switchyard run` starts on this machine; under a launcher the launcher's count holds."""
    expert: int = 1
    """Expert-parallel size; divides the number of ranks. Experts are shared out as evenly as can be."""
    sequence: int = 1
    """Sequence-parallel size: so many consecutive ranks share rows, each with a part of the positions, and exchange heads
    for positions around attention (docs/sequence.md). Divides the number of ranks and model.num_heads."""
    expert_placement: list[int] | None = None
    """Rank in the expert group of each expert, in the order of their ids; null: contiguous, as even as can be. Unequal
    numbers of experts per rank exclude engine.zero_stage=2 under DeepSpeed."""
    ranks_per_node: int | None = None
    """Consecutive ranks that share a node; divides parallel.expert or is a multiple of it. null: as the launcher says."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The engine around the model."""

    kind: EngineKind = EngineKind.deepspeed
    """deepspeed: the real one. torch: the plain oracle (one process, or simple data parallel)."""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage. 0: nothing partitioned; 1: optimizer state; 2: gradients too; 3: weights too."""
    dtype: DType = DType.bf16
    """fp32, or bf16 weights and activations with fp32 masters."""
    activation_checkpointing: Checkpointing = Checkpointing.none
    """none, or full: each block's inside is computed again in backward."""
    offload_optimizer: Offload = Offload.none
    """none: masters and moments beside the weights; cpu: in host memory, updated there. With zero_stage 2 and 3."""
    offload_adam: OffloadAdam = OffloadAdam.torch
    """Of offload_optimizer=cpu. torch: nothing to build; deepspeed: its vectorised CPU Adam, which needs a C++ compiler and
    ninja, and takes about a minute to build the first time (kept in torch's extension cache)."""
    ds_config: str | None = None
    """Path of a DeepSpeed configuration (JSON). What it says of speed and memory is taken over, what contradicts the other
    settings refused; "auto" is filled in. null: none."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, on tensors of two or more dimensions only (not on norms)."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; each expert counts once. 0 = no clipping."""
    schedule: ScheduleKind = ScheduleKind.cosine
    """cosine to min_lr_ratio at the last step, or constant; both after a linear warm-up."""
    warmup_steps: int = 20
    """Step s of the warm-up (from 1) has lr · s / warmup_steps."""
    min_lr_ratio: float = 0.1
    """End of the cosine as a share of lr."""


class GuardPolicy(Enum):
    """What a step that must not be applied leads to."""

    stop = "stop"
    skip = "skip"
    roll_back = "roll_back"


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    """The step guard: loss or gradients that are not finite, no label at all, wrong counts, a norm far out (docs/guard.md).

    Such a step changes nothing on any rank: no weight, no moment, no bias, no place in the schedule.
    """

    policy: GuardPolicy = GuardPolicy.stop
    """stop: end the run with exit code 5. skip: pass over the step's data and go on. roll_back: go back to the newest
    checkpoint, and pass over that data on the way."""
    max_in_row: int = 3
    """Bad steps in a row that skip and roll_back bear; one more ends the run."""
    z_score: float = 0.0
    """A gradient norm so many spreads above the mean of good steps is bad. 0: any finite norm is good."""
    window: int = 100
    """Good steps over which that mean and spread are formed."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The loop."""

    max_steps: int = 200
    """Optimizer steps of the whole run."""
    batch_size: int = 32
    """Sequences per optimizer step, over all ranks and micro-batches: the same in every layout."""
    accumulation: int = 1
    """Micro-steps per optimizer step; ranks × accumulation divides batch_size."""
    seed: int = 0
    """Seeds initial weights, data order and every generator."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved. 0 = only the last."""
    keep_last: int = 3
    """The newest checkpoints that stay; an older one goes when a newer one is whole and read back. 0 = all stay."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this stay for good. 0 = none beyond keep_last."""
    eval_every: int = 0
    """Steps between held-out evaluations; 0 = only at the end."""
    eval_batches: int = 8
    """Batches of batch_size sequences per domain and evaluation (fewer if the held-out text is shorter). 0 = none."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of run.dir if there is one; never; or the path of a checkpoint folder."""
    accept_changed_data: bool = False
    """Go on from a checkpoint although data or tokenizer are not those that it was trained on."""
    sample_tokens: int = 64
    """Length of the text generated after the last step. 0 = none."""
    sample_prompt: str = "def "
    """What the generated text begins with."""


@dataclass(kw_only=True, slots=True)
class RunSection:
    """Where the run leaves its traces."""

    dir: str | None = None
    """Run folder; runs/<recipe>-<time> when null."""
