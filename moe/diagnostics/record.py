"""What one optimizer step, and one evaluation, leave behind (on the data path, after the engine's step). Torch-free.

Every figure is of valid tokens only and already summed over all ranks and micro-batches: a record means the same in
every layout. The names here are the names in metrics.jsonl and eval.jsonl.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One optimizer step. Fields about experts are None (or empty) in a model without MoE layers."""

    step: int
    """Steps taken, this one included: the first record has 1."""
    lm_loss: float
    """Mean cross-entropy per labelled token, nats. Balance and z-loss are never inside it."""
    balance_loss: float | None = None
    """Load-balancing loss before its coefficient, unit convention (1 = even), mean over MoE layers; of several scopes
    the widest."""
    z_loss: float | None = None
    """Router z-loss before its coefficient: mean squared logsumexp, mean over MoE layers."""
    total_loss: float
    """The objective: lm_loss plus the router losses times their coefficients."""
    grad_norm: float
    """Global L2 norm before clipping; inf or NaN when the step was refused."""
    applied: bool = True
    """False when the gradient was not finite, so that no rank changed anything."""
    lr: float
    """Learning rate of this step."""
    num_tokens: int
    """Labelled tokens of the step, over all ranks."""
    num_routed_tokens: int
    """Valid (non-padding) tokens of the step, over all ranks: those that routers saw."""
    step_seconds: float
    """Wall time of the step."""
    tokens_per_second: float
    """num_routed_tokens / step_seconds, over all ranks."""
    model_flops_per_second: float | None = None
    """Model FLOP/s over all ranks: what the mathematics needs, active experts only, no recomputation."""
    memory_bytes: int | None = None
    """Peak memory of a process, largest over ranks."""
    max_vio: float | None = None
    """Mean of max_vio_layers."""
    max_vio_layers: Sequence[float] = ()
    """Batch MaxVio of each MoE layer: `load.max_vio(tokens_per_expert_LE)`."""
    drop_rate: float | None = None
    """Picks not served because of capacity, as a share of all picks of all layers."""
    drop_rate_layers: Sequence[float] = ()
    """The same of each MoE layer; may stay empty when nothing can be dropped."""
    router_entropy: float | None = None
    """Mean entropy of a token's router probabilities, nats, mean over MoE layers."""
    max_router_logit: float | None = None
    """Largest |router logit| of any token in any layer."""
    expert_bias_range: float | None = None
    """Largest minus smallest selection bias, largest over layers; None without bias balancing."""
    dispatch_bytes_across: int | None = None
    """Bytes that ranks sent to other nodes to bring rows to experts and back, in forward and backward, over all ranks.
    None, and so the next three, when experts are not spread over ranks."""
    dispatch_bytes_node: int | None = None
    """The same to other ranks of their own node."""
    dispatch_seconds: float | None = None
    """Time with such an exchange under way, mean over ranks."""
    dispatch_exposed_seconds: float | None = None
    """The part of it in which the step only waited, mean over ranks: 1 − this / dispatch_seconds was hidden."""
    sequence_bytes_across: int | None = None
    """What ranks that share rows sent each other around attention, to other nodes; None without sequence parallelism."""
    sequence_bytes_node: int | None = None
    """The same inside nodes."""
    sequence_seconds: float | None = None
    """Time with such an exchange under way, mean over ranks."""
    sequence_exposed_seconds: float | None = None
    """The part of it in which the step only waited, mean over ranks."""
    save_stall_seconds: float | None = None
    """Time for which saving kept rank 0 from beginning this step; 0 without a checkpoint before it."""
    router_margin: float | None = None
    """Mean distance of a token's last chosen score from the best one not chosen (in the router's scores), mean over
    layers: near 0, small changes re-route."""
    balance_loss_micro_batch: float | None = None
    """Raw loss of that scope, mean over MoE layers; None when the scope is not asked for. So the next three."""
    balance_loss_sequence: float | None = None
    balance_loss_batch: float | None = None
    balance_loss_global_batch: float | None = None
    """Also there when no load-balancing loss is asked for at all."""
    balance_loss_layers: Sequence[float] = ()
    """balance_loss of each MoE layer; so the following ones of theirs."""
    z_loss_layers: Sequence[float] = ()
    router_entropy_layers: Sequence[float] = ()
    router_margin_layers: Sequence[float] = ()
    max_router_logit_layers: Sequence[float] = ()
    expert_bias_range_layers: Sequence[float] = ()
    """Empty without bias balancing."""
    tokens_per_expert_LE: NDArray[np.int64] | None = field(default=None, repr=False)
    """Picks per MoE layer and expert before drops, over all ranks. Kept in load/, not in metrics.jsonl."""

    def to_json(self) -> Json:
        """Return the object for metrics.jsonl: all fields but the counts, always valid JSON (see `json_numbers`)."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokens_per_expert_LE"}
        return json_numbers(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """The held-out loss of one domain after `step` steps."""

    step: int
    """Steps taken before it; 0 = before training."""
    domain: str
    """Tag of the held-out text."""
    lm_loss: float
    """Mean cross-entropy per labelled token, nats. No router losses inside."""
    num_tokens: int
    """Labelled tokens that the mean was taken over."""
    tokens_per_expert_LE: Sequence[Sequence[int]] = ()
    """Picks per MoE layer and expert: what the domain's text goes to."""

    def to_json(self) -> Json:
        """Return the object for eval.jsonl, always valid JSON."""
        return json_numbers(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRecord:
    """A step that the step guard kept from being applied, in a run that went on."""

    step: int
    """Steps done when the run went on."""
    kind: str
    """router, loss, labels, counts or norm."""
    text: str
    """What was wrong, and with which data."""
    action: str
    """skip or roll_back."""
    batch: int
    """The batch of the data that was passed over, from 0."""

    def to_json(self) -> Json:
        """Return the object for guard.jsonl."""
        return asdict(self)


def json_numbers(values: Mapping[str, object]) -> Json:
    """Return `values` fit for strict JSON: a float that is not finite becomes null, and is named under `nonfinite`.

    `{"grad_norm": inf}` becomes `{"grad_norm": null, "nonfinite": {"grad_norm": "inf"}}`; inside a list the name is
    `max_vio_layers.3`. So null alone means "does not apply", and any reader of JSON can read the line.
    """
    nonfinite: dict[str, str] = {}

    def clean(name: str, value: object) -> object:
        if isinstance(value, tuple | list):
            return [clean(f"{name}.{index}", item) for index, item in enumerate(value)]
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
            return None
        return value

    result: Json = {name: clean(name, value) for name, value in values.items()}
    if nonfinite:
        result["nonfinite"] = nonfinite
    return result
