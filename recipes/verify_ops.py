"""Is every op right on this machine? `switchyard verify ops`.

Runs every implementation that can run here against float64 (moe/verify/ops.py) and prints a table, worst case first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.config import OP_IMPLEMENTATIONS
from moe.errors import EnvironmentProblem, ExitCode, SwitchyardError


def main(args: Sequence[str]) -> int:
    """Verify and print; returns 0 when all are right, 5 when one is not."""
    names = sorted({name for known in OP_IMPLEMENTATIONS.values() for name in known})
    parser = argparse.ArgumentParser(
        prog="switchyard verify ops",
        description="Every op, implementation and dtype that can run here against float64: outputs and gradients.",
        epilog="exit codes: 0 right, 5 an implementation is further from the truth than it may be, 6 no such device here",
    )
    parser.add_argument("--op", action="append", default=[], choices=sorted(OP_IMPLEMENTATIONS), help="only this one")
    parser.add_argument("--implementation", action="append", default=[], choices=names, help="only this one")
    parser.add_argument("--dtype", action="append", default=[], choices=["fp32", "bf16", "fp16"], help="only this one")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "npu"], help="default: auto")
    parser.add_argument(
        "--card", type=Path, metavar="FILE", help="also write the table here, and all cases to FILE.json"
    )
    arguments = parser.parse_args(args)
    try:
        return _verify(arguments)
    except SwitchyardError as error:
        print(f"switchyard: {error}", file=sys.stderr)
        return int(error.exit_code)


def _verify(arguments: argparse.Namespace) -> int:
    import logging

    from backends.resolve import resolve_backend
    from moe.verify.ops import table, to_json, verify_ops

    # An implementation that is asked for by name falls back nowhere; of the reference inside others it says nothing new.
    logging.getLogger("backends.ops.table").setLevel(logging.ERROR)
    backend = resolve_backend(arguments.device, 0)
    report = verify_ops(
        backend.device,
        ops=arguments.op,
        implementations=arguments.implementation,
        dtypes=arguments.dtype,
        say=lambda text: print(f"{text} …", file=sys.stderr, flush=True),
    )
    text = table(report)
    print(text)
    if not report.findings:
        raise EnvironmentProblem(
            f"nothing of what was asked for can run on {backend.device}; see the reasons above, or choose another --device"
        )
    if arguments.card is not None:
        arguments.card.parent.mkdir(parents=True, exist_ok=True)
        arguments.card.write_text(text)
        arguments.card.with_name(arguments.card.name + ".json").write_text(to_json(report))
    return int(ExitCode.numeric_stop if report.bad else ExitCode.done)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
