"""SwiGLU experts a few at a time, in memory that is used again. For CPUs.

What a CPU loses in this layer is memory, not arithmetic: each fresh temporary of R · D elements costs more in page faults
than the pass that fills it, and several times what the gather itself costs in memory that is already there. So the
experts are taken in chunks whose rows stay in the cache, through buffers that all chunks share. Only x, gate and up are
kept for backward, which gathers again; a row's weight multiplies before the last product, so that its gradient,
<dL/d(weight · inner), inner>, needs no result; sums over a token's rows are added up chunk by chunk in fp32.

In bf16 the library behind torch.mm (oneDNN 3.12 under torch 2.13) makes a kernel for every new size: 0.5 to 0.8 ms each,
as long as a product of 500 rows takes, and it keeps 1024 of them. The tokens of an expert differ in every step, so most
sizes are new in most steps. Rows of zeros up to the next of a few sizes avoid that (`padded_size`). fp32 has no such cost.

Speed: see docs/benchmarks/moe-layer.md.

Legend: R rows, S source rows, Q rows with padding, q such rows of one chunk, E experts, D hidden, F width of an expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 21
"""Of a buffer of rows (q · D): a few such buffers stay in the last-level cache."""
_PIECE_ELEMENTS = 1 << 17
"""Of the fp32 buffers of the activation (rows · F): a few of them stay in a core's own cache."""
_ROUND_UP = (torch.bfloat16, torch.float16)
"""Types whose products cost extra for every new size."""


def padded_size(count: int) -> int:
    """Rows that `count` rows are filled up to: the next multiple of 16, above 512 of 1/32 to 1/16 of the size.

    Under 2 % of the rows where experts have some hundreds, and at most some 100 different sizes below 10 000.
    """
    unit = max(16, 1 << max(0, (count - 1).bit_length() - 5))
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Neighbouring experts and where their rows lie. Rows are counted with padding, but for the two that say so."""

    experts: slice
    sizes: list[int]
    """Rows of each expert."""
    rows: slice
    """Of gate and up."""
    real_rows: slice
    """Without padding, of the op's rows."""
    source_q: Tensor | None
    """int64: row of x for each row, any for padding; None when row i is x[i] and there is no padding."""
    target_q: Tensor | None
    """int64: row of the sums, the last for padding; None when there are no sources."""
    padding: Tensor | None
    """int64: rows to be set to 0; None without any."""
    real: Tensor | None
    """int64: rows that are not padding, of this chunk from 0; None without padding."""

    @property
    def num_rows(self) -> int:
        """q."""
        return self.rows.stop - self.rows.start


def expert_mlp(
    x_SD: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w2_EDF: Tensor,
    tokens_per_expert_E: Tensor,
    weight_R: Tensor | None,
    source_R: Tensor | None,
) -> Tensor:
    """See `backends.ops.expert_mlp.expert_mlp`."""
    y: Tensor = _ExpertMlp.apply(x_SD, w1_EFD, w3_EFD, w2_EDF, tokens_per_expert_E, weight_R, source_R)
    return y


