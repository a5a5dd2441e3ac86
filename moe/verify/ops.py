"""Every implementation of every op against float64: the numbers behind `switchyard verify ops`.

For each op, implementation, dtype and case, outputs and the gradients of all floating operands are compared with the
op's reference in float64 on the same (rounded) operands, and so is the reference in that dtype. See
`backends.ops.subject` for the rule. What cannot run here is listed with its reason.
"""

import datetime
import json
import math
import platform
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from backends.ops.listing import OPS, SUBJECTS
from backends.ops.subject import Operands, Subject
from backends.ops.table import CannotRun, Implementation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One implementation on one case: the tensor that is furthest beyond, or nearest to, what is allowed."""

    op: str
    implementation: str
    dtype: str
    case: str
    tensor: str
    """Such as `y` or `gradient of x`."""
    error: float
    """max |found - golden| / max |golden|."""
    allowed: float
    """factor · (error of the reference, or a rounding to dtype if that is larger); 0 for what must be equal."""
    problem: str = ""
    """What was raised, or is of another kind than a number."""

    @property
    def bad(self) -> bool:
        """Beyond what is allowed (NaN is)."""
        return bool(self.problem) or not self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Error in units of what is allowed: the order of the table."""
        if self.problem or math.isnan(self.error):
            return math.inf
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """An implementation that cannot run here."""

    op: str
    implementation: str
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsReport:
    """All findings on one device."""

    device: str
    findings: list[Finding]
    not_run: list[NotRun]

    @property
    def bad(self) -> list[Finding]:
        """Those beyond what is allowed, worst first."""
        return sorted((finding for finding in self.findings if finding.bad), key=lambda f: -f.ratio)


def verify_ops(
    device: torch.device,
    *,
    ops: Sequence[str] = (),
    implementations: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> OpsReport:
    """Run everything that can run on the device; empty choices mean all. say: told of each implementation.

    Raises ValueError for a name that there is not.
    """
    known = {name for table in OPS.values() for name in table}
    for what, asked, there in (
        ("op", ops, OPS), ("implementation", implementations, known), ("dtype", dtypes, DTYPES),
    ):  # fmt: skip
        for name in asked:
            if name not in there:
                raise ValueError(f"there is no {what} {name}; choose from {', '.join(sorted(there))}")
    findings: list[Finding] = []
    not_run: list[NotRun] = []
    for op in ops or OPS:
        for implementation in OPS[op].values():
            if implementations and implementation.name not in implementations:
                continue
            for dtype in dtypes or DTYPES:
                reason = implementation.reason_against(device.type, DTYPES[dtype], None)
                if reason is not None:
                    not_run.append(NotRun(op=op, implementation=implementation.name, dtype=dtype, reason=reason))
                    continue
                say(f"{op} {implementation.name} {dtype}")
                for result in _verify(op, implementation, dtype, device):
                    if isinstance(result, NotRun):
                        not_run.append(result)
                    else:
                        findings.append(result)
    return OpsReport(device=str(device), findings=findings, not_run=not_run)


def _verify(
    op: str, implementation: Implementation[Any, Any], dtype: str, device: torch.device
) -> Iterator[Finding | NotRun]:
    subject = SUBJECTS[op]
    for case in subject.cases:
        where = {"op": op, "implementation": implementation.name, "dtype": dtype, "case": case}
        # The same operands for everybody, in every process.
        make = subject.cases[case](torch.Generator().manual_seed(zlib.crc32(case.encode())))
        rounded = _rounded(make, DTYPES[dtype], subject)
        golden = _run(subject, REFERENCE, {name: _widened(value) for name, value in rounded.items()})
        on_device = {name: value.to(device) for name, value in rounded.items()}
        expected = _run(subject, REFERENCE, on_device)
        try:
            found = _run(subject, implementation.name, on_device)
        except CannotRun as error:
            reason = str(error).partition(" cannot run here: ")[2].partition("; choose")[0]
            yield NotRun(op=op, implementation=implementation.name, dtype=dtype, reason=f"{case}: {reason}")
            continue
        except Exception as error:  # whatever it raises is the finding
            problem = f"{type(error).__name__}: {error}"
            yield Finding(**where, tensor="", error=math.inf, allowed=0.0, problem=problem)
            continue
        judged = [
            _judge(where, name, found.get(name), expected[name], golden[name], subject, DTYPES[dtype])
            for name in expected
        ]
        yield max(judged, key=lambda finding: finding.ratio)


def _judge(
    where: dict[str, str],
    name: str,
    found: Tensor | None,
    expected: Tensor,
    golden: Tensor,
    subject: Subject,
    dtype: torch.dtype,
) -> Finding:
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        shown = "nothing" if found is None else f"{list(found.shape)} {found.dtype}"
        problem = f"gives {shown}, not {list(expected.shape)} {expected.dtype}"
        return Finding(**where, tensor=name, error=math.inf, allowed=0.0, problem=problem)
    if name in subject.exact or not expected.is_floating_point():
        return Finding(**where, tensor=name, error=_error(found, expected), allowed=0.0)
    # A reference that happens to be exact, or rounds less often, does not forbid the roundings that dtype means.
    allowed = subject.factor * max(_error(expected, golden), torch.finfo(dtype).eps / 2)
    return Finding(**where, tensor=name, error=_error(found, golden), allowed=allowed)


def _error(found: Tensor, truth: Tensor) -> float:
    """max |found - truth| / max |truth|, in float64; of nothing 0; NaN where there is one."""
    if not truth.numel():
        return 0.0
    gap = float((found.cpu().double() - truth.cpu().double()).abs().max())
    scale = float(truth.cpu().double().abs().max())
    return gap / scale if scale else (math.inf if gap else gap)


def _rounded(operands: Operands, dtype: torch.dtype, subject: Subject) -> dict[str, Tensor]:
    return {
        name: value.to(torch.float32 if name in subject.kept_in_fp32 else dtype) if value.is_floating_point() else value
        for name, value in operands.items()
    }


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _run(subject: Subject, implementation: str, operands: Operands) -> dict[str, Tensor]:
    """Outputs, and the gradients of a sum over them that gives each number a weight of its own."""
    leaves = {name: value.detach().clone() for name, value in operands.items()}
    wanted = [
        name for name, value in leaves.items() if value.is_floating_point() and name not in subject.without_gradient
    ]
    for name in wanted:
        leaves[name].requires_grad_()
    outputs = dict(subject.call(leaves, implementation))
    total: Tensor | None = None
    for name, value in outputs.items():
        if value.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factor = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            # Rounded to bf16 for all, so that each dtype is given the same.
            term = (
                (value * factor.bfloat16().to(value)).double().sum()
                if value.device.type == "cpu"
                else (value.float() * factor.bfloat16().to(value.device, torch.float32)).sum()
            )
            total = term if total is None else total + term
    results = {name: value.detach() for name, value in outputs.items()}
    if total is not None and wanted:
        gradients = torch.autograd.grad(total, [leaves[name] for name in wanted], allow_unused=True)
        results |= {f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True) if g is not None}
    return results


