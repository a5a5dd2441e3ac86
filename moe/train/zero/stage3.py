"""Stage 3, where every rank holds a piece of each weight: what DeepSpeed leaves to us there (end of a step).

A weight is whole only while the module that owns it runs. What DeepSpeed hangs on parameters and modules is used here
by name, its optimizer by private methods; tests/train/test_deepspeed_contract.py says at once when one has moved.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def expert_placement(group_name: str) -> dict[str, str]:
    """Attributes that make stage 3 cut an expert parameter over the ranks that hold copies of it, and over no other.

    Private, condition: DeepSpeed goes by `allreduce` and `group_name` at stage 3 as at stages 1 and 2.
    """
    return {"ds_zero_placement_family": "autoep_expert", "ds_zero_partition_group_name": group_name}


def own_piece(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a tensor of the parameter's shape: flat, zeros behind the end."""
    group: dist.ProcessGroup = parameter.ds_process_group  # type: ignore[attr-defined]
    size = int(parameter.ds_tensor.numel())  # type: ignore[attr-defined]
    start = dist.get_rank(group) * size
    part = whole.reshape(-1)[start : start + size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


def allocate_pieces(host_optimizer: Any) -> None:
    """Give every flat piece its zero moments and step 0 now, as the first step would (see `optim.allocate_state`)."""
    for piece in host_optimizer.fp32_partitioned_groups_flat:
        host_optimizer.optimizer.state[piece] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(piece).detach(),
            "exp_avg_sq": torch.zeros_like(piece).detach(),
        }


def write_masters_back(host_optimizer: Any) -> None:
    """Round the fp32 pieces into the weights, those that stay whole included (collective).

    Private, condition: `update_lp_params` at stage 3, as at stages 1 and 2. The calls are those of the end of its step.
    """
    host_optimizer._partition_all_parameters()
    for index in range(len(host_optimizer.fp16_groups)):
        host_optimizer._reassign_or_swap_out_partitioned_parameters(index)
    kept_whole = host_optimizer.persistent_parameters
    if kept_whole:
        kept_whole[0].all_gather(kept_whole)
