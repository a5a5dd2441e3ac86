"""What `switchyard verify ops` runs expert_mlp on: rows by themselves, weighted, and taken from tokens."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backends.ops.expert_mlp import expert_mlp
from backends.ops.subject import Operands, Subject, uneven_counts


def _rows(
    counts: list[int], hidden: int = 32, width: int = 48, *, num_tokens: int | None = None
) -> Callable[[torch.Generator], Operands]:
    def make(generator: torch.Generator) -> Operands:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        num_rows = sum(counts)
        made = {
            "x": normal(num_rows if num_tokens is None else num_tokens, hidden),
            "w1": normal(len(counts), width, hidden) / hidden**0.5,
            "w3": normal(len(counts), width, hidden) / hidden**0.5,
            "w2": normal(len(counts), hidden, width) / width**0.5,
            "counts": torch.tensor(counts),
            "weight": torch.rand(num_rows, generator=generator, dtype=torch.float64),
        }
        if num_tokens is not None:
            made["source"] = torch.randint(0, num_tokens, (num_rows,), generator=generator)
        return made

    return make


def _call(given: Operands, implementation: str) -> Mapping[str, Tensor]:
    y_D = expert_mlp(
        given["x"],
        given["w1"],
        given["w3"],
        given["w2"],
        given["counts"],
        weight_R=given["weight"],
        source_R=given.get("source"),
        implementation=implementation,
    )
    return {"y": y_D}


SUBJECT = Subject(
    cases={
        **{name: _rows(counts) for name, counts in uneven_counts().items()},
        "rows from tokens": _rows([30, 0, 12, 22], num_tokens=16),
        "odd sizes": _rows([4, 0, 3], 17, 7),
        "wide": _rows([20, 0, 50], 256, 320),
    },
    call=_call,
    kept_in_fp32=frozenset({"weight"}),
    factor=4.0,
    why_factor=(
        "three products in a row, whose middle results a fused version may round where the reference does not, and the "
        "other way round; each rounding is of the size of the reference's error"
    ),
)
