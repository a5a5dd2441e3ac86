"""Every op with its implementations, for whoever shows them: `switchyard ls ops`, `switchyard doctor`."""

from typing import Any

from backends.ops import expert_mlp, grouped_gemm, rms_norm, router_topk
from backends.ops.table import Implementation

OPS: dict[str, dict[str, Implementation[Any, Any]]] = {
    "expert_mlp": expert_mlp.IMPLEMENTATIONS,
    "grouped_gemm": grouped_gemm.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "router_topk": router_topk.IMPLEMENTATIONS,
}
"""By name, best implementation first."""
