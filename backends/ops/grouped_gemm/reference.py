"""Grouped matrix product by a loop over experts: the definition.

    y[i] = x[i] · w[e(i)]ᵀ          dx[i] = dy[i] · w[e(i)]          dw[e] = Σ over i with e(i) = e of dy[i]ᵀ · x[i]

e(i) is the expert of row i: the first tokens_per_expert[0] rows belong to expert 0, and so on. Everything is computed
in fp32 (float64 for float64 operands) and rounded once.

Legend: R rows, E experts, D inputs, F outputs.
"""

import torch
from torch import Tensor


def grouped_gemm(rows_RD: Tensor, weight_EFD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """See `backends.ops.grouped_gemm.grouped_gemm`."""
    inner = torch.promote_types(rows_RD.dtype, torch.float32)
    pieces = torch.split(rows_RD.to(inner), tokens_per_expert_E.tolist())
    # unbind, not weight[i]: the backward of an index makes a full-size zero gradient for every expert.
    products = [piece @ weight_FD.to(inner).t() for piece, weight_FD in zip(pieces, weight_EFD.unbind(0), strict=True)]
    return torch.cat(products).to(rows_RD.dtype)
