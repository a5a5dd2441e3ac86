"""Pretraining, from top to bottom. `python -m recipes.pretrain RECIPE [overrides]` is `switchyard run RECIPE [overrides]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from moe.config import RunConfig
from moe.launch import JobEnvironment


def pretrain(config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> None:
    """One rank of a run. run_dir: None under an external launcher, where rank 0 chooses and tells the others."""
    # Imported here: a wrong recipe is refused before torch is loaded.
    from backends.resolve import resolve_backend
    from moe.data.loader import HeldoutData, TrainingData
    from moe.diagnostics.progress import Progress
    from moe.diagnostics.store import MetricsStore, write_environment
    from moe.model.flops import training_flops_per_token
    from moe.train.build import build_engine
    from moe.train.mesh import build_mesh, process_group
    from moe.train.parallelize import build_model, weight_dtype
    from moe.train.rendezvous import agree_on_run_dir, prepare_on_first_rank
    from moe.train.stop import stop_on_signals
    from moe.train.trainer import Trainer
