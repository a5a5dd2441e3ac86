"""Every op with its implementations, for whoever shows them: `switchyard ls ops`, `switchyard doctor`, `verify ops`."""

from typing import Any

from backends.ops import expert_mlp, grouped_gemm, rms_norm, router_topk
from backends.ops.expert_mlp import cases as expert_mlp_cases
from backends.ops.grouped_gemm import cases as grouped_gemm_cases
from backends.ops.rms_norm import cases as rms_norm_cases
from backends.ops.router_topk import cases as router_topk_cases
from backends.ops.subject import Subject
from backends.ops.table import Implementation

OPS: dict[str, dict[str, Implementation[Any, Any]]] = {
    "expert_mlp": expert_mlp.IMPLEMENTATIONS,
    "grouped_gemm": grouped_gemm.IMPLEMENTATIONS,
    "rms_norm": rms_norm.IMPLEMENTATIONS,
    "router_topk": router_topk.IMPLEMENTATIONS,
}
"""By name, best implementation first."""

SUBJECTS: dict[str, Subject] = {
    "expert_mlp": expert_mlp_cases.SUBJECT,
    "grouped_gemm": grouped_gemm_cases.SUBJECT,
    "rms_norm": rms_norm_cases.SUBJECT,
    "router_topk": router_topk_cases.SUBJECT,
}
"""What each is verified on; every op has one (tests/backends/test_listing.py)."""
