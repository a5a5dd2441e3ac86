"""The sparse layer: router → dispatch → experts → combine, the whole token path of one block.

Legend: B rows, S tokens of a row, T = B·S tokens, D hidden, E experts, K picks per token.
"""

from torch import Tensor, nn

from dispatch.interface import TokenDispatcher
from dispatch.local import LocalDispatcher
from moe.model.config import MoEConfig
from moe.model.experts import Experts, SwiGLU
from moe.model.outputs import RouterStats
from moe.model.router import Router
from moe.model.routers.rule import TokenContext


class MoELayer(nn.Module):
    """Sends every token to K of E experts and adds up what they answer.

    A token's path: its hidden state [D] meets the router, which scores all E experts in fp32 and keeps K ids with their
    weights (a padding token gets NOT_DISPATCHED and weight 0). The dispatcher copies the row K times, sorted by expert,
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
        routing = self.router(x_BSD, valid_BS, tokens)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        shared_experts = self.shared_experts
        y_TD = self.dispatcher.run(
            x_TD,
            routing.topk_expert_ids_TK,
            routing.topk_weights_TK,
            self.experts,
            beside=None if shared_experts is None else lambda: shared_experts(x_TD),
        )
        return y_TD.view(x_BSD.shape), routing.stats
