"""Fixtures of the tests of ops."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _nan_in_fresh_memory() -> Iterator[None]:
    """torch fills what it allocates with NaN, and the allocator's free blocks hold NaN too."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    for _ in range(3):
        blocks = [torch.full((size,), float("nan")) for size in (64, 256, 1024, 4096, 16384, 1 << 20) for _ in range(8)]
        del blocks
    yield
    torch.use_deterministic_algorithms(before)
