"""What `switchyard verify ops` runs grouped_gemm on."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backends.ops.grouped_gemm import grouped_gemm
from backends.ops.subject import Operands, Subject, uneven_counts


def _rows(counts: list[int], in_features: int, out_features: int) -> Callable[[torch.Generator], Operands]:
    def make(generator: torch.Generator) -> Operands:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        return {
            "rows": normal(sum(counts), in_features),
            "weight": normal(len(counts), out_features, in_features) / in_features**0.5,
            "counts": torch.tensor(counts),
        }

    return make


def _call(given: Operands, implementation: str) -> Mapping[str, Tensor]:
    return {"y": grouped_gemm(given["rows"], given["weight"], given["counts"], implementation=implementation)}


SUBJECT = Subject(
    cases={
        **{name: _rows(counts, 32, 48) for name, counts in uneven_counts().items()},
        "wide": _rows([20, 0, 50], 512, 256),
        "odd sizes": _rows([4, 0, 3], 17, 7),
    },
    call=_call,
    factor=4.0,
    why_factor=(
        "the reference multiplies in fp32 and rounds once; matrix units add up in blocks of their own, so the sums of a "
        "long row may round a few times more"
    ),
)
