"""The router: on the token path, from hidden states to chosen experts, their weights and what balancing needs.

How experts are chosen and weighed is in `moe.model.routers`; here is what all rules share: logits, their options, the
stop on bad numbers, padding, and the sums that go out.

Legend: B rows, S tokens of a row, T = B·S tokens, D hidden, E experts, K picks per token (top_k; E for expert_choice).
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.ops.router_topk import router_topk
from backends.ops.router_topk.spec import Choice, Picks
from dispatch.sequence import SequenceShards
from moe.errors import NumericError
from moe.model.config import ROUTER_TRAITS, MoEConfig, RouterDType
from moe.model.outputs import RouterStats
from moe.model.routers.randomness import fold, mix, normal, uniform
from moe.model.routers.registry import ROUTERS
from moe.model.routers.rule import RouterInput, TokenContext

_ROUTE, _JITTER, _NOISE = 0, 1, 2
"""Which random numbers of a token: each use has its own."""


class Routing(NamedTuple):
    """What the router returns."""

    topk_expert_ids_TK: Tensor
    """int64; NOT_DISPATCHED for padding, and where a token has fewer than K experts."""
    topk_weights_TK: Tensor
    """fp32, differentiable; 0 where the id is NOT_DISPATCHED."""
    stats: RouterStats


def stop_if_not_finite(logits_TE: Tensor, layer_index: int) -> None:
    """Raise NumericError naming layer and rank when a logit is NaN or infinite, before any token is sent anywhere.

    On the CPU only: elsewhere reading the number would make the host wait for the queue in every layer. There the
    sums carry the news (RouterStats.max_logit is not finite), and the step stops before it changes anything.
    """
    if logits_TE.device.type != "cpu" or not logits_TE.numel():
        return
    if not bool(logits_TE.detach().abs().amax().isfinite()):
        num_bad = int((~logits_TE.isfinite()).any(-1).sum())
        raise NumericError(
            f"layers.{layer_index}.moe.router: logits of {num_bad} of {logits_TE.shape[0]} tokens are not finite "
            f"(rank {os.environ.get('RANK', '0')}); the hidden states or the router's weight have overflowed: lower "
            "optim.lr or resume from an earlier checkpoint"
        )


class Router(nn.Module):
    """Linear scores in fp32 (or fp64), then the rule of `moe.router`.

    Nothing in here changes in forward: counts go out with the result, so that evaluation leaves no trace and a
    recomputed forward counts once. `expert_bias` (fp32, saved with the model) is moved from outside. A frozen router's
    weight is a buffer: saved, but no optimizer knows of it, so neither gradient nor weight decay moves it.
    """

    expert_bias: Tensor | None
    weight: Tensor

    def __init__(self, hidden_size: int, moe: MoEConfig, *, layer_index: int) -> None:
        super().__init__()
        if moe.normalize_topk and moe.top_k == 1:
            raise ValueError(
                "moe.normalize_topk (true) with moe.top_k (1) makes every weight exactly 1, so the router gets no "
                "gradient from the task; choose moe.normalize_topk=false or a larger moe.top_k"
            )
        self.moe = moe
        self.rule = ROUTERS[moe.router]
        self.choice = Choice(
            score=self.rule.score,
            top_k=moe.top_k,
            normalize=moe.normalize_topk,
            num_groups=moe.num_groups,
            topk_groups=moe.topk_groups,
        )
        self.implementation = "auto"
        """Which router_topk runs: auto, or a name from the op's table."""
        self.stops_early = True
        """Whether a logit that is not finite raises at once; if not, the sums of the step bring the news."""
        self.layer_index = layer_index
        weight_ED = torch.empty(moe.num_experts, hidden_size)
        if moe.freeze_router:
            self.register_buffer("weight", weight_ED)
        else:
            self.weight = nn.Parameter(weight_ED)
        has_bias = ROUTER_TRAITS[moe.router].expert_bias
        self.register_buffer("expert_bias", torch.zeros(moe.num_experts, dtype=torch.float32) if has_bias else None)
        self.sequence: SequenceShards | None = None
        """How rows are cut over ranks; None: they are whole. Whoever lays out a run puts it in."""
        self.replayed_ids_BSP: Tensor | None = None
        """Set by `moe.model.routers.replay.replaying` alone: ids to route by in place of the rule's choice."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep buffers fp32 through `.to(bf16)`, `.half()` and engines that cast whole modules.

        In bf16 a bias of 0.5 cannot take a step of 0.001. A cast that stays on the device also keeps the storage.
        """
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, x_BSD: Tensor, valid_BS: Tensor, tokens: TokenContext | None = None) -> Routing:
        """x_BSD: any floating dtype. valid_BS: bool, False for padding, which is sent nowhere and counts nowhere.

        tokens: from the model; without it a token's random numbers follow its place in the micro-batch, and
        moe.router=hash raises ValueError. Raises NumericError when a logit is not finite (on the CPU).
        """
        keys_T = torch.arange(valid_BS.numel(), device=x_BSD.device) if tokens is None else tokens.keys_BS.reshape(-1)
        logits_TE = self._logits(x_BSD.flatten(0, 1), keys_T)
        if self.stops_early:
            stop_if_not_finite(logits_TE, self.layer_index)
        with torch.no_grad():
            picks = self._picks(logits_TE.detach(), valid_BS, keys_T, tokens)
        routed = router_topk(
            logits_TE,
            valid_BS,
            self.choice,
            expert_bias_E=self.expert_bias,
            picks=picks,
            implementation=self.implementation,
        )
        stats = RouterStats(
            tokens_per_expert_BE=routed.tokens_per_expert_BE,
            router_probs_sum_BE=routed.probs_sum_BE,
            z_sum=routed.z_sum,
            entropy_sum=routed.entropy_sum,
            max_logit=routed.max_logit,
            dropped_per_expert_E=torch.zeros(self.moe.num_experts, dtype=torch.int64, device=logits_TE.device),
            margin_sum=routed.margin_sum,
        )
        return Routing(routed.ids_TP, routed.weights_TP.float() * self.moe.routed_scale, stats)

    def _logits(self, x_TD: Tensor, keys_T: Tensor) -> Tensor:
        """[T, E], in moe.router_dtype, with the options of the configuration."""
        dtype = torch.float64 if self.moe.router_dtype is RouterDType.fp64 else torch.float32
        x_TD = x_TD.to(dtype)
        if self.training and self.moe.router_jitter:
            shift_TD = 2 * uniform(self._keys(keys_T, _JITTER), x_TD.shape[1]) - 1
            x_TD = x_TD * (1 + self.moe.router_jitter * shift_TD)
        logits_TE = F.linear(x_TD, self.weight.to(dtype))
        if self.training and self.moe.router_noise:
            noise_TE = normal(self._keys(keys_T, _NOISE), logits_TE.shape[1])
            logits_TE = logits_TE + self.moe.router_noise * noise_TE
        if self.moe.router_logit_cap:
            capped_TE = self.moe.router_logit_cap * (logits_TE / self.moe.router_logit_cap).tanh()
            # The cap would make a number of an infinite logit, and hide that something has overflowed.
            logits_TE = torch.where(logits_TE.isfinite(), capped_TE, logits_TE)
        return logits_TE

    def _keys(self, keys_T: Tensor, use: int) -> Tensor:
        return mix(keys_T ^ fold(self.moe.router_seed, self.layer_index, use))

    def _picks(self, logits_TE: Tensor, valid_BS: Tensor, keys_T: Tensor, tokens: TokenContext | None) -> Picks | None:
        """What a recording or the rule chooses; None where that is left to the op."""
        if self.replayed_ids_BSP is not None:
            if self.replayed_ids_BSP.shape[:2] != valid_BS.shape:
                raise ValueError(
                    f"layers.{self.layer_index}.moe.router: recorded routes are of {list(self.replayed_ids_BSP.shape[:2])} "
                    f"rows and tokens, this batch has {list(valid_BS.shape)}; replay the batch that was recorded"
                )
            return Picks(self.replayed_ids_BSP.flatten(0, 1), logits_TE.new_zeros(logits_TE.shape[0]))
        if self.rule.select is None:
            return None
        given = RouterInput(
            logits_TE=logits_TE,
            valid_BS=valid_BS,
            expert_bias_E=self.expert_bias,
            keys_T=self._keys(keys_T, _ROUTE),
            input_ids_T=None if tokens is None else tokens.input_ids_BS.reshape(-1),
            layer_index=self.layer_index,
        )
        if self.sequence is None or not self.rule.needs_rows:
            return self.rule.select(given, self.moe)
        assert tokens is not None
        assert tokens.valid_rows_BC is not None
        return self._picks_of_rows(self.sequence, given, tokens.valid_rows_BC)

    def _picks_of_rows(self, sequence: SequenceShards, given: RouterInput, valid_BC: Tensor) -> Picks:
        """What the rule chooses for this rank's tokens when it has seen the whole rows (collective)."""
        num_rows, num_tokens = valid_BC.shape
        logits_BSE = given.logits_TE.view(num_rows, -1, given.logits_TE.shape[-1])
        logits_TE = sequence.gather(logits_BSE, num_tokens).flatten(0, 1)
        whole = given._replace(logits_TE=logits_TE, valid_BS=valid_BC)
        assert self.rule.select is not None
        ids_TP, margins_T = self.rule.select(whole, self.moe)
        return Picks(
            sequence.own(ids_TP.unflatten(0, (num_rows, num_tokens))).flatten(0, 1),
            sequence.own(margins_T.view(num_rows, num_tokens)).flatten(),
        )
