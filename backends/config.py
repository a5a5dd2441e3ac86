"""Which device and which implementation of each op. Torch-free."""

from dataclasses import dataclass, field
from enum import Enum


class DeviceKind(Enum):
    """Kind of device a run uses."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


OP_IMPLEMENTATIONS = {
    "expert_mlp": ("ascend", "chunked", "grouped", "reference"),
    "grouped_gemm": ("ascend", "reference", "torch_native", "triton"),
    "rms_norm": ("ascend", "reference", "torch_native"),
    "router_topk": ("chunked", "reference"),
}
"""Names that backend.ops.<op> may be, beside auto: the keys of the op's table, here without loading torch."""


@dataclass(kw_only=True, slots=True)
class OpsConfig:
    """Implementation per op: auto, or a name that `switchyard ls ops` shows. A named one that cannot run raises."""

    expert_mlp: str = "auto"
    """The experts as a whole: auto, chunked (CPU), ascend (NPU), grouped (three grouped_gemm) or reference."""
    grouped_gemm: str = "auto"
    """auto, ascend (NPU), reference, torch_native or triton (cuda). A named one makes expert_mlp=auto take `grouped`."""
    rms_norm: str = "auto"
    """Every norm of the model: auto, ascend (NPU), torch_native or reference."""
    router_topk: str = "auto"
    """From logits to picks, weights and sums: auto, chunked (CPU) or reference."""


@dataclass(kw_only=True, slots=True)
class BackendConfig:
    """The device of a run. On the command line `backend=cpu` chooses configs/backend/cpu.yaml."""

    device: DeviceKind = DeviceKind.auto
    """auto takes what is there: cuda, then npu, then cpu."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Implementation per op."""
