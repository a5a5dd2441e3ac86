"""The sizes on which an implementation of expert_mlp may decide whether it can run."""

from typing import NamedTuple


class MlpShape(NamedTuple):
    """Sizes of the stacked weights; the number of rows never decides."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
