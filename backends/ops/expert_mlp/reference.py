"""SwiGLU experts by a loop over experts: the definition.

    z[i] = weight[i] · W2[e] · (silu(W1[e] · x[s]) ⊙ (W3[e] · x[s])),   e the expert of row i, s its source

Without sources s = i and z is the result. With sources y[t] = Σ of z[i] over the rows i whose source is t, by ascending i.
Everything is computed in fp32 (float64 for float64 operands) and rounded once. Gradients are autograd's.

Legend: R rows, S source rows, E experts, D hidden, F width of an expert.

Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_mlp(
    x_SD: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    tokens_per_expert_E: Tensor,
    weight_R: Tensor | None,
    source_R: Tensor | None,
) -> Tensor:
    """See `backends.ops.expert_mlp.expert_mlp`."""
    inner = torch.promote_types(x_SD.dtype, torch.float32)
    rows_RD = x_SD.to(inner) if source_R is None else x_SD.to(inner).index_select(0, source_R)
    pieces = rows_RD.split(tokens_per_expert_E.tolist())
    # unbind, not weight[i]: the backward of an index makes a full-size zero gradient for every expert.
    weights = (weight.to(inner).unbind(0) for weight in (w1_EFD, w3_EFD, w2_EDF))
    results_RD = torch.cat(
        [(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w3, w2 in zip(pieces, *weights, strict=True)]
    )
    if weight_R is not None:
        results_RD = results_RD * weight_R.to(inner).unsqueeze(1)
    if source_R is None:
        return results_RD.to(x_SD.dtype)
    return torch.zeros_like(x_SD, dtype=inner).index_add(0, source_R, results_RD).to(x_SD.dtype)
