"""Does a recipe's layout change its mathematics? `switchyard verify layout RECIPE [overrides]`.

Runs the recipe, shrunk, on the layout it asks for and on one process with the plain engine, from the same weights and
batches, compares every quantity, and prints a card.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe.config import ConfigError, load_config, to_yaml, validate
from moe.errors import ExitCode, SwitchyardError
from moe.launch import JobEnvironment, run_local
from moe.schema import RunConfig
from moe.start import launch_or_join
from moe.verify.shrink import Change, refuse_layout_dependent, shrink

TRACE = "trace.safetensors"
ORACLE = "SWITCHYARD_VERIFY_ORACLE"
"""Set for the one process that plays the oracle."""


def verify_layout(config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> int:
    """One rank of either side; rank 0 writes the trace into its run folder."""
    from backends.resolve import resolve_backend
    from moe.train.mesh import process_group
    from moe.verify.layout import one_process, record_trace
    from moe.verify.trace_file import save_trace

    backend = resolve_backend(config.backend.device.value, job.local_rank)
    with process_group(collective=backend.collective, rank=job.rank, world_size=job.world_size):
        trace = record_trace(one_process(config) if os.environ.get(ORACLE) else config, backend=backend)
    if run_dir is not None and job.rank == 0:
        save_trace(trace, run_dir / TRACE)
    return int(ExitCode.done)


def main(args: Sequence[str]) -> int:
    """Run both sides and compare; returns 0 when equal, 5 when the layout changes the mathematics."""
    if "--resolved" in args:
        return launch_or_join(args, verify_layout, module="recipes.verify_layout")
    parser = argparse.ArgumentParser(
        prog="switchyard verify layout",
        usage="switchyard verify layout RECIPE [key=value ...] [--card FILE]",
        description="Run a recipe, shrunk, on its layout and on one process, and compare loss, gradients, norm, counts, "
        "bias and weights.",
        epilog="exit codes: 0 equal, 5 the layout changes the mathematics, others as for switchyard run",
    )
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--card", type=Path, help="also write the card (Markdown) here")
    arguments = parser.parse_args(args)
    try:
        config = load_config(arguments.overrides, arguments.recipe)
        refuse_layout_dependent(config)
        small, changes = shrink(config)
        if problems := validate(small):
            raise ConfigError(problems)
        return _compare(small, changes, arguments.recipe, arguments.overrides, arguments.card)
    except SwitchyardError as error:
        print(f"switchyard: {error}", file=sys.stderr)
        return int(error.exit_code)


def _compare(
    config: RunConfig, changes: list[Change], recipe: str, overrides: Sequence[str], card_file: Path | None
) -> int:
    with tempfile.TemporaryDirectory(prefix="switchyard-verify-") as folder:
        sides = {"layout": config, "oracle": replace(config, parallel=replace(config.parallel, nproc=1))}
        for name, side in sides.items():
            print(f"{name}: {side.parallel.nproc if name == 'layout' else 1} process(es) …", flush=True)
            run_dir = Path(folder) / name
            run_dir.mkdir()
            (run_dir / "config.yaml").write_text(to_yaml(config))
            command = [sys.executable, "-m", "recipes.verify_layout", "--resolved", str(run_dir / "config.yaml")]
            environ = os.environ | ({ORACLE: "1"} if name == "oracle" else {})
            code = run_local(command, side.parallel.nproc, run_dir, environ)
            if code:
                return code
        from moe.verify.card import layout_card
        from moe.verify.layout import compare_traces
        from moe.verify.trace_file import load_trace

        reference, candidate = (load_trace(Path(folder) / name / TRACE) for name in ("oracle", "layout"))
    found = compare_traces(reference, candidate)
    card = layout_card(recipe, overrides, changes, reference, candidate, found)
    print(card)
    if card_file is not None:
        card_file.parent.mkdir(parents=True, exist_ok=True)
        card_file.write_text(card)
    return int(ExitCode.done if found.first is None else ExitCode.numeric_stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
