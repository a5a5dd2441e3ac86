"""expert_mlp: each row through the SwiGLU of its expert. On the token path: the experts, and on one rank all around them.

Legend: R rows, S source rows, E experts (of this rank), D hidden, F width of an expert.
"""

from typing import Protocol

import torch
from torch import Tensor

from backends.ops.expert_mlp import ascend, chunked, grouped, reference
from backends.ops.expert_mlp.shape import MlpShape
from backends.ops.table import Implementation, always, choose


class ExpertMlp(Protocol):
    """The op, without the choice of implementation."""

    def __call__(
        self,
        x_SD: Tensor,
        w1_EFD: Tensor,
        w3_EFD: Tensor,
        w2_EDF: Tensor,
        tokens_per_expert_E: Tensor,
        weight_R: Tensor | None,
        source_R: Tensor | None,
    ) -> Tensor:
        """See `expert_mlp`."""
        ...


IMPLEMENTATIONS: dict[str, Implementation[ExpertMlp, MlpShape]] = {
    "chunked": Implementation(
        name="chunked",
        function=chunked.expert_mlp,
        devices=("cpu",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=always,
        cost="none, it is the fastest",
    ),
    "ascend": Implementation(
        name="ascend",
        function=ascend.expert_mlp,
        devices=("npu",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        why_not=ascend.why_not,
        cost="none known; it has not been measured, nor run on hardware",
    ),
    "grouped": Implementation(
        name="grouped",
        function=grouped.expert_mlp,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        why_not=always,
        cost="1.3 to 1.6 times the time of chunked on a CPU (E=8 and 64, D=512, 2026-11-30), and more memory",
    ),
    "reference": Implementation(
        name="reference",
        function=reference.expert_mlp,
        devices=("cpu", "cuda", "npu"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        why_not=always,
        cost="on a CPU up to 2.2 times the time of chunked in bf16, 1.0 to 1.2 in fp32 (same shapes)",
    ),
}
"""Best first; `auto` takes the first that can run."""


def expert_mlp(
    x_SD: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    tokens_per_expert_E: Tensor,
    *,
    weight_R: Tensor | None = None,
    source_R: Tensor | None = None,
    implementation: str = "auto",
    gemm: str = "auto",
) -> Tensor:
    """Down(silu(gate) · up) of every row by its expert, times its weight; gradients for x, all weights and weight_R.

    x_SD: the rows, sorted by expert (S = R), or with source_R the rows to take them from. w1_EFD (gate), w3_EFD (up),
    w2_EDF (down): stacked as torch.nn.Linear keeps them (out × in), in the dtype of x. tokens_per_expert_E: int64, sums
    to R; experts without rows get a gradient of exactly 0. weight_R: fp32, multiplies each row's result; None: 1.
    source_R: int64, which row of x is row i.

    implementation: auto, or a name of IMPLEMENTATIONS. gemm: the implementation of grouped_gemm that `grouped` calls; a
    named one makes auto take `grouped`, where alone it has an effect.

    Returns [R, D] without source_R. With it [S, D]: for each row of x the sum over the rows taken from it, in fp32 and
    by ascending i; 0 where none was. In the dtype of x.

    Raises ValueError when the operands disagree, or a named implementation cannot run on them.
    """
    dtypes = {x_SD.dtype, w1_EFD.dtype, w3_EFD.dtype, w2_EDF.dtype}
    if len(dtypes) > 1:
        raise ValueError(f"expert_mlp got {', '.join(map(str, dtypes))} for rows and weights; cast them to one")
    # Elsewhere than on a CPU this read would wait for the device; there the dispatchers' own checks must do.
    num_rows = x_SD.shape[0] if source_R is None else source_R.shape[0]
    if x_SD.device.type == "cpu" and int(tokens_per_expert_E.sum()) != num_rows:
        raise ValueError(
            f"expert_mlp got {num_rows} rows, but the counts sum to {int(tokens_per_expert_E.sum())}: every row needs an "
            "expert, or its result would stay uninitialised"
        )
    if gemm != "auto":
        if implementation not in ("auto", "grouped"):
            raise ValueError(
                f"backend.ops.grouped_gemm ({gemm}) has no effect with backend.ops.expert_mlp={implementation}; choose "
                "expert_mlp=grouped or grouped_gemm=auto"
            )
        return grouped.expert_mlp(x_SD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R, source_R, gemm=gemm)
    chosen = choose(
        "expert_mlp", IMPLEMENTATIONS, implementation, x_SD.device.type, x_SD.dtype, MlpShape(*w2_EDF.shape)
    )
    return chosen.function(x_SD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R, source_R)


def can_take_tokens(x_SD: Tensor, implementation: str = "auto", gemm: str = "auto") -> bool:
    """Whether what would run gains by reading rows from their sources and adding results up itself (`source_R`)."""
    if implementation == "auto" and gemm == "auto":
        return IMPLEMENTATIONS["chunked"].reason_against(x_SD.device.type, x_SD.dtype, None) is None
    return implementation == "chunked"
