"""What goes into metrics.jsonl, and under which name."""

import json
import math

import numpy as np

from moe.diagnostics.record import EvalRecord, json_numbers
from tests.diagnostics.runs import step_record


def test_language_loss_stands_alone_and_total_apart() -> None:
    """A47: LM loss 2.0, balance loss 1.5, coefficient 0.1: the log says 2.0, 1.5 and 2.15; held-out 2.0."""
    line = step_record(1, lm_loss=2.0, balance_loss=1.5, total_loss=2.0 + 0.1 * 1.5).to_json()
    assert (line["lm_loss"], line["balance_loss"], line["total_loss"]) == (2.0, 1.5, 2.15)
    held_out = EvalRecord(step=1, domain="code", lm_loss=2.0, num_tokens=7, tokens_per_expert_LE=[[3, 11]]).to_json()
    assert held_out == {
        "step": 1, "domain": "code", "lm_loss": 2.0, "num_tokens": 7, "tokens_per_expert_LE": [[3, 11]],
    }  # fmt: skip


def test_the_names_that_documents_rely_on_are_there() -> None:
    line = step_record(1).to_json()
    promised = {"step", "lm_loss", "grad_norm", "lr", "tokens_per_second", "balance_loss", "z_loss", "memory_bytes"}
    assert promised <= line.keys()
    assert "tokens_per_expert_LE" not in line


def test_what_is_not_finite_is_named_and_the_line_stays_strict_json() -> None:
    record = step_record(1, grad_norm=math.inf, lm_loss=math.nan, max_vio_layers=(0.5, -math.inf), z_loss=None)
    line = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert line["grad_norm"] is None
    assert line["max_vio_layers"] == [0.5, None]
    assert line["z_loss"] is None
    assert line["nonfinite"] == {"grad_norm": "inf", "lm_loss": "nan", "max_vio_layers.1": "-inf"}


def test_numpy_numbers_become_plain_ones() -> None:
    plain = json_numbers({"a": np.float32(0.5), "b": np.int64(3), "c": [np.float64(1.0)], "d": True})
    assert json.dumps(plain) == '{"a": 0.5, "b": 3, "c": [1.0], "d": true}'
