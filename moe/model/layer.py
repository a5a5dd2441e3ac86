"""The sparse layer: router → dispatch → experts → combine, the whole token path of one block.

Legend: B rows, S tokens of a row, T = B·S tokens, D hidden, E experts, K picks per token.
"""

import torch
from torch import Tensor, nn

from backends.ops.router_topk.reference import count_picks
from dispatch.capacity import Limiter
from dispatch.config import DropPolicy
from dispatch.interface import TokenDispatcher
from dispatch.local import LocalDispatcher
from moe.errors import NumericError
from moe.model.config import MoEConfig, pick_slots
from moe.model.experts import Experts, SwiGLU
from moe.model.outputs import RouterStats
from moe.model.router import Router, Routing
from moe.model.routers.randomness import fold, mix
from moe.model.routers.rule import TokenContext

_DROP = 4
"""Names the use of a token's key; the router has names of its own (moe/model/router.py)."""


class MoELayer(nn.Module):
    """Sends every token to K of E experts and adds up what they answer.

    A token's path: its hidden state [D] meets the router, which scores all E experts in fp32 and keeps K ids with their
    weights (a padding token gets NOT_DISPATCHED and weight 0). With a capacity, the limiter takes out the picks that an
    expert or a rank has no room for. The dispatcher copies the row K times, sorted by expert,
    and brings each copy to the rank that holds that expert; there the stacked experts work on all rows at once. The
    dispatcher brings the K answers home and sums them, weighted, in fp32. Experts that see every token
    (`shared_experts`) work while the first rows are on their way, and are added last. What the router saw goes out
    beside the result: nothing is kept here, so a recomputed or an evaluating forward leaves no trace.

    The layer is built with all E experts and a local dispatcher. Whoever lays out a run puts in another dispatcher
    together with an `Experts` that holds the rows `dispatcher.local_expert_ids`.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, *, layer_index: int) -> None:
        super().__init__()
        self.num_experts = moe.num_experts
        self.layer_index = layer_index
        self.router = Router(hidden_size, moe, layer_index=layer_index)
        self.experts = Experts(moe.num_experts, hidden_size, moe.moe_intermediate_size)
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts)
        self.padded_dispatcher: TokenDispatcher | None = None
        """Of static shapes; takes the place of `dispatcher` in training."""
        self.limiter: Limiter | None = None
        """Decides which picks are kept; None: all."""
        self.shared_experts = (
            SwiGLU(hidden_size, moe.num_shared_experts * moe.moe_intermediate_size) if moe.num_shared_experts else None
        )

    def forward(
        self, x_BSD: Tensor, valid_BS: Tensor, tokens: TokenContext | None = None
    ) -> tuple[Tensor, RouterStats]:
        """x_BSD: any floating dtype; valid_BS: bool; tokens: see `Router.forward`.

        Returns [B, S, D] in the dtype of x, and this layer's stats.

        Collective under expert parallelism: all ranks of the expert group call together, with any number of tokens.
        """
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        try:
            routing = self.router(x_BSD, valid_BS, tokens)
        except NumericError:
            self._refuse(x_TD)
            raise
        if self.limiter is not None:
            routing = self._limit(self.limiter, routing, valid_BS, tokens)
        padded = self.padded_dispatcher if self.training else None
        dispatcher = self.dispatcher if padded is None else padded
        shared_experts = self.shared_experts
        y_TD = dispatcher.run(
            x_TD,
            routing.topk_expert_ids_TK,
            routing.topk_weights_TK,
            self.experts,
            beside=None if shared_experts is None else lambda: shared_experts(x_TD),
        )
        return y_TD.view(x_BSD.shape), routing.stats

    @torch.no_grad()
    def _limit(self, limiter: Limiter, routing: Routing, valid_BS: Tensor, tokens: TokenContext | None) -> Routing:
        """NOT_DISPATCHED in place of the picks that capacity leaves out; weights stay. What is left out is counted."""
        ids_TK = routing.topk_expert_ids_TK
        random_keys_TK = None
        if limiter.policy is DropPolicy.random:
            keys_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) if tokens is None else tokens.keys_BS.flatten()
            own_T = mix(keys_T ^ fold(limiter.seed, self.layer_index, _DROP))
            random_keys_TK = mix(own_T[:, None] + ids_TK)
        kept_TK = limiter.limit(
            ids_TK,
            routing.topk_weights_TK,
            valid_BS.reshape(-1),
            random_keys_TK,
            None if tokens is None or tokens.places_BS is None else tokens.places_BS.flatten(),
            layer_index=self.layer_index,
            training=self.training,
        )
        dropped_E = (count_picks(ids_TK, 1, self.num_experts) - count_picks(kept_TK, 1, self.num_experts))[0]
        return routing._replace(
            topk_expert_ids_TK=kept_TK, stats=routing.stats._replace(dropped_per_expert_E=dropped_E)
        )

    def _refuse(self, x_TD: Tensor) -> None:
        """Tell the ranks that wait for this one's counts that it stops: in the first exchange that there is."""
        num_slots = pick_slots(self.router.moe)
        if self.limiter is None or not self.limiter.refuse(
            x_TD.device, num_slots, layer_index=self.layer_index, training=self.training
        ):
            self.dispatcher.refuse(x_TD, num_slots)