def _plan(
    counts: Sequence[int], hidden_size: int, source_R: Tensor | None, num_sources: int, pad: bool
) -> list[_Chunk]:
    """Cut the experts into chunks of about _CHUNK_ELEMENTS; an expert is never cut."""
    sizes = [padded_size(count) if pad else count for count in counts]
    num_rows, num_real = sum(sizes), sum(counts)
    padded = num_rows != num_real
    gather_Q = target_Q = position_R = is_padding_Q = None
    if padded:
        shift = torch.tensor([0, *(size - count for size, count in zip(sizes, counts, strict=True))]).cumsum(0)[:-1]
        position_R = torch.arange(num_real) + torch.repeat_interleave(shift, torch.tensor(counts))
        target_Q = torch.full((num_rows,), num_sources)
        target_Q[position_R] = torch.arange(num_real) if source_R is None else source_R
        is_padding_Q = target_Q == num_sources
        gather_Q = target_Q.masked_fill(is_padding_Q, 0)
    elif source_R is not None:
        gather_Q = target_Q = source_R
    chunks = []
    limit = max(1, _CHUNK_ELEMENTS // hidden_size)
    expert = row = real_row = 0
    while expert < len(sizes):
        last, rows = expert + 1, sizes[expert]
        while last < len(sizes) and rows + sizes[last] <= limit:
            rows += sizes[last]
            last += 1
        real = sum(counts[expert:last])
        here, here_real = slice(row, row + rows), slice(real_row, real_row + real)
        with_padding = rows != real
        chunks.append(
            _Chunk(
                experts=slice(expert, last),
                sizes=sizes[expert:last],
                rows=here,
                real_rows=here_real,
                source_q=None if gather_Q is None else gather_Q[here],
                target_q=None if target_Q is None or source_R is None else target_Q[here],
                padding=is_padding_Q[here].nonzero().squeeze(1) if is_padding_Q is not None and with_padding else None,
                real=None if position_R is None else position_R[here_real] - row,
            )
        )
        expert, row, real_row = last, row + rows, real_row + real
    return chunks


def _read(x_SD: Tensor, chunk: _Chunk, buffer: Tensor) -> Tensor:
    """The chunk's rows of x, [q, D]: in the buffer unless they lie in x as they are needed."""
    if chunk.source_q is None:
        return x_SD[chunk.rows]
    rows_qD = buffer[: chunk.num_rows]
    torch.index_select(x_SD, 0, chunk.source_q, out=rows_qD)
    if chunk.padding is not None:
        rows_qD.index_fill_(0, chunk.padding, 0)
    return rows_qD


def _products(left: Tensor, weight_E: Sequence[Tensor], out: Tensor, chunk: _Chunk) -> None:
    """out[rows of e] = left[rows of e] · weight[e]."""
    pieces = zip(left.split(chunk.sizes), weight_E[chunk.experts], out.split(chunk.sizes), strict=True)
    for rows, weight, product in pieces:
        if rows.shape[0]:
            torch.mm(rows, weight, out=product)


def _weight_gradients(grad: Tensor, rows: Tensor, out_E: Sequence[Tensor], chunk: _Chunk) -> None:
    """out[e] = grad[rows of e]ᵀ · rows[rows of e]; 0 without rows."""
    pieces = zip(grad.split(chunk.sizes), rows.split(chunk.sizes), out_E[chunk.experts], strict=True)
    for grad_of_expert, rows_of_expert, out in pieces:
        if rows_of_expert.shape[0]:
            torch.mm(grad_of_expert.t(), rows_of_expert, out=out)
        else:
            out.zero_()


class _Result:
    """[R, D] rows, or sums over sources, that chunks are written to."""

    def __init__(self, x_SD: Tensor, num_rows: int, chunks: Sequence[_Chunk], *, summed: bool) -> None:
        self._dtype = x_SD.dtype
        self._num_sources, hidden_size = x_SD.shape
        self._most_rows = max(chunk.num_rows for chunk in chunks)
        self._sums: Tensor | None = None
        if summed:
            # One row more than there are sources takes what padding would add.
            self._sums = torch.zeros(self._num_sources + 1, hidden_size, dtype=torch.float32)
            self._fp32_qD = torch.empty(self._most_rows, hidden_size, dtype=torch.float32)
        else:
            self._rows_RD = x_SD.new_empty(num_rows, hidden_size)

    def place(self, chunk: _Chunk, buffer: Tensor) -> Tensor:
        """Where to compute the chunk's rows, [q, D], before `write`."""
        if self._sums is None and chunk.real is None:
            return self._rows_RD[chunk.real_rows]
        return buffer[: chunk.num_rows]

    def write(self, chunk: _Chunk, rows_qD: Tensor, more_qD: Tensor | None = None) -> None:
        """Take the chunk's rows, plus more_qD if given."""
        if self._sums is not None:
            if more_qD is not None or rows_qD.dtype != torch.float32:
                rows_qD = self._fp32_qD[: chunk.num_rows].copy_(rows_qD)
            if more_qD is not None:
                rows_qD.add_(more_qD)
            assert chunk.target_q is not None
            self._sums.index_add_(0, chunk.target_q, rows_qD)
            return
        if more_qD is not None:
            rows_qD.add_(more_qD)
        if chunk.real is not None:
            torch.index_select(rows_qD, 0, chunk.real, out=self._rows_RD[chunk.real_rows])

    def finish(self) -> Tensor:
        """The whole, in the dtype of x."""
        return self._rows_RD if self._sums is None else self._sums[: self._num_sources].to(self._dtype)


class _Activation:
    """silu(gate) · up · weight and its gradients, in fp32, piece by piece in buffers of its own."""

    def __init__(self, dtype: torch.dtype, width: int, num_buffers: int) -> None:
        self._piece_rows = max(1, _PIECE_ELEMENTS // width)
        self._fp32 = dtype == torch.float32
        self._buffers = [torch.empty(self._piece_rows, width, dtype=torch.float32) for _ in range(num_buffers)]

    def forward(self, gate_qF: Tensor, up_qF: Tensor, weight_q1: Tensor | None, inner_qF: Tensor) -> None:
        """Write inner."""
        for gate, up, weight, inner in self._pieces(gate_qF, up_qF, weight_q1, inner_qF):
            gate_32, up_32 = self._widen(gate, 0), self._widen(up, 1)
            product = inner if self._fp32 else gate_32
            torch.ops.aten.silu.out(gate_32, out=product)
            product.mul_(up_32)
            if weight is not None:
                product.mul_(weight)
            if not self._fp32:
                inner.copy_(product)

    def backward(
        self,
        gate_qF: Tensor,
        up_qF: Tensor,
        weight_q1: Tensor | None,
        grad_inner_qF: Tensor,
        inner_qF: Tensor,
        grad_gate_qF: Tensor,
        grad_up_qF: Tensor,
        grad_weight_q: Tensor | None,
    ) -> None:
        """Write inner (once more) and the gradients of gate, up and weight."""
        operands = (gate_qF, up_qF, weight_q1, grad_inner_qF, inner_qF, grad_gate_qF, grad_up_qF, grad_weight_q)
        for gate, up, weight, grad, inner, grad_gate, grad_up, grad_weight in self._pieces(*operands):
            gate_32, up_32, grad_32 = self._widen(gate, 0), self._widen(up, 1), self._widen(grad, 2)
            silu, product = (buffer[: gate.shape[0]] for buffer in self._buffers[3:5])
            torch.ops.aten.silu.out(gate_32, out=silu)
            torch.mul(silu, up_32, out=product)
            if weight is not None:
                if grad_weight is not None:
                    torch.linalg.vecdot(grad_32, product, out=grad_weight)
                product.mul_(weight)
                # In the buffer even for fp32 operands: the caller's gradient is its own.
                grad_32 = torch.mul(grad_32, weight, out=self._buffers[2][: gate.shape[0]])
            inner.copy_(product)
            grad_up.copy_(torch.mul(grad_32, silu, out=silu))
            torch.mul(grad_32, up_32, out=product)
            torch.ops.aten.silu_backward.grad_input(product, gate_32, grad_input=product)
            grad_gate.copy_(product)

    def _pieces(self, *operands: Tensor | None) -> Iterator[tuple[Any, ...]]:
        num_rows = operands[0].shape[0] if operands[0] is not None else 0
        if not num_rows:
            return iter(())
        num_pieces = -(-num_rows // self._piece_rows)
        split = [[None] * num_pieces if operand is None else operand.split(self._piece_rows) for operand in operands]
        return zip(*split, strict=True)

    def _widen(self, piece: Tensor, buffer: int) -> Tensor:
        return piece if self._fp32 else self._buffers[buffer][: piece.shape[0]].copy_(piece)


def _weight_of(chunk: _Chunk, weight_R: Tensor | None, buffer_q: Tensor) -> Tensor | None:
    """The chunk's weights, [q, 1] fp32, 0 for padding."""
    if weight_R is None:
        return None
    real = weight_R[chunk.real_rows]
    if chunk.real is None:
        return real.unsqueeze(1)
    return buffer_q[: chunk.num_rows].zero_().index_copy_(0, chunk.real, real).unsqueeze(1)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        w1_EFD: Tensor,
        w3_EFD: Tensor,
        w2_EDF: Tensor,
        tokens_per_expert_E: Tensor,
        weight_R: Tensor | None,
        source_R: Tensor | None,
    ) -> Tensor:
        x_SD = x_SD.contiguous()
        counts = tokens_per_expert_E.tolist()
        hidden_size, width = w2_EDF.shape[1:]
        chunks = _plan(counts, hidden_size, source_R, x_SD.shape[0], pad=x_SD.dtype in _ROUND_UP)
        num_rows, most = chunks[-1].rows.stop, max(chunk.num_rows for chunk in chunks)
        gate_QF, up_QF = x_SD.new_empty(num_rows, width), x_SD.new_empty(num_rows, width)
        rows_buffer, inner_buffer = x_SD.new_empty(most, hidden_size), x_SD.new_empty(most, width)
        weight_buffer = torch.empty(most, dtype=torch.float32)
        weight_32_R = None if weight_R is None else weight_R.float()
        w1_E, w3_E, w2_E = (weight.transpose(1, 2).unbind(0) for weight in (w1_EFD, w3_EFD, w2_EDF))
        activation = _Activation(x_SD.dtype, width, 2)
        result = _Result(x_SD, sum(counts), chunks, summed=source_R is not None)
        for chunk in chunks:
            rows_qD = _read(x_SD, chunk, rows_buffer)
            gate_qF, up_qF = gate_QF[chunk.rows], up_QF[chunk.rows]
            _products(rows_qD, w1_E, gate_qF, chunk)
            _products(rows_qD, w3_E, up_qF, chunk)
            inner_qF = inner_buffer[: chunk.num_rows]
            activation.forward(gate_qF, up_qF, _weight_of(chunk, weight_32_R, weight_buffer), inner_qF)
            # The rows have been read: their buffer takes the results.
            place_qD = result.place(chunk, rows_buffer)
            _products(inner_qF, w2_E, place_qD, chunk)
            result.write(chunk, place_qD)
        ctx.save_for_backward(x_SD, w1_EFD, w3_EFD, w2_EDF, weight_R, source_R, gate_QF, up_QF)
        ctx.counts, ctx.chunks = counts, chunks
        return result.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, w1_EFD, w3_EFD, w2_EDF, weight_R, source_R, gate_QF, up_QF = ctx.saved_tensors
        chunks: list[_Chunk] = ctx.chunks
        wants_x, wants_w1, wants_w3, wants_w2, _, wants_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        hidden_size, width = w2_EDF.shape[1:]
        most = max(chunk.num_rows for chunk in chunks)
        rows_buffer, grad_buffer, more_buffer = (x_SD.new_empty(most, hidden_size) for _ in range(3))
        grad_inner_buffer, inner_buffer, grad_gate_buffer, grad_up_buffer = (
            x_SD.new_empty(most, width) for _ in range(4)
        )
        weight_buffer, grad_weight_buffer = (torch.empty(most, dtype=torch.float32) for _ in range(2))
        weight_32_R = None if weight_R is None else weight_R.float()
        grad_weight_R = torch.empty_like(weight_32_R) if weight_32_R is not None and wants_weight else None
        w1_E, w3_E, w2_E = (weight.unbind(0) for weight in (w1_EFD, w3_EFD, w2_EDF))
        grad_w1, grad_w3, grad_w2 = (
            torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted else None
            for weight, wanted in ((w1_EFD, wants_w1), (w3_EFD, wants_w3), (w2_EDF, wants_w2))
        )
        # Once, not in every chunk: a view for each expert costs a microsecond.
        grad_w1_E, grad_w3_E, grad_w2_E = (
            () if grad_w is None else grad_w.unbind(0) for grad_w in (grad_w1, grad_w3, grad_w2)
        )
        activation = _Activation(x_SD.dtype, width, 5)
        result = _Result(x_SD, sum(ctx.counts), chunks, summed=source_R is not None) if wants_x else None
        for chunk in chunks:
            q = chunk.num_rows
            grad_qD = _read(grad, chunk, grad_buffer)
            grad_inner_qF, inner_qF = grad_inner_buffer[:q], inner_buffer[:q]
            grad_gate_qF, grad_up_qF = grad_gate_buffer[:q], grad_up_buffer[:q]
            _products(grad_qD, w2_E, grad_inner_qF, chunk)
            grad_weight_q = None if grad_weight_R is None else grad_weight_buffer[:q]
            activation.backward(
                gate_QF[chunk.rows], up_QF[chunk.rows], _weight_of(chunk, weight_32_R, weight_buffer),
                grad_inner_qF, inner_qF, grad_gate_qF, grad_up_qF, grad_weight_q,
            )  # fmt: skip
            if grad_weight_R is not None and grad_weight_q is not None:
                real = grad_weight_q if chunk.real is None else grad_weight_q.index_select(0, chunk.real)
                grad_weight_R[chunk.real_rows] = real
            if grad_w2_E:
                _weight_gradients(grad_qD, inner_qF, grad_w2_E, chunk)
            if grad_w1_E or grad_w3_E:
                rows_qD = _read(x_SD, chunk, rows_buffer)
                if grad_w1_E:
                    _weight_gradients(grad_gate_qF, rows_qD, grad_w1_E, chunk)
                if grad_w3_E:
                    _weight_gradients(grad_up_qF, rows_qD, grad_w3_E, chunk)
            if result is not None:
                place_qD, more_qD = result.place(chunk, grad_buffer), more_buffer[:q]
                _products(grad_gate_qF, w1_E, place_qD, chunk)
                _products(grad_up_qF, w3_E, more_qD, chunk)
                result.write(chunk, place_qD, more_qD)
        grad_x = None if result is None else result.finish()
        grad_weight = None if grad_weight_R is None or weight_R is None else grad_weight_R.to(weight_R.dtype)
        return grad_x, grad_w1, grad_w3, grad_w2, None, grad_weight, None
