"""Every op is listed, has cases to be verified on, and no folder of an op is forgotten."""

from pathlib import Path

import torch

import backends.ops
from backends.config import OP_IMPLEMENTATIONS
from backends.ops.listing import OPS, SUBJECTS


def test_every_op_folder_is_listed_with_cases() -> None:
    (root,) = map(Path, backends.ops.__path__)
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert folders == set(OPS) == set(SUBJECTS) == set(OP_IMPLEMENTATIONS)
    assert {op: sorted(table) for op, table in OPS.items()} == {op: sorted(of) for op, of in OP_IMPLEMENTATIONS.items()}


def test_cases_are_the_same_each_time_and_say_what_they_are_judged_by() -> None:
    for subject in SUBJECTS.values():
        assert len(subject.cases) >= 5
        assert subject.why_factor
        assert 1 <= subject.factor <= 8
        for make in subject.cases.values():
            first, second = (make(torch.Generator().manual_seed(0)) for _ in range(2))
            assert list(first) == list(second)
            assert all(torch.equal(first[name], second[name]) for name in first)
            for name, value in first.items():
                # In the truth's own precision, so that each dtype's rounding is part of what is compared.
                assert value.dtype is torch.float64 or not value.is_floating_point() or name in subject.kept_in_fp32
