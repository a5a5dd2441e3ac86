"""Rows shared by ranks: parts, places, and the exchanges around attention with their gradients."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatch.sequence import copies_of_kv_heads, part_lengths
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]


@given(num_tokens=st.integers(0, 100), num_ranks=st.integers(1, 9))
def test_parts_are_even_and_whole(num_tokens: int, num_ranks: int) -> None:
    lengths = part_lengths(num_tokens, num_ranks)
    assert sum(lengths) == num_tokens
    assert len(lengths) == num_ranks
    assert max(lengths) - min(lengths) <= 1
    assert all(first >= second for first, second in pairwise(lengths))


@given(groups=st.integers(1, 6), per_group=st.integers(1, 6), num_ranks=st.integers(1, 6))
def test_copied_heads_meet_their_query_heads(groups: int, per_group: int, num_ranks: int) -> None:
    """Whatever the numbers: a rank's i-th query head finds, among its copies, the head it belonged to."""
    num_heads = groups * per_group
    if num_heads % num_ranks:
        return
    copies = copies_of_kv_heads(num_heads, groups, num_ranks)
    kv_heads = [head for head in range(groups) for _ in range(copies)]
    assert len(kv_heads) % num_ranks == 0
    own_q, own_kv = num_heads // num_ranks, len(kv_heads) // num_ranks
    assert own_q % own_kv == 0
    for rank in range(num_ranks):
        here = kv_heads[rank * own_kv : (rank + 1) * own_kv]
        for place in range(own_q):
            assert here[place // (own_q // own_kv)] == (rank * own_q + place) // per_group
    # And no more travel than must: one copy fewer of each would not do.
    assert not any(
        (groups * fewer) % num_ranks == 0 and (num_heads // (groups * fewer)) * groups * fewer == num_heads
        for fewer in range(1, copies)
    )


def exchanges_on_rank(num_tokens: int, num_kv_heads: int) -> Any:
    """What to_heads and to_tokens give, and the gradients, against slices of the whole, made on every rank alike."""
    import torch.distributed as dist

    from dispatch.exchange import open_channel
    from dispatch.sequence import SequenceShards
    from dispatch.traffic import Traffic

    rank, n = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    channel = open_channel(dist.group.WORLD, ranks_per_node=n, traffic=Traffic(), check=True)
    shards = SequenceShards(channel=channel, rank=rank, data_rank=3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, num_tokens, heads, 3, generator=generator, dtype=torch.float64)
        for heads in (4, num_kv_heads, num_kv_heads)
    )
    own = [shards.own(x).clone().requires_grad_() for x in (q, k, v)]
    found = shards.to_heads(*own, num_tokens)
    copies = copies_of_kv_heads(4, num_kv_heads, n)
    for whole, part, times in zip((q, k, v), found, (1, copies, copies), strict=True):
        assert torch.equal(part, whole.repeat_interleave(times, 2).chunk(n, 2)[rank])
    back = shards.to_tokens(found[0])
    assert torch.equal(back, own[0])
    # Each rank asks for its own heads; the gradient of a position is that of all ranks' heads.
    factors = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (q, k, v)]
    sum(
        (part * factor.repeat_interleave(times, 2).chunk(n, 2)[rank]).sum()
        for part, factor, times in zip(found, factors, (1, copies, copies), strict=True)
    ).backward()
    for leaf, factor, times in zip(own, factors, (1, copies, copies), strict=True):
        torch.testing.assert_close(leaf.grad, shards.own(factor) * times)
    assert torch.equal(shards.gather(shards.own(q[..., 0]), num_tokens), q[..., 0])
    places = shards.places(q[..., 0, 0])
    first = 3 * 2 * num_tokens + sum(shards.lengths(num_tokens)[:rank])
    row = range(first, first + shards.lengths(num_tokens)[rank])
    assert places.tolist() == [list(row), [place + num_tokens for place in row]]
    return True


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "num_tokens"), [(2, 8), (2, 7), (4, 13), (4, 4), (4, 3)])
def test_exchanges_give_slices_of_the_whole(
    ranks: int, num_tokens: int, num_kv_heads: int, process_pool: Pools
) -> None:
    assert all(process_pool(ranks).run(exchanges_on_rank, num_tokens, num_kv_heads))
