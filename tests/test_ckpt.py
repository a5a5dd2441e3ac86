"""`switchyard ckpt ls|verify|diff` over checkpoints without a model."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe import cli
from moe.train.checkpoint.protocol import Keep, TensorFile, alone, write_checkpoint
from tests.train.generations import raw, snapshot, write

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        write(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def ckpt(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = cli.main(["ckpt", *map(str, args)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_ls(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder or its checkpoints; damage to the list of files shows, contents are left to verify."""
    monkeypatch.setenv("COLUMNS", "200")
    root = run_dir / "checkpoints"
    (root / "step-000003.tmp-01234567").mkdir()
    (root / "step-000001" / "dense.safetensors").unlink()
    for path in (run_dir, root):
        code, text = ckpt(capsys, "ls", path)
        assert code == 0
        rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "step-" in line and "│" in line}
        assert "whole" in rows["step-000002 (latest)"]
        assert "dense.safetensors cannot be read (it is missing)" in rows["step-000001"]
        assert "was never finished" in rows["step-000003.tmp-01234567"]
    code, text = ckpt(capsys, "ls", run_dir / "nowhere")
    assert code == 4
    assert "nowhere is not a folder" in text


def test_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One, or all of a run; a damaged one gives exit code 4, file and tensor."""
    root = run_dir / "checkpoints"
    for path, count in ((run_dir, 2), (root, 2), (root / "step-000002", 1)):
        code, text = ckpt(capsys, "verify", path)
        assert code == 0
        assert text.count(": good, 4 files") == count
        assert "GB/s" in text
    path = root / "step-000001" / "experts-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    code, text = ckpt(capsys, "verify", run_dir)
    assert code == 4
    assert "step-000001: DAMAGED" in text
    assert "experts-0.safetensors was changed after it was written: tensors weight/experts.w" in text
    assert "step-000002: good" in text
    code, text = ckpt(capsys, "verify", run_dir / "config.yaml")
    assert code == 4


def test_diff(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, position, shapes and values; the same experts in other files are the same."""
    one = run_dir / "checkpoints" / "step-000001"
    code, text = ckpt(capsys, "diff", one, one)
    assert (code, text) == (0, "the same settings, position and tensors\n")

    whole = snapshot(1)
    dense = dict(whole.files["dense.safetensors"].tensors) | {"weight/b": raw([[1.0]]), "weight/new": raw([1.0])}
    dense["weight/a"] = raw([1.0] * 4095 + [1.5])
    del dense["buffer/c"]
    files = {
        "dense.safetensors": TensorFile(tensors=dense, metadata={}),
        "experts-0.safetensors": TensorFile(tensors={"weight/experts.w": raw([[2, 2]])}, metadata={}, expert_ids=(1,)),
        "experts-1.safetensors": TensorFile(tensors={"weight/experts.w": raw([[1, 1]])}, metadata={}, expert_ids=(0,)),
    }
    state = replace(whole.state, settings={"lr": 0.2})
    other = replace(whole, files=files, state=state, layout={"world_size": 2, "expert": 2})
    path = write_checkpoint(tmp_path / "other", other, rank=0, gather=alone, keep=Keep()).path
    code, text = ckpt(capsys, "diff", one, path)
    assert code == 0
    assert text.splitlines() == [
        "layout.expert: 1 in A, 2 in B",
        "layout.world_size: 1 in A, 2 in B",
        "settings.lr: 0.1 in A, 0.2 in B",
        "buffer/c: only in A, [1] F32",
        "weight/a: 1 of 4096 values differ, largest |A − B| / max|B| = 3.33e-01",
        "weight/b: [4096] F32 in A, [1, 1] F32 in B",
        "weight/new: only in B, [1] F32",
    ]


def test_looking_needs_no_torch(run_dir: Path) -> None:
    """ls, verify and diff start fast."""
    shutil.copytree(run_dir, run_dir.parent / "copy")
    root = run_dir / "checkpoints"
    code = (
        "import sys; from moe import cli\n"
        "for args in (['ls', sys.argv[1]], ['verify', sys.argv[1]], ['diff', *sys.argv[2:]]):\n"
        "    assert cli.main(['ckpt', *args]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    paths = [str(run_dir), str(root / "step-000001"), str(root / "step-000002")]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "weight/experts.w[expert 0]: 2 of 2 values differ" in done.stdout
