"""env.json says on what a run ran, at each of its starts."""

import json
import subprocess
from pathlib import Path

import pytest

from moe.diagnostics.environment import describe_environment, write_environment


def test_it_names_versions_devices_and_cores(tmp_path: Path) -> None:
    write_environment(tmp_path, "cuda", ["Some GPU"])
    facts = json.loads((tmp_path / "env.json").read_text())
    assert (facts["backend"], facts["devices"]) == ("cuda", ["Some GPU"])
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["versions"]["numpy"] == __import__("numpy").__version__
    assert facts["logical_cores"] >= facts["usable_cores"] >= 1
    assert facts["memory_bytes"] > 2**28
    assert "earlier" not in facts


def test_the_commit_is_that_of_this_source_tree() -> None:
    root = Path(__file__).parents[2]
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("not a git repository")
    commit = describe_environment("cpu")["commit"]
    assert commit is not None
    assert commit.rstrip("+") == head.stdout.strip()


def test_a_tree_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr("moe.diagnostics.environment.subprocess.run", missing)
    assert describe_environment("cpu")["commit"] is None


def test_each_start_is_kept(tmp_path: Path) -> None:
    for backend in ("cpu", "npu", "cuda"):
        write_environment(tmp_path, backend)
    facts = json.loads((tmp_path / "env.json").read_text())
    assert facts["backend"] == "cuda"
    assert [start["backend"] for start in facts["earlier"]] == ["cpu", "npu"]


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text("[1, 2")
    assert write_environment(tmp_path, "cpu") == json.loads((tmp_path / "env.json").read_text())
