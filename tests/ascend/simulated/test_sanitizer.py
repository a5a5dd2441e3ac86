"""torch_npu's own stream sanitizer over the simulated device.

It holds what every operator reads and writes against the order that events and waits give to streams, and the use of a tensor
beside its own stream against what the allocator was told before the memory is free again: what lazy collectives cannot see.
To it a collective is an operator on the stream that launched it, so that a missing `wait()` is theirs to find.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ascend.simulated.test_dispatch import VARIANTS, layers
from tests.process_pool import ProcessPool

FOUND = ("possible data race", "missing record_stream")
"""In what it says."""


def sanitizer() -> Any:
    """That of this process: it watches from the moment in which torch_npu is loaded."""
    from torch_npu.npu._sanitizer import npu_sanitizer

    assert npu_sanitizer.enabled
    return npu_sanitizer.event_handler


def read_beside_the_stream(waits: bool) -> str:
    """Write on one stream, read on another; what the sanitizer says."""
    x, side = torch.ones(1024, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    if waits:
        torch.npu.current_stream().wait_stream(side)
    try:
        y + 1
    except torch.cuda._sanitizer.CUDASanitizerErrors as found:
        return str(found.errors[0])
    finally:
        torch.npu.synchronize()
    return ""


def test_a_missing_wait_between_streams_is_found(watched_pool: ProcessPool) -> None:
    assert watched_pool.run(read_beside_the_stream, True) == ["", ""]
    for said in watched_pool.run(read_beside_the_stream, False):
        assert FOUND[0] in said
        assert "aten::mul" in said
        assert "aten::add" in said
        assert said.count("in read_beside_the_stream") == 3  # both accesses, and where the memory comes from


def drop_beside_the_stream(recorded: bool) -> int:
    """Drop a tensor that another stream may still read, told to the allocator or not; how often the sanitizer minds."""
    before = len(sanitizer().record_stream_errors)
    x, side = torch.ones(1024, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x * 2
    if recorded:
        x.record_stream(side)
    del x
    torch.npu.synchronize()
    return len(sanitizer().record_stream_errors) - before


def test_memory_that_is_given_back_too_early_is_found(watched_pool: ProcessPool) -> None:
    assert watched_pool.run(drop_beside_the_stream, True) == [0, 0]
    assert watched_pool.run(drop_beside_the_stream, False) == [1, 1]


WATCHED = ("random", "first_rank_without_tokens")


def watched_layers() -> tuple[int, list[str]]:
    """Run the dispatch suite; operators seen, and what the sanitizer minds. A race would have raised."""
    watching = sanitizer()
    operators, before = watching.seq_num, len(watching.record_stream_errors)
    layers(list(VARIANTS.values()), WATCHED)
    watching.flush_record_stream_warnings()
    return watching.seq_num - operators, [str(error) for error in watching.record_stream_errors[before:]]


def test_nothing_is_found_in_the_dispatch_suite(watched_pool: ProcessPool) -> None:
    for operators, found in watched_pool.run(watched_layers, timeout=200):
        assert operators > 1000
        assert found == []


def test_nothing_is_found_in_training(tmp_path: Path) -> None:
    """Two steps of stage 2, which has hooks in backward and buckets of its own."""
    command = [sys.executable, "-m", "moe.cli", "run", "tiny", "backend=npu", "trainer.max_steps=2"]
    settings = ["engine.zero_stage=2", "dispatch.mode=all_to_all", "dispatch.chunks=2", "trainer.sample_tokens=0"]
    done = subprocess.run(
        [*command, *settings, f"run.dir={tmp_path / 'run'}"],
        env={**os.environ, "SIM_HCCL_FOLDER": str(tmp_path), "TORCH_NPU_SANITIZER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr + "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert done.returncode == 0, said
    assert not [line for line in said.splitlines() if any(word in line for word in FOUND)], said
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
