"""Stage 0, where DeepSpeed only reduces: norm, clipping and update are ours (end of a step)."""

from torch import Tensor

from moe.train.optim import MasterAdamW


class StageZeroAdamW(MasterAdamW):
    """MasterAdamW that DeepSpeed's stage 0 can reduce: it asks `get_grads_for_reduction` instead of reading `.grad`.

    Private hook of 0.19.8 (made for BF16_Optimizer). Condition: stage 0 with `data_types.grad_accum_dtype: fp32`.
    """

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Gradients of the whole step: (dense, {expert group name: experts}); DeepSpeed reduces them in place."""
        self.accumulate()
        dense: list[Tensor] = []
        experts: dict[str, list[Tensor]] = {}
        for parameter, master in self.masters.items():
            assert master.grad is not None
            group_name = getattr(parameter, "group_name", None)
            (dense if group_name is None else experts.setdefault(group_name, [])).append(master.grad)
        return dense, experts
