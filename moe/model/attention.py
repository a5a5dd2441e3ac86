"""Grouped-query attention inside documents: on the token path, the first half of a block.

Legend: B rows, C tokens of a row, S of them on this rank (all, without sequence parallelism), D hidden, H query heads,
G key/value heads, d width of a head, 1 broadcast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch.sequence import SequenceShards
from moe.model.batch import PADDING_DOCUMENT
from moe.model.config import ModelConfig, resolve_head_dim
from moe.model.norm import RMSNorm
from moe.model.rope import RotaryAngles, rotate


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """True where query q may look at key k: same document and k ≤ q. [B, 1, S, S] bool, built once a forward.

    A padding token looks at itself alone: a row without any key would be 0/0, and the NaN would travel back into the
    weights through masked-out outputs.
    """
    num_tokens = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    causal_SS = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=document_ids_BS.device).tril()
    itself_SS = torch.eye(num_tokens, dtype=torch.bool, device=document_ids_BS.device)
    valid_BS1 = (document_ids_BS != PADDING_DOCUMENT)[:, :, None]
    return ((same_BSS & causal_SS & valid_BS1) | itself_SS)[:, None]


class Attention(nn.Module):
    """Causal attention with fewer key/value heads than query heads, rotary positions and optional QK-norm.

    Source: Ainslie et al. 2023, "GQA"; Henry et al. 2020, "Query-Key Normalization" (here an RMSNorm per head).
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = model.num_heads, model.num_kv_heads, resolve_head_dim(model)
        self.q_proj = nn.Linear(model.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, model.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=model.norm_eps) if model.qk_norm else None
        self.sequence: SequenceShards | None = None
        """How rows are cut over ranks; None: they are whole. Whoever lays out a run puts it in."""

    def forward(self, x_BSD: Tensor, mask_B1CC: Tensor, angles: RotaryAngles) -> Tensor:
        """mask_B1CC: bool, from `document_mask`, of whole rows. Returns [B, S, D] in the dtype of x.

        Collective over the ranks that share the rows, if there are others.
        """
        num_rows, num_tokens, _ = x_BSD.shape
        q_BSHd = self.q_proj(x_BSD).view(num_rows, num_tokens, self.num_heads, self.head_dim)
        k_BSGd = self.k_proj(x_BSD).view(num_rows, num_tokens, self.num_kv_heads, self.head_dim)
        v_BSGd = self.v_proj(x_BSD).view(num_rows, num_tokens, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHd, k_BSGd = self.q_norm(q_BSHd), self.k_norm(k_BSGd)
        q_BSHd, k_BSGd = rotate(q_BSHd, angles), rotate(k_BSGd, angles)
        if self.sequence is not None:
            q_BSHd, k_BSGd, v_BSGd = self.sequence.to_heads(q_BSHd, k_BSGd, v_BSGd, mask_B1CC.shape[-1])
        y_BHSd = F.scaled_dot_product_attention(
            q_BSHd.transpose(1, 2),
            k_BSGd.transpose(1, 2),
            v_BSGd.transpose(1, 2),
            attn_mask=mask_B1CC,
            enable_gqa=k_BSGd.shape[2] != q_BSHd.shape[2],
        )
        y_BSHd = y_BHSd.transpose(1, 2)
        if self.sequence is not None:
            y_BSHd = self.sequence.to_tokens(y_BSHd)
        return self.o_proj(y_BSHd.flatten(2))
