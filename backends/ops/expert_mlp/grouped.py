"""SwiGLU experts from three grouped products: what runs where nothing better does, with autograd's own memory.

Legend: R rows, S source rows, E experts, D hidden, F width of an expert.
"""

import torch.nn.functional as F
from torch import Tensor

from backends.ops.expert_mlp.swiglu import weighted_swiglu
from backends.ops.grouped_gemm import grouped_gemm


def expert_mlp(
    x_SD: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    tokens_per_expert_E: Tensor,
    weight_R: Tensor | None,
    source_R: Tensor | None,
    *,
    gemm: str = "auto",
) -> Tensor:
    """See `backends.ops.expert_mlp.expert_mlp`. gemm: the implementation of grouped_gemm."""
    rows_RD = x_SD if source_R is None else x_SD.index_select(0, source_R)
    gate_RF = grouped_gemm(rows_RD, w1_EFD, tokens_per_expert_E, implementation=gemm)
    up_RF = grouped_gemm(rows_RD, w3_EFD, tokens_per_expert_E, implementation=gemm)
    inner_RF = F.silu(gate_RF) * up_RF if weight_R is None else weighted_swiglu(gate_RF, up_RF, weight_R)
    results_RD = grouped_gemm(inner_RF, w2_EDF, tokens_per_expert_E, implementation=gemm)
    if source_R is None:
        return results_RD
    return x_SD.new_zeros(x_SD.shape).float().index_add(0, source_R, results_RD.float()).to(x_SD.dtype)
