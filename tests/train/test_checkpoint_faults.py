"""Saves that are killed, refused or run out of room; two jobs on one folder. No model, no torch."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from moe.errors import CheckpointError, EnvironmentProblem
from moe.train.checkpoint.folder import find_checkpoints, read_latest
from moe.train.checkpoint.lock import lock_folder
from moe.train.checkpoint.protocol import Keep, Written, write_checkpoint
from tests.train.generations import good_steps, snapshot, write

ROOT = Path(__file__).resolve().parents[2]


def test_killed_anywhere_old_or_new_is_whole(tmp_path: Path) -> None:
    """Faults 13 and 14: SIGKILL at 5, 50 and 95 % of every file and before and after every rename, deletions included."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.kill_points", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    files = ["dense.safetensors", "experts-0.safetensors", "rank-0.safetensors", "state.json", "manifest.json"]
    for file in files:
        assert {f"write {file} {mark}%" for mark in (5, 50, 95)} <= set(names)
    renamed = names.index("after rename")
    assert names[renamed - 1 :] == [
        "before rename", "after rename", "before latest", "after latest", "before delete step-000001",
        "after delete step-000001",
    ]  # fmt: skip
    for number, (name, good, newest, left, after) in enumerate(rows):
        old = [2] if name == "after delete step-000001" else [1, 2]
        assert good == ([*old, 3] if number >= renamed else old), name
        assert newest == ("step-000003" if number >= renamed else "step-000002"), name
        # No rubble but whole folders.
        assert left == sorted(["latest", "run.json", *(f"step-{step:06d}" for step in good)]), name
        assert after == [good[-1], 4], name


def test_an_existing_name_is_refused(tmp_path: Path) -> None:
    """Fault 15: whole, empty, or a file by that name; nothing changes."""
    write(tmp_path, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()}
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000003").write_text("")
    (tmp_path / "step-000004").symlink_to(tmp_path / "nowhere")
    for step in (1, 2, 3, 4):
        with pytest.raises(
            CheckpointError, match=rf"rank 0: .*step-00000{step} exists already and is never written over"
        ):
            write(tmp_path, step)
    assert {path: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()} == before
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 MB of tmpfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full(small_disk: Path) -> None:
    """Fault 16: refused for want of twice the room; and, when others take it meanwhile, taken back at ENOSPC."""
    root = small_disk / "checkpoints"
    write(root, 1, size=500_000)
    with pytest.raises(
        CheckpointError, match=r"\d+ bytes are free, a checkpoint takes 64\d+ and is begun with twice that"
    ):
        write(root, 2, size=8_000_000)
    with pytest.raises(CheckpointError, match=r"OSError: \[Errno 28\] No space left on device"):
        write(root, 2, size=8_000_000, free_bytes=lambda path: 1 << 40)
    assert [path.name for path in find_checkpoints(root)] == good_folders(root) == ["step-000001"]
    assert not list(root.glob("*.tmp*"))
    # Room again: the next due step succeeds.
    write(root, 3, size=500_000)
    assert good_steps(root) == [1, 3]


