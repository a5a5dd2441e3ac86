"""What lies on disk is believed only as far as it is proved: one mutation each, refused by name. No model, no torch."""

import os
import pickle
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from moe.errors import CheckpointError
from moe.train.checkpoint.folder import latest_checkpoint, read_latest, superseded
from moe.train.checkpoint.manifest import MANIFEST, STATE, read_manifest, verify_folder
from moe.train.checkpoint.tensor_file import (
    DamagedCheckpointError,
    file_checksum,
    read_header,
    read_tensor,
    write_tensors,
)
from tests.train.generations import edit_manifest, good_steps, raw, write

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2; not to be changed."""
    root = tmp_path_factory.mktemp("pristine") / "checkpoints"
    for step in (1, 2):
        write(root, step)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def test_the_library_reads_our_files_and_we_read_the_librarys(pristine: Path, tmp_path: Path) -> None:
    with safe_open(pristine / "step-000002" / "experts-0.safetensors", framework="np") as file:
        assert (file.get_tensor("weight/experts.w") == [[2, 2], [3, 3]]).all()
        assert file.metadata() == {"steps": "2", "expert_ids": "[0, 1]"}
    path = tmp_path / "theirs.safetensors"
    save_file({"x": np.arange(6, dtype=np.int64).reshape(2, 3), "y": np.zeros((0, 4), np.float32)}, path)
    entries = read_header(path).entries
    found = read_tensor(path, "x", entries["x"], None)
    assert found.data.view(np.int64).tolist() == list(range(6))
    assert entries["y"].shape == (0, 4)


def test_a_sum_is_that_of_the_standard(tmp_path: Path) -> None:
    """RFC 3720, appendix B.4: CRC32C of 32 zero bytes, and of 0 to 31."""
    (tmp_path / "zeros").write_bytes(bytes(32))
    (tmp_path / "rising").write_bytes(bytes(range(32)))
    assert file_checksum(tmp_path / "zeros") == 0x8A9136AA
    assert file_checksum(tmp_path / "rising") == 0x46DD794E


def flip(name: str, place: float) -> Damage:
    """XOR one bit at this share of a file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x10
        (folder / name).write_bytes(content)

    return damage


def zero_block(folder: Path) -> None:
    """4 KiB of zeros inside a tensor."""
    with (folder / "dense.safetensors").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


def truncate(name: str, keep: Callable[[int], int]) -> Damage:
    return lambda folder: os.truncate(folder / name, keep((folder / name).stat().st_size))


def lie(folder: Path) -> None:
    """A header of 2^48 bytes; size and sums of the manifest agree with it."""
    path = folder / "dense.safetensors"
    content = (1 << 48).to_bytes(8, "little") + path.read_bytes()[8:]
    path.write_bytes(content)


def copy_from(name: str, source: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder.parent / source).read_bytes()) and None


