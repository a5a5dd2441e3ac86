"""The loop: steps, held-out losses, checkpoints, and a stop on request (where the data path ends)."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backends.device import Backend
from moe.data.loader import HeldoutData, TrainingData, sample_index_for
from moe.diagnostics.load import drop_rate, max_vio
from moe.diagnostics.progress import Progress
from moe.diagnostics.record import EvalRecord, GuardRecord, StepRecord
from moe.diagnostics.store import MetricsStore
from moe.errors import NumericError, StopRun, note_step
from moe.model.batch import TokenBatch
from moe.model.config import MoEConfig
from moe.train.checkpoint.folder import CHECKPOINTS, step_of_path
from moe.train.checkpoint.keeper import CheckpointKeeper
from moe.train.checkpoint.load import load_checkpoint, newest_verified
from moe.train.checkpoint.manifest import TrainState
from moe.train.checkpoint.protocol import Keep
from moe.train.config import GuardPolicy, OptimConfig, TrainerConfig
from moe.train.engine import Engine
from moe.train.guard import StepGuard, Trouble
from moe.train.mesh import Mesh
from moe.train.objective import count_tokens
from moe.train.optim import learning_rate
from moe.train.resume import GUARD, refuse_to_write_over
from moe.train.step import StepResult, count_step, expert_biases, mean_of, run_step
from moe.train.stop import StopFlag
from moe.train.traffic import collect_traffic, reduce_traffic

_SHOWN = 3
"""Places that a message names."""


@dataclass(kw_only=True)
class Trainer:
    """Trains one model to trainer.max_steps, or until asked to stop.

    Only rank 0 has a store and a progress line.
    """

    run_dir: Path
    mesh: Mesh
    backend: Backend
    engine: Engine
    training_data: TrainingData
    heldout_data: HeldoutData
    trainer: TrainerConfig
    guard: StepGuard
    optim: OptimConfig
    moe: MoEConfig
    training_flops_per_token: float
    fingerprints: Mapping[str, Any]
    stop: StopFlag
    store: MetricsStore | None
    progress: Progress | None
    step: int
    """Optimizer steps done: 0, or what `resume_run` returned."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The whole resolved configuration, kept in each checkpoint."""
    heldout_losses: dict[str, float] = field(default_factory=dict)
    """Newest held-out loss per domain, nats per token."""
    keeper: CheckpointKeeper = field(init=False)
    """Writes the checkpoints, beside training."""

    def __post_init__(self) -> None:
        if self.guard.config.policy is not GuardPolicy.stop:
            # Bad logits shall reach the sums of the step, where all ranks see them and go on together.
            for layer in self.engine.module.moe_layers():
                layer.router.stops_early = False
        self.keeper = CheckpointKeeper(
            self.run_dir / CHECKPOINTS,
            engine=self.engine,
            mesh=self.mesh,
            backend=self.backend,
            keep=Keep(last=self.trainer.keep_last, every=self.trainer.keep_every),
            say=self._say,
        )

    def fit(self) -> None:
        """Train to the last step, then evaluate and save.

        Raises StopRun after a stop on request (a checkpoint is there), NumericError when the step guard ends the run
        (nothing of that step was applied), CheckpointError when the last checkpoint cannot be written; earlier
        ones that cannot are an alarm.
        """
        try:
            self._fit()
        finally:
            self.keeper.close()

    def _fit(self) -> None:
        while self.step < self.trainer.max_steps:
            try:
                if not self._train_one_step():
                    continue
                last = self.step == self.trainer.max_steps
                if last or (self.trainer.eval_every and self.step % self.trainer.eval_every == 0):
                    self.evaluate()
                if last or (self.trainer.save_every and self.step % self.trainer.save_every == 0):
                    self.save()
                if last:
                    self.keeper.finish()
                    self._say(f"saving took {self.keeper.stall_share:.2%} of the time away from training")
            except Exception as error:
                note_step(error, self.step)
                raise

    def _train_one_step(self) -> bool:
        """One step; False when the guard kept it from being applied and the run goes on all the same."""
        self.keeper.poll()
        started = time.perf_counter()
        batch = self.guard.batch_of(self.step)
        batches = self._batches(batch)
        counts, stopping = count_step(batches, mesh=self.mesh, stop_requested=self.stop.requested)
        if stopping:
            self._save_and_stop()
        self.step += 1
        lr = learning_rate(self.step, self.optim, self.trainer.max_steps)
        result = run_step(
            self.engine,
            batches,
            counts,
            mesh=self.mesh,
            moe=self.moe,
            lr=lr,
            step=self.step,
            max_steps=self.trainer.max_steps,
            guard=self.guard,
        )
        self.backend.synchronize()
        if result.trouble is not None:
            if self.guard.config.policy is GuardPolicy.stop:
                self._record(result, lr, time.perf_counter() - started)
            self._take(result.trouble, batch)
            return False
        self._record(result, lr, time.perf_counter() - started)
        return True

    def _take(self, trouble: Trouble, batch: int) -> None:
        """Do with a bad step what the policy says; the step counts as not done.

        Raises NumericError when the run shall end.
        """
        policy, limit = self.guard.config.policy, self.guard.config.max_in_row
        said = f"step {self.step}: {trouble.text} ({self._data_of(trouble, batch)}); nothing was changed"
        self.guard.bad(batch, self.step)
        if policy is GuardPolicy.stop or self.guard.in_row > limit:
            many = f" This was bad step {self.guard.in_row} in a row, guard.max_in_row is {limit}."
            raise NumericError(
                f"{said}.{'' if policy is GuardPolicy.stop else many} Start again (from the newest checkpoint, if there is "
                "one) with a lower optim.lr, a longer optim.warmup_steps, engine.dtype=fp32, or guard.policy=skip to pass "
                "over such data"
            )
        self.step -= 1
        going_on = "this data is passed over"
        if policy is GuardPolicy.roll_back:
            going_on = f"going back to step {self._roll_back()}, then this data is passed over"
        self._say(f"{said}; {going_on} ({self.guard.in_row} in a row)")
        if self.store is not None:
            self.store.write_guard(
                GuardRecord(step=self.step, kind=trouble.kind, text=said, action=policy.value, batch=batch)
            )

    def _roll_back(self) -> int:
        """Load the newest checkpoint that every rank verifies; returns its step (collective).

        Raises NumericError when there is none, CheckpointError when a newer one is there that cannot be used.
        """
        self.keeper.finish()
        folder = self.run_dir / CHECKPOINTS
        source = newest_verified(folder, engine=self.engine, mesh=self.mesh, say=self._say)
        if source is None:
            raise NumericError(
                f"{folder} has no checkpoint to go back to yet; save earlier (trainer.save_every), or choose "
                "guard.policy=skip"
            )
        refuse_to_write_over(
            folder,
            step_of_path(source) or 0,
            way_out="it cannot be used: look at it with switchyard ckpt verify, move it away, and start again",
        )
        state = load_checkpoint(
            source,
            engine=self.engine,
            mesh=self.mesh,
            backend=self.backend,
            fingerprints=self.fingerprints,
            accept_changed_data=self.trainer.accept_changed_data,
            verified=True,
            say=self._say,
        )
        self.guard.go_back(state.extra.get(GUARD, {}))
        self.step = state.step
        if self.store is not None:
            self.store.go_back(state.step)
        return state.step

    def _data_of(self, trouble: Trouble, batch: int) -> str:
        """The samples of a trouble, in words."""
        first = batch * self.trainer.batch_size
        if not trouble.micro_steps:
            return f"samples {first} to {first + self.trainer.batch_size - 1}"
        shown = []
        for rank, micro_step in trouble.micro_steps[:_SHOWN]:
            rows = self._samples(batch, micro_step, rank)
            shown.append(f"rank {rank}, micro-step {micro_step}: samples {rows.start} to {rows.stop - 1}")
        more = len(trouble.micro_steps) - _SHOWN
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")

    def evaluate(self) -> dict[str, float]:
        """Held-out loss per domain, nats per token over all ranks (collective). Leaves no trace in the training state."""
        module = self.engine.module
        module.eval()
        rows = self.trainer.batch_size // self.trainer.accumulation
        losses: dict[str, float] = {}
        with torch.no_grad():
            for domain in self.heldout_data.domains if self.trainer.eval_batches else ():
                batches = self.heldout_data.batches(domain, rows)
                record = self._evaluate_domain(
                    domain, islice(batches, self.trainer.eval_batches * self.trainer.accumulation)
                )
                losses[domain] = record.lm_loss
                if self.store is not None:
                    self.store.write_eval(record)
        module.train()
        collect_traffic(module, self.mesh)  # what evaluation moved belongs to no step
        if self.progress is not None and losses:
            shown = ", ".join(f"{domain} {loss:.3f}" for domain, loss in losses.items())
            self.progress.message(f"step {self.step}: held-out loss {shown} nats per token")
        self.heldout_losses = losses
        return losses

    def _evaluate_domain(self, domain: str, batches: Iterable[TokenBatch]) -> EvalRecord:
        sums = torch.zeros(2, device=self.mesh.device)
        counts_LE = torch.zeros(
            len(self.engine.module.moe_layers()), self.moe.num_experts, dtype=torch.int64, device=self.mesh.device
        )
        for batch in batches:
            own = self._rank_part(batch)
            output = self.engine.module(own)
            labelled = count_tokens([own], self.mesh).labelled_tokens
            sums += torch.stack([output.lm_loss_sum, sums.new_tensor(labelled)])
            if output.router is not None:
                counts_LE += output.router.tokens_per_expert_BE.sum(1)
        dist.all_reduce(sums, group=self.mesh.world_group)
        dist.all_reduce(counts_LE, group=self.mesh.world_group)
        loss_sum, tokens = sums.tolist()
        return EvalRecord(
            step=self.step,
            domain=domain,
            lm_loss=loss_sum / max(tokens, 1),
            num_tokens=int(tokens),
            tokens_per_expert_LE=counts_LE.tolist(),
        )

    def save(self) -> None:
        """Begin to write a checkpoint of this step (collective)."""
        self.keeper.save(
            TrainState(
                step=self.step,
                next_sample=self.guard.batch_of(self.step) * self.trainer.batch_size,
                fingerprints=self.fingerprints,
                settings=self.settings,
                extra={GUARD: self.guard.state()},
            )
        )

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.message(f"step {self.step}: {text}")

    def _save_and_stop(self) -> None:
        # A save of this very step that failed is tried again.
        if self.step and not self.keeper.stands(self.step):
            self.save()
            self.keeper.finish()
        reason = f"{self.stop.signal_name} came" if self.stop.signal_name else "another rank was asked to stop"
        raise StopRun(f"{reason}: stopped after step {self.step} of {self.trainer.max_steps}; start again to go on")

    def _samples(self, batch: int, micro_step: int, rank: int) -> range:
        """Numbers of the samples of a rank's micro-step."""
        return sample_index_for(
            batch,
            micro_step,
            rank // self.mesh.sequence_size,
            batch_size=self.trainer.batch_size,
            accumulation=self.trainer.accumulation,
            data_size=self.mesh.data_size,
        )

    def _batches(self, number: int) -> list[TokenBatch]:
        """This rank's micro-batches of a batch of the data."""
        batches = []
        for micro_step in range(self.trainer.accumulation):
            rows = self._samples(number, micro_step, self.mesh.rank)
            batch = self.training_data.batch(rows.start, len(rows))
            batches.append(TokenBatch(*(tensor.to(self.mesh.device) for tensor in batch)))
        return batches

    def _rank_part(self, batch: TokenBatch) -> TokenBatch:
        """This rank's equal part of the rows."""
        rows = batch.input_ids_BS.shape[0] // self.mesh.data_size
        start = self.mesh.data_rank * rows
        return TokenBatch(*(tensor[start : start + rows].to(self.mesh.device) for tensor in batch))

    def _record(self, result: StepResult, lr: float, seconds: float) -> None:
        """Hand the step to store and progress line (collective: the memory of the fullest rank)."""
        collected = collect_traffic(self.engine.module, self.mesh)
        traffic = reduce_traffic(collected.dispatch, self.mesh)
        around_attention = reduce_traffic(collected.sequence, self.mesh)
        memory = torch.tensor(self.backend.memory_bytes(), dtype=torch.int64, device=self.mesh.device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX, group=self.mesh.world_group)
        if self.store is None or self.progress is None:
            return
        counts_LE = result.sums.tokens_per_expert_LE.cpu().numpy()
        dropped_LE = result.sums.dropped_per_expert_LE.cpu().numpy()
        dropped, picks = int(dropped_LE.sum()), int(counts_LE.sum())
        biases = expert_biases(self.engine.module)
        bias_ranges = [float(bias.max() - bias.min()) for bias in biases]
        balance_losses = {scope.name: mean_of(layers) for scope, layers in result.balance_losses.items()}
        layers = [float(vio) for vio in max_vio(counts_LE)]
        tokens_per_second = result.counts.valid_tokens / seconds
        record = StepRecord(
            step=self.step,
            lm_loss=result.lm_loss,
            balance_loss=result.balance_loss,
            z_loss=result.z_loss,
            total_loss=result.total_loss,
            grad_norm=result.outcome.grad_norm,
            lr=lr,
            num_tokens=result.counts.labelled_tokens,
            num_routed_tokens=result.counts.valid_tokens,
            step_seconds=seconds,
            tokens_per_second=tokens_per_second,
            model_flops_per_second=tokens_per_second * self.training_flops_per_token,
            memory_bytes=int(memory),
            max_vio=float(np.mean(layers)) if layers else None,
            max_vio_layers=layers,
            drop_rate=dropped / picks if picks else None,
            drop_rate_layers=[float(rate) for rate in drop_rate(dropped_LE.sum(-1), counts_LE.sum(-1))],
            applied=result.outcome.applied,
            router_entropy=result.router_entropy,
            max_router_logit=float(result.sums.max_logit) if layers else None,
            expert_bias_range=max(bias_ranges, default=None),
            router_margin=result.router_margin,
            balance_loss_micro_batch=balance_losses.get("micro_batch"),
            balance_loss_sequence=balance_losses.get("sequence"),
            balance_loss_batch=balance_losses.get("batch"),
            balance_loss_global_batch=balance_losses.get("global_batch"),
            balance_loss_layers=list(result.balance_losses.values())[-1],
            z_loss_layers=result.layer_means("z"),
            router_entropy_layers=result.layer_means("entropy"),
            router_margin_layers=result.layer_means("margin"),
            max_router_logit_layers=result.sums.max_logit_L.tolist(),
            expert_bias_range_layers=bias_ranges,
            save_stall_seconds=self.keeper.take_stall(),
            dispatch_bytes_across=traffic.bytes_across if traffic else None,
            dispatch_bytes_node=traffic.bytes_node if traffic else None,
            dispatch_seconds=traffic.seconds if traffic else None,
            dispatch_exposed_seconds=traffic.exposed_seconds if traffic else None,
            sequence_bytes_across=around_attention.bytes_across if around_attention else None,
            sequence_bytes_node=around_attention.bytes_node if around_attention else None,
            sequence_seconds=around_attention.seconds if around_attention else None,
            sequence_exposed_seconds=around_attention.exposed_seconds if around_attention else None,
            tokens_per_expert_LE=counts_LE,
        )
        self.store.write_step(record)
        self.progress.update(record)