def test_read_only_folder(small_disk: Path) -> None:
    """Fault 17: a mount that became read-only; and writable again."""
    root = small_disk / "checkpoints"
    write(root, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with pytest.raises(CheckpointError, match=r"saving .*step-000002: rank 0: OSError: \[Errno 30\] Read-only"):
            write(root, 2)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    write(root, 2)
    assert good_steps(root) == [1, 2]


def test_vanished_folder(tmp_path: Path) -> None:
    """Fault 17: gone between saves it is made again; gone during a save, the save is refused and leaves nothing."""
    import shutil

    root = tmp_path / "checkpoints"
    write(root, 1)
    shutil.rmtree(root)
    write(root, 2)
    assert good_steps(root) == [2]

    def vanish(place: str) -> None:
        if place == "write dense.safetensors 50%":
            shutil.rmtree(root)

    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        write(root, 3, fault=vanish)
    write(root, 4)
    assert good_steps(root) == [4]


def good_folders(root: Path) -> list[str]:
    return [f"step-{step:06d}" for step in good_steps(root)]


def threads(world_size: int, call: Any) -> list[Any]:
    """call(rank, gather) in a thread a rank; results, or exceptions, by rank."""
    values: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size
    barrier = Barrier(world_size, timeout=20)

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            results[rank] = call(rank, gather)
        except Exception as error:
            results[rank] = error

    workers = [Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    return results


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_all_ranks_agree_when_one_cannot_write(code: int, tmp_path: Path) -> None:
    """Faults 16 and 17: the fault of rank 2 alone is every rank's error, with its name; nothing is left."""
    from dataclasses import replace

    def save(rank: int, gather: Any) -> Written:
        whole = snapshot(1)
        own = replace(
            whole, files={f"rank-{rank}.safetensors": whole.files["rank-0.safetensors"]} if rank else whole.files
        )

        def fault(place: str) -> None:
            if rank == 2 and place.startswith("write"):
                raise OSError(code, os.strerror(code))

        return write_checkpoint(tmp_path / "c", own, rank=rank, gather=gather, keep=Keep(), fault=fault)

    for result in threads(3, save):
        assert isinstance(result, CheckpointError)
        assert f"rank 2: OSError: [Errno {code}]" in str(result)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["run.json"]


def test_a_byte_that_the_disk_changed_is_found_before_it_is_published(tmp_path: Path) -> None:
    """Fault 18 while saving: what is read back is not what was written, so the folder never gets its name."""

    def corrupt(place: str) -> None:
        if place == "write rank-0.safetensors 95%":
            (path,) = tmp_path.glob("step-000001.tmp-*/experts-0.safetensors")
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"read back after writing: .*tensors weight/experts\.w"):
        write(tmp_path, 1, fault=corrupt)
    assert find_checkpoints(tmp_path) == []


def test_an_old_one_that_cannot_go_is_an_alarm_only(tmp_path: Path) -> None:
    def fault(place: str) -> None:
        if place.startswith("before delete"):
            raise OSError(errno.EBUSY, "busy")

    write(tmp_path, 1)
    written = write(tmp_path, 2, Keep(last=1), fault=fault)
    assert "could not be deleted ([Errno 16] busy)" in written.alarms[0]
    assert good_steps(tmp_path) == [1, 2]
    assert read_latest(tmp_path)[0] == tmp_path / "step-000002"


def test_keep_last_and_every(tmp_path: Path) -> None:
    for step in range(1, 8):
        write(tmp_path, step, Keep(last=2, every=3))
    assert good_steps(tmp_path) == [3, 6, 7]


def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    """Fault 55: the second is refused with owner, host and process; a killed owner's lock is free at once, its rubble
    swept."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from moe.train.checkpoint.lock import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    (tmp_path / "step-000001.tmp-0a0b0c0d").mkdir()
    (tmp_path / "step-000001.tmp-0a0b0c0d" / "x").write_text("")
    (tmp_path / "latest.tmp-00000000").write_text("")
    with (
        pytest.raises(EnvironmentProblem, match=rf'in use by another job \(.*"pid": {owner.pid}'),
        lock_folder(tmp_path),
    ):
        pass
    assert (tmp_path / "step-000001.tmp-0a0b0c0d" / "x").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    said: list[str] = []
    with lock_folder(tmp_path, said.append):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert said == ["removed what a killed run left unfinished: latest.tmp-00000000, step-000001.tmp-0a0b0c0d"]


def test_the_lock_is_every_ranks(tmp_path: Path) -> None:
    """Fault 55: rank 0 alone locks; all ranks are refused alike."""
    from moe.train.checkpoint.lock import hold_run_folder

    def hold(rank: int, gather: Any) -> str:
        with hold_run_folder(tmp_path, rank=rank, gather=gather):
            return "held"

    assert threads(2, hold) == ["held", "held"]
    with lock_folder(tmp_path / "checkpoints"):
        for result in threads(2, hold):
            assert isinstance(result, EnvironmentProblem)


def test_a_lost_identity_is_found_again(tmp_path: Path) -> None:
    """Fault 22: without run.json the checkpoints that are there do not become another run's."""
    from moe.train.checkpoint.folder import run_identity
    from moe.train.checkpoint.manifest import read_manifest

    write(tmp_path, 1)
    identity = run_identity(tmp_path)
    for damage in ((tmp_path / "run.json").unlink, lambda: (tmp_path / "run.json").write_text("{")):
        damage()
        assert run_identity(tmp_path) is None
        write(tmp_path, 2 + len(find_checkpoints(tmp_path)))
        assert run_identity(tmp_path) == identity
    assert {read_manifest(path).run for path in find_checkpoints(tmp_path)} == {identity}


def test_a_second_job_under_a_launcher_is_refused(tmp_path: Path) -> None:
    """Fault 55: no supervisor holds the run folder for torchrun's ranks; they ask for the lock before anything else."""
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with lock_folder(tmp_path / "run" / "checkpoints"):
        done = subprocess.run(
            [sys.executable, "-m", "recipes.pretrain", "tiny", "parallel.expert=1", f"run.dir={tmp_path / 'run'}"],
            cwd=ROOT, env=os.environ | launcher, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    assert done.returncode == 6, done.stderr
    assert 'is in use by another job ({"host": ' in done.stderr
    assert f'"pid": {os.getpid()}' in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