MUTATIONS: dict[str, tuple[Damage, str]] = {
    "18 flip in a tensor": (flip("dense.safetensors", 0.9), r"dense\.safetensors was changed .* tensors weight/b \("),
    "18 flip in a header": (flip("dense.safetensors", 0.002), r"dense\.safetensors: the entry of buffer/c"),
    "18 flip in the state": (flip(STATE, 0.5), r"state\.json was changed after it was written: content"),
    "18 flip in the manifest": (flip(MANIFEST, 0.6), r"manifest\.json"),
    "18 flip in an expert": (flip("experts-0.safetensors", 1.0), r"experts-0.* tensors weight/experts\.w"),
    "18 flip in a generator": (flip("rank-0.safetensors", 1.0), r"rank-0.* tensors cpu"),
    "19 zeroed block": (zero_block, r"dense\.safetensors was changed .* tensors weight/a"),
    "20 truncated by a byte": (truncate("dense.safetensors", lambda size: size - 1), r"dense.* cannot be read \(\d+ byt"),
    "20 truncated by half": (truncate("dense.safetensors", lambda size: size // 2), r"dense.* cannot be read \(\d+ byt"),
    "20 truncated to nothing": (truncate("dense.safetensors", lambda size: 0), r"dense.* cannot be read \(0 bytes"),
    "20 a byte too long": (truncate("dense.safetensors", lambda size: size + 1), r"dense.* cannot be read \(\d+ byt"),
    "21 missing shard": (lambda folder: (folder / "experts-0.safetensors").unlink(), r"experts-0.* \(it is missing\)"),
    "21 foreign shard": (copy_from("experts-1.safetensors", "step-000001/experts-0.safetensors"), r"does not belong"),
    "21 shard of another step": (copy_from("dense.safetensors", "step-000001/dense.safetensors"), r"was changed|cannot"),
    "22 manifest missing": (lambda folder: (folder / MANIFEST).unlink(), r"manifest\.json cannot be read"),
    "22 manifest truncated": (truncate(MANIFEST, lambda size: size // 2), r"manifest\.json cannot be read"),
    "22 manifest of another step": (copy_from(MANIFEST, "step-000001/manifest.json"), r"is of step 1: it belongs to"),
    "22 manifest nested": (lambda folder: (folder / MANIFEST).write_text("[" * 100_000) and None, r"cannot be read"),
    "25 lying header": (lie, r"dense\.safetensors"),
    "52 path in the manifest": (
        lambda folder: edit_manifest(folder, lambda m: replace(m, files={"../x": m.files[STATE], **m.files})),
        r"'\.\./x' is not a plain file name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_damage_is_refused_by_name(name: str, root: Path) -> None:
    """Faults 18 to 22, 25 and 52 of the matrix (each case begins with its number): the older one stays good."""
    damage, message = MUTATIONS[name]
    damage(root / "step-000002")
    with pytest.raises(DamagedCheckpointError, match=message):
        verify_folder(root / "step-000002", root=root)
    assert good_steps(root) == [1]


@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_any_single_bit_is_found(pristine: Path, place: float, bit: int) -> None:
    """Fault 18: whichever bit of whichever file."""
    folder = pristine / "step-000001"
    files = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in files)
    offset = min(int(place * total), total - 1)
    for path in files:
        if offset < path.stat().st_size:
            break
        offset -= path.stat().st_size
    content = path.read_bytes()
    changed = bytearray(content)
    changed[offset] ^= 1 << bit
    # White space around the manifest's JSON is no content: everything else is found.
    if path.name == MANIFEST and chr(content[offset]).isspace() and chr(changed[offset]).isspace():
        return
    path.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError):
            verify_folder(folder)
    finally:
        path.write_bytes(content)


def test_a_lying_header_allocates_nothing(tmp_path: Path) -> None:
    """Fault 25: 2^48 bytes of header, a tensor of 2^60 elements, overlapping and absent bytes."""
    path = tmp_path / "x.safetensors"
    lies = [
        (1 << 48).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little"),
        b"\x01",
        *(
            len(text).to_bytes(8, "little") + text + bytes(8)
            for text in (
                b'{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
                b'{"a":{"dtype":"OBJ","shape":[2],"data_offsets":[0,8]}}',
                b"[" * 50_000,
                b"[]",
            )
        ),
    ]
    tracemalloc.start()
    for content in lies:
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"x\.safetensors"):
            read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


class Payload:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_in_the_folder_is_never_opened(root: Path, tmp_path: Path) -> None:
    """Fault 24: a payload under every name that a loader might look for; refused, unopened, unexecuted."""
    folder, mark = root / "step-000002", tmp_path / "executed"
    names = [".metadata", "data.pkl", "rank-0.pt", "mp_rank_00_model_states.pt", "pytorch_model.bin"]
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    code = (
        "import sys; from pathlib import Path\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from moe.train.checkpoint.manifest import verify_folder\n"
        "try: verify_folder(Path(sys.argv[1]))\n"
        "except Exception as error: print(error)\n"
        "assert 'pickle' not in sys.modules or not any(name in path for path in opened for name in sys.argv[2:])\n"
        "assert not any(path.endswith(name) for path in opened for name in sys.argv[2:]), opened\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "data.pkl does not belong to the checkpoint (and was not opened)" in done.stdout
    assert not mark.exists()


def test_latest_is_a_name_and_nothing_else(root: Path, tmp_path: Path) -> None:
    """Fault 23: outside, to nowhere, a link, garbage: not followed, and the newest is found all the same."""
    outside = tmp_path / "outside"
    shutil.copytree(root / "step-000001", outside)
    pointer = root / "latest"
    assert read_latest(root) == (root / "step-000002", None)
    for content in ("../outside", str(outside), "step-000009", "step-000001/../../outside", "", "\0", "x" * 5000):
        pointer.write_text(content)
        path, problem = read_latest(root)
        assert path is None
        assert problem is not None
        assert "latest is not followed" in problem
    pointer.unlink()
    pointer.symlink_to(outside / STATE)
    assert read_latest(root)[0] is None
    pointer.unlink()
    assert read_latest(root) == (None, None)
    assert latest_checkpoint(root) == root / "step-000002"


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    """Fault 52: a folder or a file that is a link to elsewhere, however good it is there."""
    outside = Path(shutil.copytree(root / "step-000002", tmp_path / "outside"))
    shutil.rmtree(root / "step-000002")
    (root / "step-000002").symlink_to(outside)
    with pytest.raises(DamagedCheckpointError, match=r"leads out of .* links are not followed"):
        verify_folder(root / "step-000002", root=root)
    target = root / "step-000001" / "dense.safetensors"
    target.rename(tmp_path / "moved")
    target.symlink_to(tmp_path / "moved")
    with pytest.raises(DamagedCheckpointError, match="is not a regular file; links are not followed"):
        verify_folder(root / "step-000001", root=root)
    with pytest.raises(DamagedCheckpointError, match="links are not followed"):
        file_checksum(target)


def test_another_format_is_no_damage(root: Path) -> None:
    """Fault 22: a newer version's checkpoint is refused as that, not put aside."""
    import json

    import google_crc32c

    path = root / "step-000002" / MANIFEST
    body = json.loads(path.read_text())["manifest"] | {"format": "other"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"manifest": body, "crc32c": f"{google_crc32c.value(canonical):08x}"}))
    with pytest.raises(CheckpointError, match="format 'other', this version reads") as caught:
        read_manifest(root / "step-000002")
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [(2, 0, [1, 2, 3]), (2, 2, [1, 3]), (0, 0, []), (9, 0, []), (1, 3, [1, 2, 4])],
)
def test_old_ones_go(keep_last: int, keep_every: int, expected: list[int]) -> None:
    assert superseded([1, 2, 3, 4, 5], keep_last=keep_last, keep_every=keep_every) == expected


def test_verify_reads_a_gigabyte_a_second(tmp_path: Path) -> None:
    """Bounded loosely, for a busy machine; the figure itself stands in docs/checkpoints.md."""
    path = tmp_path / "large"
    sums = write_tensors(path, {"x": raw(np.zeros(1 << 24))}, {})
    started = time.process_time()
    assert file_checksum(path) == sums.crc32c
    assert sums.size / (time.process_time() - started) > 3e8
