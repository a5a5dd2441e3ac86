"""The Triton kernels against float64: outputs and gradients, printed as JSON, a row per case.

A program of its own: TRITON_INTERPRET=1 must stand before triton is imported. Arguments: the device, cpu for the
interpreter or cuda.
"""

import json
import sys

import torch

from backends.ops.grouped_gemm import reference, triton_gpu

# tokens per expert, D, F: within a tile, across tiles, idle experts, no rows, sizes off the tile
SHAPES = [
    ([5, 0, 17, 0], 19, 18),
    ([0, 33], 32, 48),
    ([0, 0], 16, 16),
    ([3], 40, 7),
    ([1, 1, 20], 1, 33),
]


def errors(counts: list[int], in_features: int, out_features: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest error of each result, relative to its largest element; infinite when a result is not finite."""
    generator = torch.Generator().manual_seed(sum(counts) + in_features)
    x = torch.randn(sum(counts), in_features, generator=generator).to(dtype)
    w = torch.randn(len(counts), out_features, in_features, generator=generator).to(dtype)
    dy = torch.randn(sum(counts), out_features, generator=generator).to(dtype)
    results = []
    for function, inner, where in (
        (triton_gpu.grouped_gemm, dtype, device),
        (reference.grouped_gemm, torch.float64, "cpu"),
    ):
        a, b = (operand.detach().to(where, inner, copy=True).requires_grad_() for operand in (x, w))
        y = function(a, b, torch.tensor(counts, device=where))
        y.backward(dy.to(where, inner))
        assert a.grad is not None
        assert b.grad is not None
        results.append([result.detach().cpu().double() for result in (y, a.grad, b.grad)])
    found = {}
    for name, actual, expected in zip(("output", "grad_rows", "grad_weight"), *results, strict=True):
        assert actual.shape == expected.shape
        error = (actual - expected).abs().max() if expected.numel() else torch.tensor(0.0)
        scale = expected.abs().max() if expected.numel() else torch.tensor(1.0)
        found[name] = float(error / scale.clamp(min=1e-30)) if actual.isfinite().all() else float("inf")
    return found


def main(device: str) -> list[dict[str, object]]:
    """Every shape × dtype. Fresh memory is NaN, so an element that no program wrote shows."""
    torch.use_deterministic_algorithms(True)
    return [
        {"shape": shape, "dtype": str(dtype), "errors": errors(*shape, dtype, device)}
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
