"""The verbs of the command line; thin. What a verb needs is imported when it is called, so that each starts fast."""

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moe.errors import ExitCode, SwitchyardError
from moe.inventory import TOPICS

VERIFY = {
    "layout": "a recipe's layout against one process: verify layout RECIPE [key=value ...]",
    "ops": "every op that can run here against float64: verify ops",
}
"""Subjects of `switchyard verify`; each has a parser of its own, in recipes/verify_<subject>.py."""


def main(argv: Sequence[str] | None = None) -> int:
    """`switchyard ARGS`; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["run"]:
            # It has its own parser, shared with `python -m recipes.pretrain`.
            return _run(args[1:])
        if args[:1] == ["verify"] and args[1:2] and args[1] in VERIFY:
            return _verify(args[1], args[2:])
        arguments = _parser().parse_args(args)
        code = int(arguments.verb(arguments))
        # Here and not at Python's shutdown, where a full disk would be a traceback.
        sys.stdout.flush()
        return code
    except SwitchyardError as error:
        print(f"switchyard: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; keep Python's shutdown from complaining about it.
        sys.stdout = None
        return int(ExitCode.done)
    except OSError as error:
        sys.stdout = None
        print(f"switchyard: {error}; look at where the output goes, and at free space", file=sys.stderr)
        return int(ExitCode.environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="switchyard", description="Trains Mixture-of-Experts language models.")
    version = importlib.metadata.version("switchyard-moe")
    parser.add_argument("--version", action="version", version=f"switchyard {version}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    verbs.add_parser("run", help="train: run RECIPE [key=value ...]; see run --help", add_help=False)
    verify = verbs.add_parser("verify", help="prove something: verify layout | ops; see verify SUBJECT --help")
    subjects = verify.add_subparsers(metavar="SUBJECT", required=True)
    for subject, meaning in VERIFY.items():
        subjects.add_parser(subject, help=meaning, add_help=False)
    listing = verbs.add_parser("ls", help="list what there is to choose from")
    listing.add_argument("topic", nargs="?", choices=list(TOPICS), help="one topic; all when left out")
    listing.set_defaults(verb=_ls)
    doctor = verbs.add_parser("doctor", help="devices, backends, versions: what can run here, and why not")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(verb=_doctor)
    report = verbs.add_parser("report", help="what happened in a run")
    report.add_argument("run", metavar="RUN", type=Path, help="its folder")
    report.add_argument("--json", action="store_true", help="for programs")
    report.set_defaults(verb=_report)
    ckpt = verbs.add_parser("ckpt", help="list, verify and compare checkpoints", add_help=False)
    ckpt.add_argument("rest", nargs=argparse.REMAINDER)
    ckpt.set_defaults(verb=_ckpt)
    return parser


def _run(args: Sequence[str]) -> int:
    from recipes import pretrain

    return pretrain.main(list(args))


def _verify(subject: str, args: Sequence[str]) -> int:
    command = importlib.import_module(f"recipes.verify_{subject}")
    return int(command.main(list(args)))


def _ls(arguments: argparse.Namespace) -> int:
    for topic in [arguments.topic] if arguments.topic else TOPICS:
        rows = TOPICS[topic]()
        if not arguments.topic:
            print(f"{topic}:")
        width = max((len(name) for name, _ in rows), default=0)
        for name, description in rows:
            print(f"{'' if arguments.topic else '  '}{name:<{width}}  {description}".rstrip())
    return int(ExitCode.done)


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from moe.doctor import examine, render

    facts = examine()
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        render(facts, Console())
    return int(ExitCode.done)


def _ckpt(arguments: argparse.Namespace) -> int:
    from moe.ckpt import add_verbs

    parser = argparse.ArgumentParser(prog="switchyard ckpt", description="Looks at checkpoints; loads no model.")
    add_verbs(parser)
    chosen = parser.parse_args(arguments.rest)
    return int(chosen.verb(chosen))


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from moe.diagnostics.report import build_report, render_report

    report = build_report(arguments.run)
    if arguments.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        render_report(report, Console())
    return int(ExitCode.done)


if __name__ == "__main__":
    sys.exit(main())
