"""What the tests of this folder share: router gradients of one step, on the ranks of a pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from backends import cpu
from backends.config import OpsConfig
from dispatch.config import DispatchConfig
from moe.model.batch import IGNORE_LABEL, TokenBatch
from moe.model.config import ModelConfig, MoEConfig
from moe.train.build import build_engine
from moe.train.config import DType, EngineConfig, EngineKind, OptimConfig
from moe.train.mesh import build_mesh
from moe.train.parallelize import build_model
from moe.train.step import count_step, run_step

MODEL = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_dense_layers=0, intermediate_size=24, num_heads=2, num_kv_heads=1,
    init_std=0.2,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Figures of one optimizer step, the same on all ranks."""

    router_gradients: list[Tensor]
    """Of each layer."""
    lm_loss: float
    total_loss: float
    balance_losses: dict[str, list[float]]
    biases: list[list[float]]
    tokens_per_expert: list[list[int]]


def one_step(moe: MoEConfig, batches: Sequence[TokenBatch], *, seed: int = 0) -> Step:
    """Runs on every rank with its own micro-batches, under the plain engine without expert parallelism (collective)."""
    mesh = build_mesh(expert_size=1, device=torch.device("cpu"))
    module = build_model(
        MODEL, moe, mesh=mesh, dispatch=DispatchConfig(), ops=OpsConfig(), seed=seed, dtype=torch.float32,
        checkpoint_blocks=False,
    )  # fmt: skip
    engine = build_engine(
        module, mesh=mesh, backend=cpu.make(0), optim=OptimConfig(),
        engine=EngineConfig(kind=EngineKind.torch, dtype=DType.fp32),
        accumulation=len(batches),
    )  # fmt: skip
    gradients: list[Tensor] = []

    def read() -> None:
        found = dict(engine.gradients())
        gradients.extend(found[f"layers.{layer}.moe.router.weight"].clone() for layer in range(MODEL.num_layers))

    counts, _ = count_step(batches, mesh=mesh, stop_requested=False)
    result = run_step(engine, batches, counts, mesh=mesh, moe=moe, lr=1e-3, before_update=read)
    biases = [layer.router.expert_bias for layer in module.moe_layers()]
    engine.close()
    mesh.close()
    return Step(
        router_gradients=gradients,
        lm_loss=result.lm_loss,
        total_loss=result.total_loss,
        balance_losses={scope.name: values for scope, values in result.balance_losses.items()},
        biases=[bias.tolist() for bias in biases if bias is not None],
        tokens_per_expert=result.sums.tokens_per_expert_LE.tolist(),
    )


def rows(count: int, tokens: int, *, labels: bool = True, seed: int = 0) -> TokenBatch:
    """Random rows, each one document; without labels the language loss is 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MODEL.vocab_size, (count, tokens), generator=generator)
    targets = torch.randint(0, MODEL.vocab_size, (count, tokens), generator=generator)
    if not labels:
        targets = torch.full_like(targets, IGNORE_LABEL)
    return TokenBatch(ids, targets, torch.arange(tokens).repeat(count, 1), torch.zeros_like(ids))


def cut(batch: TokenBatch, parts: int) -> list[TokenBatch]:
    """Equal runs of rows."""
    return [TokenBatch(*columns) for columns in zip(*(tensor.chunk(parts) for tensor in batch), strict=True)]


def own_rank() -> int:
    """Rank in the pool."""
    return dist.get_rank()
