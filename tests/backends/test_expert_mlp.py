"""expert_mlp: every implementation against float64, in outputs and all gradients; fresh memory is NaN."""

import logging

import pytest
import torch
from torch import Tensor

from backends.ops.expert_mlp import IMPLEMENTATIONS, chunked, expert_mlp

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Largest error relative to the largest element. bf16 and fp16: gate, up, inner and the result are rounded one by one, each
to half an ulp (2^-9, 2^-12), and the last product adds up what came before."""
ON_CPU = [name for name, record in IMPLEMENTATIONS.items() if "cpu" in record.devices]
"""Those for other devices: tests/ascend runs these cases on them."""
NAMES = ("output", "grad_x", "grad_w1", "grad_w3", "grad_w2", "grad_weight")

# tokens per expert, D, F
SHAPES = {
    "even": ([8, 8, 8, 8], 32, 48),
    "odd_counts": ([5, 1, 0, 17, 3], 32, 16),
    "empty_first_and_last": ([0, 9, 0], 16, 64),
    "all_to_one": ([0, 0, 33, 0], 64, 32),
    "one_expert": ([13], 16, 16),
    "no_rows": ([0, 0, 0], 16, 32),
    "one_row": ([0, 1], 16, 8),
    "multiples_of_16": ([16, 32, 0, 16], 16, 16),
    "odd_sizes": ([4, 0, 3], 17, 7),
}


class Case:
    """Operands of one shape, and what float64 makes of them row by row."""

    def __init__(self, shape: str, dtype: torch.dtype, *, weighted: bool, num_sources: int | None) -> None:
        counts, hidden, width = SHAPES[shape]
        generator = torch.Generator().manual_seed(sum(counts) + hidden)
        num_rows = sum(counts)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.counts = torch.tensor(counts)
        self.source_R = None
        if num_sources is not None:
            # Some sources several times, some (the last) never; a source twice at one expert, too.
            self.source_R = torch.randint(0, max(1, num_sources - 1), (num_rows,), generator=generator)
        self.x_SD = normal(num_rows if num_sources is None else num_sources, hidden)
        self.w1_EFD, self.w3_EFD = (normal(len(counts), width, hidden) / hidden**0.5 for _ in range(2))
        self.w2_EDF = normal(len(counts), hidden, width) / width**0.5
        self.weight_R = torch.rand(num_rows, generator=generator) if weighted else None
        self.grad = normal(*self.x_SD.shape)

    def run(self, implementation: str, device: str = "cpu") -> dict[str, Tensor | None]:
        """Output and gradients of an implementation, or of "golden"."""
        leaves = [self.x_SD, self.w1_EFD, self.w3_EFD, self.w2_EDF, self.weight_R]
        if implementation == "golden":
            leaves = [None if leaf is None else leaf.double() for leaf in leaves]
        leaves = [None if leaf is None else leaf.detach().clone().to(device).requires_grad_() for leaf in leaves]
        x_SD, w1_EFD, w3_EFD, w2_EDF, weight_R = leaves
        assert x_SD is not None
        if implementation == "golden":
            assert w1_EFD is not None
            assert w3_EFD is not None
            assert w2_EDF is not None
            y = self._golden(x_SD, w1_EFD, w3_EFD, w2_EDF, weight_R)
        else:
            y = expert_mlp(
                x_SD, w1_EFD, w3_EFD, w2_EDF, self.counts.to(device), weight_R=weight_R, implementation=implementation,
                source_R=None if self.source_R is None else self.source_R.to(device),
            )  # fmt: skip
            assert y.dtype is self.x_SD.dtype
        y.backward(self.grad.to(y))
        return dict(zip(NAMES, (y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)), strict=True))

    def _golden(self, x_SD: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight_R: Tensor | None) -> Tensor:
        expert_R = torch.repeat_interleave(torch.arange(len(self.counts)), self.counts)
        rows_RD = x_SD if self.source_R is None else x_SD[self.source_R]
        gate_RF = torch.einsum("rd,rfd->rf", rows_RD, w1[expert_R])
        up_RF = torch.einsum("rd,rfd->rf", rows_RD, w3[expert_R])
        results_RD = torch.einsum("rf,rdf->rd", gate_RF * torch.sigmoid(gate_RF) * up_RF, w2[expert_R])
        if weight_R is not None:
            results_RD = results_RD * weight_R[:, None]
        return results_RD if self.source_R is None else torch.zeros_like(x_SD).index_add(0, self.source_R, results_RD)


def assert_close(name: str, actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert (actual is None) == (expected is None), name
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape, name
    actual = actual.cpu()
    assert actual.isfinite().all(), name
    if expected.numel():
        error, scale = float((actual.double() - expected).abs().max()), float(expected.abs().max())
        assert error <= tolerance * scale, f"{name}: error {error:.3e} of {scale:.3e}"


@pytest.mark.usefixtures("_nan_in_fresh_memory")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_equals_float64(implementation: str, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_elements in (1, 1 << 20):
        monkeypatch.setattr(chunked, "_CHUNK_ELEMENTS", chunk_elements)
        monkeypatch.setattr(chunked, "_PIECE_ELEMENTS", max(64, chunk_elements >> 4))
        check(implementation, shape, dtype)


def check(implementation: str, shape: str, dtype: torch.dtype, device: str = "cpu") -> None:
    for weighted in (False, True):
        for num_sources in (None, 11):
            case = Case(shape, dtype, weighted=weighted, num_sources=num_sources)
            actual, expected = case.run(implementation, device), case.run("golden")
            for name in NAMES:
                assert_close(name, actual[name], expected[name], TOLERANCE[dtype])
            for grad in (actual["grad_w1"], actual["grad_w3"], actual["grad_w2"]):
                assert grad is not None
                assert grad.is_contiguous()
                for expert, count in enumerate(case.counts.tolist()):
                    assert count > 0 or not grad[expert].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_give_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    case = Case("odd_counts", dtype, weighted=True, num_sources=11)
    case.counts = torch.tensor([700, 0, 1500, 1, 300])
    case.source_R = torch.randint(0, 400, (2501,), generator=generator)
    case.x_SD = torch.randn(400, 32, generator=generator).to(dtype)
    case.grad = torch.randn(400, 32, generator=generator).to(dtype)
    case.weight_R = torch.rand(2501, generator=generator)
    try:
        results = []
        for num_threads in (1, 2, 2):
            torch.set_num_threads(num_threads)
            results.append(case.run("chunked"))
    finally:
        torch.set_num_threads(before)
    for name in NAMES:
        one, two, again = (result[name] for result in results)
        assert one is not None
        assert two is not None
        assert again is not None
        assert torch.equal(two, again), name
        # The matrix library may cut a weight gradient's sum by the number of threads; the rest is row by row.
        assert name.startswith("grad_w") or torch.equal(one, two), name


@pytest.mark.parametrize("implementation", ON_CPU)
def test_takes_an_expanded_gradient_and_strided_operands(implementation: str) -> None:
    plain = Case("even", torch.float32, weighted=False, num_sources=None)
    plain.grad = torch.ones(()).expand(plain.grad.shape)
    strided = Case("even", torch.float32, weighted=False, num_sources=None)
    strided.grad = plain.grad
    strided.x_SD = plain.x_SD.t().contiguous().t()
    strided.w1_EFD, strided.w3_EFD, strided.w2_EDF = (
        weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (plain.w1_EFD, plain.w3_EFD, plain.w2_EDF)
    )
    actual, expected = strided.run(implementation), plain.run("golden")
    for name in NAMES:
        assert_close(name, actual[name], expected[name], 1e-6)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("wanted", range(5))
def test_computes_the_one_gradient_that_is_wanted(implementation: str, wanted: int) -> None:
    case = Case("odd_counts", torch.float32, weighted=True, num_sources=11)
    expected = case.run("golden")
    leaves = [case.x_SD, case.w1_EFD, case.w3_EFD, case.w2_EDF, case.weight_R]
    assert leaves[wanted] is not None
    leaves[wanted].requires_grad_()
    x_SD, w1_EFD, w3_EFD, w2_EDF, weight_R = leaves
    y_SD = expert_mlp(
        x_SD, w1_EFD, w3_EFD, w2_EDF, case.counts,
        weight_R=weight_R, source_R=case.source_R, implementation=implementation,
    )  # fmt: skip
    y_SD.backward(case.grad)
    for number, (leaf, name) in enumerate(zip(leaves, NAMES[1:], strict=True)):
        assert leaf is not None
        assert_close(name, leaf.grad, expected[name] if number == wanted else None, 1e-6)


def test_nothing_of_one_token_leaks_into_another_expert() -> None:
    """Padding reads some row; that row being NaN must not matter to the experts that it did not choose."""
    case = Case("odd_counts", torch.bfloat16, weighted=True, num_sources=11)
    case.source_R = torch.arange(26) % 9 + 1
    case.source_R[:5] = 0
    case.x_SD[0] = float("nan")
    results = case.run("chunked")
    for name in ("grad_w1", "grad_w3", "grad_w2"):
        grad = results[name]
        assert grad is not None
        assert grad[0].isnan().any()
        assert grad[1:].isfinite().all()
    assert results["output"] is not None
    assert results["output"][1:].isfinite().all()


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 16), (16, 16), (17, 32), (500, 512), (513, 544), (4095, 4096)])
def test_rows_are_filled_up_to_few_sizes(count: int, size: int) -> None:
    assert chunked.padded_size(count) == size


def test_few_sizes_and_little_padding() -> None:
    sizes = [chunked.padded_size(count) for count in range(10_000)]
    assert all(size >= count for count, size in enumerate(sizes))
    assert len(set(sizes)) < 110
    assert all(size <= count * 1.0625 for count, size in enumerate(sizes) if count > 256)


def test_operands_that_disagree_are_refused() -> None:
    case = Case("even", torch.float32, weighted=False, num_sources=None)
    with pytest.raises(ValueError, match=r"cast them to one"):
        expert_mlp(case.x_SD, case.w1_EFD, case.w3_EFD.bfloat16(), case.w2_EDF, case.counts)
    with pytest.raises(ValueError, match=r"32 rows, but the counts sum to 31"):
        expert_mlp(case.x_SD, case.w1_EFD, case.w3_EFD, case.w2_EDF, case.counts - torch.tensor([0, 1, 0, 0]))
    with pytest.raises(
        ValueError, match=r"\(fused\) is not an implementation; choose auto, chunked, ascend, grouped, reference"
    ):
        expert_mlp(case.x_SD, case.w1_EFD, case.w3_EFD, case.w2_EDF, case.counts, implementation="fused")
    with pytest.raises(ValueError, match=r"grouped_gemm \(reference\) has no effect with .*expert_mlp=chunked; choose"):
        expert_mlp(
            case.x_SD, case.w1_EFD, case.w3_EFD, case.w2_EDF, case.counts, implementation="chunked", gemm="reference"
        )


def test_a_named_product_is_the_one_that_runs() -> None:
    case = Case("odd_sizes", torch.float32, weighted=False, num_sources=None)
    operands = (case.x_SD, case.w1_EFD, case.w3_EFD, case.w2_EDF, case.counts)
    assert_close("output", expert_mlp(*operands, gemm="reference"), expert_mlp(*operands).double(), 1e-6)
    with pytest.raises(ValueError, match=r"grouped_gemm \(torch_native\) cannot run here: .*16 bytes"):
        expert_mlp(*operands, gemm="torch_native")


def test_auto_says_once_that_it_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("one_row", torch.float32, weighted=False, num_sources=None)
    with caplog.at_level(logging.WARNING, logger="backends.ops.table"):
        for _ in range(2):
            expert_mlp(
                case.x_SD.double(), case.w1_EFD.double(), case.w3_EFD.double(), case.w2_EDF.double(), case.counts
            )
    messages = [record.getMessage() for record in caplog.records if "expert_mlp" in record.getMessage()]
    assert len(messages) == 1
    assert "expert_mlp falls back to grouped (chunked: it takes" in messages[0]
