"""Masters and moments in host memory: what DeepSpeed leaves to us there (end of a step)."""

from typing import Any


def forget_bad_gradients(host_optimizer: Any) -> None:
    """Drop the gradients of a step that was not applied.

    Stage 2 of 0.19.8 with bf16 weights keeps them when the optimizer is offloaded, and adds the next step's to them: one
    NaN, and no step is ever applied again. Without offload it drops them. Condition: it drops them here, too.
    """
    averaged = host_optimizer.averaged_gradients
    for group in averaged:
        averaged[group] = None
