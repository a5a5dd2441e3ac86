"""Pretraining, from top to bottom. `python -m recipes.pretrain RECIPE [overrides]` is `switchyard run RECIPE [overrides]`."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from moe.launch import JobEnvironment
from moe.schema import RunConfig
from moe.start import launch_or_join
from moe.train.config import Checkpointing, EngineKind

if TYPE_CHECKING:
    from moe.data.tokenizer import Tokenizer
    from moe.diagnostics.store import LoadLayout, MetricsStore
    from moe.model.transformer import Transformer
    from moe.train.mesh import Mesh


def pretrain(config: RunConfig, job: JobEnvironment, run_dir: Path | None) -> int:
    """One rank of a run, to its last step; returns 0. run_dir: known on rank 0, which tells the others.

    Raises the errors of moe.errors; StopRun after a stop on request.
    """
    # Here and not above: a wrong recipe is refused before torch is loaded.
    from backends.resolve import resolve_backend
    from moe.data.loader import HeldoutData, TrainingData
    from moe.data.prepare import open_data, prepare_data
    from moe.diagnostics.progress import Progress
    from moe.model.flops import training_flops_per_token
    from moe.train.build import build_engine
    from moe.train.checkpoint.load import gather_over
    from moe.train.checkpoint.lock import hold_run_folder
    from moe.train.checkpoint.manifest import settings_of
    from moe.train.guard import StepGuard
    from moe.train.mesh import build_mesh, process_group
    from moe.train.parallelize import build_model, weight_dtype
    from moe.train.rendezvous import agree_on_text, once_per_machine, require_equal
    from moe.train.resume import resume_run
    from moe.train.stop import StopFlag, stop_on_signals
    from moe.train.trainer import Trainer

    with ExitStack() as stack:
        backend = resolve_backend(config.backend.device.value, job.local_rank)
        stack.enter_context(process_group(collective=backend.collective, rank=job.rank, world_size=job.world_size))
        mesh = build_mesh(
            expert_size=config.parallel.expert,
            sequence_size=config.parallel.sequence,
            device=backend.device,
            ranks_per_node=config.parallel.ranks_per_node or job.local_world_size,
        )
        first = mesh.rank == 0
        run_dir = Path(agree_on_text(str(run_dir) if first else None))
        progress = Progress(config.trainer.max_steps) if first else None
        say = quiet
        if progress is not None:
            stack.callback(progress.close)
            say = progress.message
        gather = gather_over(mesh.world_group, mesh.world_size)
        stack.enter_context(hold_run_folder(run_dir, rank=mesh.rank, gather=gather, say=say))

        data = once_per_machine(
            job.local_rank,
            lambda: prepare_data(config.data, config.model, seed=config.trainer.seed, progress=say),
            lambda: open_data(config.data, config.model, seed=config.trainer.seed),
        )
        require_equal(
            data.fingerprint,
            what="the data fingerprint",
            way_out="all machines must have the same source text: give them the same Python, or the same files",
        )
        backend.seed(config.trainer.seed)
        model = build_model(
            config.model,
            config.moe,
            mesh=mesh,
            dispatch=config.dispatch,
            ops=config.backend.ops,
            seed=config.trainer.seed,
            dtype=weight_dtype(config.engine.dtype),
            checkpoint_blocks=config.engine.activation_checkpointing is Checkpointing.full,
            placement=config.parallel.expert_placement,
            tokens_per_rank=config.trainer.batch_size
            // config.trainer.accumulation
            * config.data.seq_len
            // mesh.world_size,
        )
        say(describe_run(config, job, backend.name))
        engine = build_engine(
            model,
            mesh=mesh,
            backend=backend,
            optim=config.optim,
            engine=config.engine,
            accumulation=config.trainer.accumulation,
        )
        stack.callback(engine.close)
        guard = StepGuard(config.guard)
        step = resume_run(
            run_dir,
            engine=engine,
            mesh=mesh,
            backend=backend,
            trainer=config.trainer,
            fingerprints=data.fingerprint,
            settings=settings_of(config),
            guard=guard,
            say=say,
        )
        if step:
            say(f"going on after step {step} of {config.trainer.max_steps}")
        layout = load_layout(config, model, mesh)
        store = None
        if first:
            store = stack.enter_context(open_store(config, run_dir, step, layout, backend.name, say))

        stop = StopFlag()
        trainer = Trainer(
            run_dir=run_dir,
            mesh=mesh,
            backend=backend,
            engine=engine,
            training_data=TrainingData(data.train, config.data.seq_len, config.trainer.seed, config.model.vocab_size),
            heldout_data=HeldoutData(data.heldout, config.data.seq_len, config.model.vocab_size),
            trainer=config.trainer,
            guard=guard,
            optim=config.optim,
            moe=config.moe,
            training_flops_per_token=training_flops_per_token(config.model, config.moe, config.data.seq_len),
            fingerprints=data.fingerprint,
            stop=stop,
            store=store,
            progress=progress,
            step=step,
            settings=settings_of(config),
        )
        with stop_on_signals(stop):
            trainer.fit()
        if progress is not None:
            progress.close()  # what follows stands below the last step's line
        if config.trainer.sample_tokens:
            say(sample(config, model, data.tokenizer))
        say(f"run folder: {run_dir}\nnext: switchyard report {run_dir}")
    return 0


def quiet(text: str) -> None:
    """What ranks other than 0 say."""


def describe_run(config: RunConfig, job: JobEnvironment, backend_name: str) -> str:
    """Two lines for the user: how large the model is, and how it is laid out."""
    from moe.model.flops import active_parameters, total_parameters

    total, active = total_parameters(config.model, config.moe), active_parameters(config.model, config.moe)
    engine = config.engine
    stage = f" ZeRO-{engine.zero_stage}" if engine.kind is EngineKind.deepspeed else ""
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    sequence = f", sequence parallel {config.parallel.sequence}" if config.parallel.sequence > 1 else ""
    return (
        f"model: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active per token; "
        f"{config.moe.num_experts} experts, top {config.moe.top_k}, {config.moe.router.value} router\n"
        f"layout: {ranks} on {backend_name}, expert parallel {config.parallel.expert}{sequence}, "
        f"{engine.kind.value}{stage} {engine.dtype.value}; {config.trainer.batch_size} × {config.data.seq_len} tokens a step"
    )


def load_layout(config: RunConfig, model: "Transformer", mesh: "Mesh") -> "LoadLayout | None":
    """What the columns of the stored expert counts mean; None without MoE layers (collective)."""
    from moe.diagnostics.store import LoadLayout
    from moe.train.parallelize import rank_of_expert

    layers = model.moe_layers()
    if not layers:
        return None
    return LoadLayout(
        layer_indices=tuple(layer.layer_index for layer in layers),
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        rank_of_expert=rank_of_expert(layers[0].dispatcher, mesh),
    )


def open_store(
    config: RunConfig,
    run_dir: Path,
    step: int,
    layout: "LoadLayout | None",
    backend_name: str,
    say: Callable[[str], None],
) -> "MetricsStore":
    """Rank 0's files of the run folder; steps after `step` that a killed run left are cut off."""
    from moe.diagnostics.environment import write_environment
    from moe.diagnostics.store import MetricsStore

    run_dir.mkdir(parents=True, exist_ok=True)
    write_environment(run_dir, backend_name)
    return MetricsStore(
        run_dir,
        resume_step=step or None,
        max_steps=config.trainer.max_steps,
        load_layout=layout,
        # The saved configuration holds every override, and run.dir.
        resume_command=f"switchyard run {run_dir / 'config.yaml'}",
        say=say,
    )


def sample(config: RunConfig, model: "Transformer", tokenizer: "Tokenizer") -> str:
    """Text that the trained model writes after trainer.sample_prompt (collective)."""
    from moe.model.generate import generate

    prompt = config.trainer.sample_prompt
    model.eval()
    ids = generate(
        model,
        [tokenizer.end_id, *tokenizer.encode(prompt)],
        config.trainer.sample_tokens,
        temperature=0.7,
        seed=config.trainer.seed,
        end_id=tokenizer.end_id,
    )
    # The model may know more ids than a tokenizer learned from a short text; those mean nothing.
    written = tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
    return f"sample after {prompt!r}:\n{prompt}{written}"


def main(args: Sequence[str]) -> int:
    """`switchyard run`: start the processes of a run, or be one of them. Returns the exit code."""
    return launch_or_join(args, pretrain)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
