"""What `switchyard verify ops` runs rms_norm on."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backends.ops.rms_norm import rms_norm
from backends.ops.subject import Operands, Subject

EPS = 1e-6


def _rows(*shape: int, size: float = 1.0) -> Callable[[torch.Generator], Operands]:
    def make(generator: torch.Generator) -> Operands:
        x_D = size * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return {"x": x_D, "weight": torch.rand(shape[-1], generator=generator, dtype=torch.float64) + 0.5}

    return make


def _call(given: Operands, implementation: str) -> Mapping[str, Tensor]:
    return {"y": rms_norm(given["x"], given["weight"], EPS, implementation=implementation)}


SUBJECT = Subject(
    cases={
        "rows of 64": _rows(40, 64),
        "odd width": _rows(3, 5, 17),
        "one row": _rows(1, 32),
        "no rows": _rows(0, 32),
        "wide": _rows(4, 4096),
        "large values": _rows(8, 64, size=1e4),
        "tiny values": _rows(8, 64, size=1e-4),
    },
    call=_call,
    factor=2.0,
    why_factor="one fused pass may sum a row, and the weight's gradient over rows, in another order than the reference",
)
