"""Rules that do not look at the logits: by token id, at random, in turn, or skewed. On the token path.

For benchmarks (known load, at the true cost of a router) and as baselines. Weights still come from the logits, so the
router learns how much to listen to experts that it did not choose.

Legend: B rows, S tokens of a row, T = B·S tokens, E experts, K picks per token.
"""

import torch
from torch import Tensor

from backends.ops.router_topk.select import stable_topk
from backends.ops.router_topk.spec import Picks
from moe.model.config import MoEConfig
from moe.model.routers.randomness import fold, mix, uniform
from moe.model.routers.rule import RouterInput, RouterRule


def select_hash(given: RouterInput, moe: MoEConfig) -> Picks:
    """K different experts by token id alone: the same for a token wherever it stands, fixed by moe.router_seed.

    Raises ValueError outside a model, where there are no token ids.

    Source: Roller et al. 2021, "Hash Layers For Large Sparse Models" (random hash).
    """
    if given.input_ids_T is None:
        raise ValueError("moe.router (hash) needs token ids; call the layer from a model, or choose another router")
    keys_T = mix(given.input_ids_T ^ fold(moe.router_seed, given.layer_index))
    return _by_popularity(keys_T, None, moe, given.logits_TE.dtype)


def select_random(given: RouterInput, moe: MoEConfig) -> Picks:
    """K different experts, all equally likely: a function of seed, layer and the token's key."""
    return _by_popularity(given.keys_T, None, moe, given.logits_TE.dtype)


def select_skewed(given: RouterInput, moe: MoEConfig) -> Picks:
    """K different experts drawn without putting back, expert i with weight 1 / (i + 1)^moe.forced_skew."""
    popularity_E = torch.arange(1, moe.num_experts + 1, device=given.keys_T.device).float().log() * -moe.forced_skew
    return _by_popularity(given.keys_T, popularity_E, moe, given.logits_TE.dtype)


def select_balanced(given: RouterInput, moe: MoEConfig) -> Picks:
    """Experts in turn: the n-th valid token of a row takes n·K … n·K + K − 1 (mod E). Within 1 of even in every row."""
    number_T = (given.valid_BS.cumsum(1) - 1).clamp(min=0).flatten()
    first_T = number_T * moe.top_k + given.layer_index + moe.router_seed
    ids_TK = (first_T[:, None] + torch.arange(moe.top_k, device=first_T.device)) % moe.num_experts
    return Picks(ids_TK, given.logits_TE.new_zeros(first_T.shape[0]))


def _by_popularity(keys_T: Tensor, log_popularity_E: Tensor | None, moe: MoEConfig, dtype: torch.dtype) -> Picks:
    """The K largest of log popularity + Gumbel noise: a draw without putting back.

    Source: Vieira 2014, "Gumbel-max trick and weighted reservoir sampling".
    """
    draws_TE = uniform(keys_T, moe.num_experts)
    scores_TE = draws_TE if log_popularity_E is None else log_popularity_E - (-draws_TE.log()).log()
    return Picks(stable_topk(scores_TE, moe.top_k), torch.zeros(keys_T.shape, dtype=dtype, device=keys_T.device))


HASH = RouterRule(select=select_hash, score="softmax")
RANDOM = RouterRule(select=select_random, score="softmax")
BALANCED = RouterRule(select=select_balanced, score="softmax", needs_rows=True)
SKEWED = RouterRule(select=select_skewed, score="softmax")
