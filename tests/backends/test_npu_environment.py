"""Variables of an Ascend run: set where nothing is said, shown by doctor, described for users."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends import npu_environment
from backends.npu_environment import DEFAULTS, concerns, report, set_defaults
from moe.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_user_has_set_stays() -> None:
    environ = {"TASK_QUEUE_ENABLE": "0", "HOME": "/home"}
    set_defaults(environ)
    assert environ["TASK_QUEUE_ENABLE"] == "0"
    assert environ["HCCL_BUFFSIZE"] == "200"
    assert environ.keys() == {"HOME", *(default.name for default in DEFAULTS)}


def test_two_names_of_the_allocators_settings_are_never_both_set() -> None:
    """torch_npu stops the process when they are."""
    environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    set_defaults(environ)
    assert "PYTORCH_NPU_ALLOC_CONF" not in environ
    (row,) = [row for row in report(environ | {}) if row["name"] == "PYTORCH_NPU_ALLOC_CONF"]
    assert (row["value"], row["source"]) == ("unset", "PYTORCH_ALLOC_CONF=max_split_size_mb:64")


@pytest.mark.parametrize("installed", [True, False])
def test_only_runs_that_may_use_npus_are_concerned(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_environment.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert concerns("npu")
    assert concerns("auto") is installed
    assert not concerns("cpu")
    assert not concerns("cuda")


SAY_ENVIRONMENT = """
import os, sys
from moe.start import launch_or_join
def worker(config, job, run_dir):
    assert "torch" not in sys.modules, "too late for variables that are read on loading"
    print("TASK_QUEUE_ENABLE", os.environ.get("TASK_QUEUE_ENABLE"))
    return 0
sys.exit(launch_or_join(sys.argv[1:], worker))
"""


@pytest.mark.parametrize(("device", "expected"), [("npu", "2"), ("cpu", "None")])
def test_a_rank_has_them_before_torch_is_loaded(device: str, expected: str, tmp_path: Path) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environ = {name: value for name, value in os.environ.items() if name != "TASK_QUEUE_ENABLE"}
    arguments = ["tiny", f"backend={device}", f"run.dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-c", SAY_ENVIRONMENT, *arguments],
        env=environ | rank, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"TASK_QUEUE_ENABLE {expected}" in done.stdout, done.stdout + done.stderr


def test_doctor_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ascend_environment"]
    assert [row["name"] for row in shown] == [default.name for default in DEFAULTS]


@pytest.mark.parametrize("page", ["ascend.md", "ascend.zh.md"])
def test_each_is_described_with_its_value(page: str) -> None:
    text = (ROOT / "docs" / "backends" / page).read_text()
    for default in DEFAULTS:
        assert f"| `{default.name}` | `{default.value}` |" in text, default.name