def table(report: OpsReport) -> str:
    """Markdown: verdict, one line per op, implementation and dtype (its worst case), worst first, then what did not run."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in report.findings:
        key = (finding.op, finding.implementation, finding.dtype)
        if key not in worst or finding.ratio > worst[key].ratio:
            worst[key] = finding
    verdict = "RIGHT" if not report.bad else "WRONG"
    lines = [
        f"# {verdict}: {len(report.findings)} cases of {len(worst)} implementations and dtypes on {report.device}",
        "",
        f"`switchyard verify ops`, {datetime.date.today()}, torch {torch.__version__}, {platform.machine()}. Error: "
        "max |a - golden| / max |golden|, golden = the reference in float64. Allowed: factor × the reference's error in "
        "the same dtype, or × one rounding to it where that is larger.",
        "",
        "| op | implementation | dtype | worst case | tensor | error | allowed | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for finding in sorted(worst.values(), key=lambda f: -f.ratio):
        mark = f"**{finding.problem or 'beyond'}**" if finding.bad else f"{finding.ratio:.2f} of it"
        lines.append(
            f"| {finding.op} | {finding.implementation} | {finding.dtype} | {finding.case} | {finding.tensor} "
            f"| {finding.error:.1e} | {finding.allowed:.1e} | {mark} |"
        )
    shown = dict.fromkeys(op for op, _, _ in worst)
    lines += ["", "Factors:", "", *(f"- {op}: {SUBJECTS[op].factor:g}; {SUBJECTS[op].why_factor}" for op in shown)]
    if report.not_run:
        lines += ["", "Not run here:", ""]
        reasons: dict[tuple[str, str, str], list[str]] = {}
        for item in report.not_run:
            reasons.setdefault((item.op, item.implementation, item.reason), []).append(item.dtype)
        lines += [f"- {op} {name} ({', '.join(of)}): {reason}" for (op, name, reason), of in reasons.items()]
    return "\n".join(lines) + "\n"


def to_json(report: OpsReport) -> str:
    """All findings, for programs."""
    return json.dumps(
        {
            "device": report.device,
            "torch": torch.__version__,
            "right": not report.bad,
            "findings": [
                asdict(f) | {"bad": f.bad, "error": f.error if math.isfinite(f.error) else None}
                for f in report.findings
            ],
            "not_run": [asdict(item) for item in report.not_run],
        },
        indent=1,
        allow_nan=False,
    )
