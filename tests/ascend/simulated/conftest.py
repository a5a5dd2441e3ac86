"""These tests need the simulated NPU: `make test-ascend` gives it to them, and elsewhere they are skipped and say so."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process_pool import ProcessPool

SIMULATED = os.environ.get("SWITCHYARD_SIMULATED_NPU") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder unless tests/ascend/sim/run.py has started us."""
    for item in items:
        if not SIMULATED and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="needs the simulated NPU: make test-ascend"))


@pytest.fixture(scope="session")
def npu_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Two ranks over the simulated HCCL."""
    pool = ProcessPool(2, "npu", SIM_HCCL_FOLDER=str(tmp_path_factory.mktemp("hccl")))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def lazy_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """The same, but a collective does nothing until it is waited for, and its output holds NaN until then."""
    pool = ProcessPool(2, "npu", SIM_LAZY_COLLECTIVES="1", SIM_HCCL_FOLDER=str(tmp_path_factory.mktemp("lazy-hccl")))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def watched_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Two ranks under torch_npu's own stream sanitizer."""
    pool = ProcessPool(2, "npu", TORCH_NPU_SANITIZER="1", SIM_HCCL_FOLDER=str(tmp_path_factory.mktemp("watched-hccl")))
    yield pool
    pool.close()
