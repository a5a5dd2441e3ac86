"""The sizes on which an implementation of grouped_gemm may decide whether it can run."""

from typing import NamedTuple


class GemmShape(NamedTuple):
    """Sizes of the stacked weight; the number of rows never decides."""

    num_experts: int
    in_features: int
    out_features: int
