"""One rank with experts that take rows from their tokens: against the reference dispatcher and the reference op."""

import pytest
import torch
from torch import Tensor

from dispatch.interface import NOT_DISPATCHED
from dispatch.local import LocalDispatcher, TokenExperts
from dispatch.placement import place_experts
from dispatch.reference import ReferenceDispatcher
from moe.model.experts import Experts
from tests.dispatch.cases import CASES, HIDDEN, make_inputs, output_gradient

NUM_EXPERTS, WIDTH = 7, 8
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6}
"""Of the largest element. bf16: what is rounded on the way differs (the weight is in before the last product)."""


def run(
    case: str, dtype: torch.dtype, dispatcher: LocalDispatcher | ReferenceDispatcher, implementation: str
) -> dict[str, Tensor]:
    x_TD, ids_TK, weights_TK = make_inputs(case, 0, 1, NUM_EXPERTS, 3)
    x_TD, weights_TK = x_TD.to(dtype).requires_grad_(), weights_TK.requires_grad_()
    experts = Experts(NUM_EXPERTS, HIDDEN, WIDTH, implementation=implementation)
    for number, parameter in enumerate(experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(number))
    experts.to(dtype)
    y_TD = dispatcher.run(x_TD, ids_TK, weights_TK, experts)
    assert y_TD.dtype is dtype
    y_TD.backward(output_gradient(0, y_TD))
    results = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
    return results | {name: parameter.grad for name, parameter in experts.named_parameters()}  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, dtype: torch.dtype) -> None:
    expected = run(case, dtype, ReferenceDispatcher(place_experts(NUM_EXPERTS, 1, None), None), "reference")
    for implementation in ("chunked", "grouped"):
        actual = run(case, dtype, LocalDispatcher(NUM_EXPERTS), implementation)
        for name, tensor in expected.items():
            scale = float(tensor.abs().max()) if tensor.numel() else 0.0
            difference = actual[name].double() - tensor.double()
            error = float(difference.abs().max()) if tensor.numel() else 0.0
            assert error <= TOLERANCE[dtype] * scale, f"{implementation}: {name}: {error} of {scale}"


def test_a_pick_that_goes_nowhere_has_no_gradient_and_leaks_nothing() -> None:
    x_TD = torch.randn(4, HIDDEN)
    x_TD[2] = float("nan")
    ids_TK = torch.tensor([[0, 1], [1, NOT_DISPATCHED], [NOT_DISPATCHED, NOT_DISPATCHED], [6, 0]])
    weights_TK = torch.rand(4, 2).requires_grad_()
    experts = Experts(NUM_EXPERTS, HIDDEN, WIDTH)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    y_TD = LocalDispatcher(NUM_EXPERTS).run(x_TD, ids_TK, weights_TK, experts)
    y_TD.sum().backward()
    assert torch.equal(y_TD[2], torch.zeros(HIDDEN))
    assert weights_TK.grad is not None
    assert weights_TK.grad[ids_TK == NOT_DISPATCHED].tolist() == [0.0, 0.0, 0.0]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in experts.parameters())


@pytest.mark.parametrize(
    ("implementation", "gemm", "taken"),
    [("auto", "auto", True), ("auto", "reference", False), ("grouped", "auto", False), ("chunked", "auto", True)],
)
def test_tokens_are_taken_where_that_gains_something(implementation: str, gemm: str, taken: bool) -> None:
    experts = Experts(1, HIDDEN, WIDTH, implementation=implementation, gemm=gemm)
    assert isinstance(experts, TokenExperts)
    for parameter in experts.parameters():
        torch.nn.init.zeros_(parameter)
    y_TD = experts.for_tokens(torch.ones(2, HIDDEN), torch.tensor([1]), torch.ones(1), torch.tensor([1]))
    assert (y_TD is not None) == taken
