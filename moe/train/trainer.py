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
from moe.diagnostics.record import EvalRecord, StepRecord
from moe.diagnostics.store import MetricsStore
from moe.errors import NumericError, StopRun, note_step
from moe.model.batch import TokenBatch
from moe.model.config import MoEConfig
from moe.train.checkpoint.folder import CHECKPOINTS
from moe.train.checkpoint.keeper import CheckpointKeeper
from moe.train.checkpoint.manifest import TrainState
from moe.train.checkpoint.protocol import Keep
from moe.train.config import OptimConfig, TrainerConfig
from moe.train.engine import Engine
from moe.train.mesh import Mesh
from moe.train.objective import count_tokens
from moe.train.optim import learning_rate
from moe.train.step import StepResult, count_step, expert_biases, mean_of, run_step
from moe.train.stop import StopFlag
from moe.train.traffic import collect_traffic, reduce_traffic


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

        Raises StopRun after a stop on request (a checkpoint is there), NumericError when loss or gradients are not
        finite (nothing of that step was applied), CheckpointError when the last checkpoint cannot be written; earlier
        ones that cannot are an alarm.
        """
        try:
            self._fit()
        finally:
            self.keeper.close()

    def _fit(self) -> None:
        while self.step < self.trainer.max_steps:
            try:
                self._train_one_step()
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

    def _train_one_step(self) -> None:
        self.keeper.poll()
        started = time.perf_counter()
        batches = self._batches(self.step)
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
        )
        self.backend.synchronize()
        self._record(result, lr, time.perf_counter() - started)
        if not result.outcome.applied:
            raise NumericError(
                f"step {self.step}: the gradient norm is {result.outcome.grad_norm} (language loss {result.lm_loss}); "
                "no weight was changed. Start again (from the newest checkpoint, if there is one) with a lower optim.lr, "
                "a longer optim.warmup_steps, or engine.dtype=fp32"
            )

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
        collect_traffic(module)  # what evaluation moved belongs to no step
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
            sums += torch.stack([output.lm_loss_sum, sums.new_tensor(count_tokens([own]).labelled_tokens)])
            if output.router is not None:
                counts_LE += output.router.tokens_per_expert_BE.sum(1)
        dist.all_reduce(sums, group=self.mesh.data_group)
        dist.all_reduce(counts_LE, group=self.mesh.data_group)
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
                next_sample=self.step * self.trainer.batch_size,
                fingerprints=self.fingerprints,
                settings=self.settings,
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

    def _batches(self, step: int) -> list[TokenBatch]:
        """This rank's micro-batches of a step."""
        batches = []
        for micro_step in range(self.trainer.accumulation):
            rows = sample_index_for(
                step,
                micro_step,
                self.mesh.rank,
                batch_size=self.trainer.batch_size,
                accumulation=self.trainer.accumulation,
                world_size=self.mesh.data_size,
            )
            batch = self.training_data.batch(rows.start, len(rows))
            batches.append(TokenBatch(*(tensor.to(self.mesh.device) for tensor in batch)))
        return batches

    def _rank_part(self, batch: TokenBatch) -> TokenBatch:
        """This rank's equal part of the rows."""
        rows = batch.input_ids_BS.shape[0] // self.mesh.data_size
        start = self.mesh.rank * rows
        return TokenBatch(*(tensor[start : start + rows].to(self.mesh.device) for tensor in batch))

    def _record(self, result: StepResult, lr: float, seconds: float) -> None:
        """Hand the step to store and progress line (collective: the memory of the fullest rank)."""
        traffic = reduce_traffic(collect_traffic(self.engine.module), self.mesh)
        memory = torch.tensor(self.backend.memory_bytes(), dtype=torch.int64, device=self.mesh.device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX, group=self.mesh.data_group)
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
            tokens_per_expert_LE=counts_LE,
        )
        self.store.write_step(record)
        self.progress.update(record)
