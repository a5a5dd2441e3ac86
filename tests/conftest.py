"""Fixtures that every folder shares."""

from collections.abc import Callable, Iterator

import pytest

from tests.process_pool import ProcessPool


@pytest.fixture(scope="session")
def process_pool() -> Iterator[Callable[[int], ProcessPool]]:
    """pool = process_pool(2) -> ranks that live for the whole session; pool.run(function, *args) -> results by rank."""
    pools: dict[int, ProcessPool] = {}

    def get(world_size: int) -> ProcessPool:
        if world_size not in pools:
            pools[world_size] = ProcessPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
