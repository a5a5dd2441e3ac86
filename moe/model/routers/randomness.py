"""Random numbers that are functions: of seed, layer, optimizer step and the token, never of a generator's state.

So a recomputed forward, another layout, another micro-batching and a resumed run draw the same numbers. A token is
named by the text before it in its document: no rank needs to know where in the global batch it stands, a document is
named alike however it is packed, and no number depends on later tokens. Two documents that begin with the same words
share the numbers of those words within one optimizer step.

Legend: B rows, S tokens of a row, T tokens, N numbers per token.
"""

import torch
from torch import Tensor

from moe.model.batch import TokenBatch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The 64-bit pattern as torch's int64 holds it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix(values: Tensor) -> Tensor:
    """Scramble int64 one to one: neighbours come out unrelated. Products wrap, as 64-bit integers do on every device.

    Source: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators" (the finaliser of SplitMix64).
    """
    values = values + _signed(_GOLDEN)
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros; torch's own brings in the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def fold(*numbers: int) -> int:
    """One int64 from several integers: `mix` of each added to the `mix` of those before, in Python's integers."""
    state = 0
    for number in numbers:
        state = (state + number + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return _signed(state)


def uniform(keys_T: Tensor, count: int) -> Tensor:
    """count numbers per key, [T, N] fp32, strictly between 0 and 1, even steps of 2^-23."""
    places_N = torch.arange(count, device=keys_T.device) * _signed(_GOLDEN)
    bits_TN = _shifted(mix(keys_T[:, None] + places_N), 41)
    return (bits_TN.float() + 0.5) * 2.0**-23


def normal(keys_T: Tensor, count: int) -> Tensor:
    """count standard normal numbers per key, [T, N] fp32, by the inverse of the distribution function."""
    return torch.erfinv(2 * uniform(keys_T, count) - 1) * 2**0.5


def token_keys(batch: TokenBatch, step: int) -> Tensor:
    """The name of each token, [B, S] int64: of the optimizer step and its document's tokens up to this one.

    Sums of scrambled (token, position) pairs; integers wrap, so that the order of summation cannot matter.
    """
    own_BS = mix(batch.input_ids_BS ^ (batch.positions_BS * _signed(_FIRST)))
    sums_BS = own_BS.cumsum(1)
    number_S = torch.arange(own_BS.shape[1], device=own_BS.device)
    start_BS = (number_S - batch.positions_BS).clamp(min=0)
    before_BS = (sums_BS - own_BS).gather(1, start_BS)
    return mix((sums_BS - before_BS) ^ fold(step))
