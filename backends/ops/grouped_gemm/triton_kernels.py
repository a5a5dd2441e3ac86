"""Grouped matrix product in Triton: the kernels. Importing this module imports triton; `triton_gpu` does so lazily.

Written to run on more than CUDA: a persistent one-dimensional grid, 32-bit indices within a tile (64 bits for base
offsets alone), fp32 sums of at most 128 × 128, no assumption on the number of warps.

Letters: M rows of a tile, K the summed size, N columns. offsets: int32, expert e owns rows offsets[e] to offsets[e+1].
"""

import triton
import triton.language as tl


@triton.jit
def rows_times_weight(
    a_ptr,
    w_ptr,
    y_ptr,
    offsets_ptr,
    num_experts,
    K,
    N,
    WEIGHT_IS_NK: tl.constexpr,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[i] = a[i] · w[e(i)]ᵀ for weights [N, K] (forward), or a[i] · w[e(i)] for weights [K, N] (gradient of rows)."""
    tile = tl.program_id(0)
    column_tiles = tl.cdiv(N, BN)
    first = 0
    for expert in range(num_experts):
        start = tl.load(offsets_ptr + expert)
        rows = tl.load(offsets_ptr + expert + 1) - start
        tiles = tl.cdiv(rows, BM) * column_tiles
        while tile < first + tiles:
            row = (tile - first) // column_tiles * BM
            m = tl.arange(0, BM)
            n = (tile - first) % column_tiles * BN + tl.arange(0, BN)
            base = (start + row).to(tl.int64)
            sums = tl.zeros((BM, BN), tl.float32)
            for k0 in range(0, K, BK):
                k = k0 + tl.arange(0, BK)
                a_mask = (m[:, None] < rows - row) & (k[None, :] < K)
                a = tl.load(a_ptr + base * K + m[:, None] * K + k[None, :], mask=a_mask, other=0.0)
                if WEIGHT_IS_NK:
                    within = n[None, :] * K + k[:, None]
                else:
                    within = k[:, None] * N + n[None, :]
                w = tl.load(w_ptr + within, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
                if UPCAST:
                    a, w = a.to(tl.float32), w.to(tl.float32)
                sums = tl.dot(a, w, sums, input_precision="ieee")
            y_mask = (m[:, None] < rows - row) & (n[None, :] < N)
            tl.store(y_ptr + base * N + m[:, None] * N + n[None, :], sums.to(y_ptr.dtype.element_ty), mask=y_mask)
            tile += tl.num_programs(0)
        first += tiles
        w_ptr += K * N


@triton.jit
def weight_gradient(
    dy_ptr,
    x_ptr,
    dw_ptr,
    offsets_ptr,
    num_experts,
    F,
    D,
    UPCAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[e] = Σ over the rows of e of dyᵀ · x: [F, D] per expert, exactly 0 for an expert without rows."""
    tile = tl.program_id(0)
    column_tiles = tl.cdiv(D, BN)
    tiles = tl.cdiv(F, BM) * column_tiles
    while tile < num_experts * tiles:
        expert = tile // tiles
        f = tile % tiles // column_tiles * BM + tl.arange(0, BM)
        d = tile % column_tiles * BN + tl.arange(0, BN)
        start = tl.load(offsets_ptr + expert)
        rows = tl.load(offsets_ptr + expert + 1) - start
        sums = tl.zeros((BM, BN), tl.float32)
        for r0 in range(0, rows, BK):
            r = tl.arange(0, BK)
            base = (start + r0).to(tl.int64)
            dy_mask = (f[:, None] < F) & (r[None, :] < rows - r0)
            dy = tl.load(dy_ptr + base * F + r[None, :] * F + f[:, None], mask=dy_mask, other=0.0)
            x_mask = (r[:, None] < rows - r0) & (d[None, :] < D)
            x = tl.load(x_ptr + base * D + r[:, None] * D + d[None, :], mask=x_mask, other=0.0)
            if UPCAST:
                dy, x = dy.to(tl.float32), x.to(tl.float32)
            sums = tl.dot(dy, x, sums, input_precision="ieee")
        where = dw_ptr + expert.to(tl.int64) * F * D + f[:, None] * D + d[None, :]
        tl.store(where, sums.to(dw_ptr.dtype.element_ty), mask=(f[:, None] < F) & (d[None, :] < D))
        tile += tl.num_programs(0)
