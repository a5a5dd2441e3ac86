"""Compiles every Triton kernel ahead of time, without a GPU: registers, stack and shared memory per architecture.

`make kernels` runs `python -m backends.ops.kernels PATH`, which writes the table that a test compares with. Needs the
triton package, of the version the table names.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backends.ops.grouped_gemm.triton_gpu import TILES

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory one block may use. Source: CUDA C++ Programming Guide, technical specifications."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def measure() -> dict[str, Any]:
    """{"triton": version, "kernels": {"kernel dtype sm": {"registers", "stack", "shared"}}}; stack and shared in bytes.

    A kernel that spills keeps what it spilled on the stack; these kernels put nothing else there.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows: dict[str, dict[str, int]] = {}
    for name, source, options in _sources(ASTSource):
        for architecture in ARCHITECTURES:
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            rows[f"{name} sm_{architecture}"] = {
                **_usage(compiled.asm["cubin"], Path(triton.__file__).parent),
                "shared": compiled.metadata.shared,
            }
    return {"triton": triton.__version__, "kernels": rows}


def _sources(make: Any) -> Iterator[tuple[str, Any, dict[str, int]]]:
    from backends.ops.grouped_gemm import triton_kernels

    for dtype, letters in TYPES.items():
        tile = TILES[dtype]._asdict()
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        forward, gradient = triton_kernels.rows_times_weight, triton_kernels.weight_gradient
        for name, kernel, extra in (
            ("forward", forward, {"WEIGHT_IS_NK": True}),
            ("grad_rows", forward, {"WEIGHT_IS_NK": False}),
            ("grad_weight", gradient, {}),
        ):
            constants = {**extra, "UPCAST": False, **tile}
            signature = {
                argument: "constexpr"
                if argument in constants
                else "*i32"
                if argument == "offsets_ptr"
                else f"*{letters}"
                if argument.endswith("_ptr")
                else "i32"
                for argument in kernel.arg_names
            }
            # As at a launch: pointers and sizes that are multiples of 16.
            attributes = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 5, 6)}
            source = make(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            yield f"grouped_gemm.{name} {letters}", source, options


def _usage(cubin: bytes, package: Path) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = {key: re.search(rf"\b{key}:(\d+)", text) for key in ("REG", "STACK")}
    if found["REG"] is None or found["STACK"] is None:
        raise RuntimeError(f"cuobjdump's answer names no registers or stack: {text!r}; look at its version")
    return {"registers": int(found["REG"][1]), "stack": int(found["STACK"][1])}


if __name__ == "__main__":
    with open(sys.argv[1], "w") as table:
        json.dump(measure(), table, indent=1)
        table.write("\n")
