"""From the whole model on meta to this rank's part of it (on the data path, between model and engine)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from backends.config import OpsConfig
from dispatch.build import build_dispatcher, build_limiter, build_padded_dispatcher
from dispatch.choose import StepSize, resolve_auto
from dispatch.config import DispatchConfig
from dispatch.exchange import open_channel
from dispatch.interface import TokenDispatcher
from dispatch.sequence import SequenceShards
from dispatch.traffic import Traffic
from moe.model.config import ModelConfig, MoEConfig
from moe.model.experts import Experts
from moe.model.init import initialise
from moe.model.layer import MoELayer
from moe.model.norm import RMSNorm
from moe.model.transformer import Transformer
from moe.train.config import DType
from moe.train.mesh import Mesh


def parallelize(
    model: Transformer,
    *,
    mesh: Mesh,
    dispatch: DispatchConfig,
    ops: OpsConfig,
    placement: Sequence[int] | None = None,
    seed: int = 0,
) -> Transformer:
    """Keep this rank's experts and install a dispatcher in every MoE layer, in place; the model may be on meta.

    placement: rank in the expert group of each expert; None: contiguous, as even as can be. seed: of what is dropped at
    random.
    """
    if mesh.sequence_group is not None:
        traffic = Traffic()
        channel = open_channel(
            mesh.sequence_group, ranks_per_node=mesh.topology.ranks_per_node, traffic=traffic, check=dispatch.check
        )
        model.cut_rows(SequenceShards(channel=channel, rank=mesh.sequence_rank, data_rank=mesh.data_rank))
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            group, top_k = mesh.expert_group, layer.router.moe.top_k
            dispatcher = build_dispatcher(
                dispatch,
                num_experts=layer.num_experts,
                group=group,
                placement=placement,
                topology=mesh.topology,
                layer_index=layer.layer_index,
            )
            layer.limiter = build_limiter(
                dispatch,
                num_experts=layer.num_experts,
                top_k=top_k,
                data_group=mesh.world_group,
                expert_group=group,
                placement=placement,
                topology=mesh.topology,
                traffic=dispatcher.traffic,
                seed=seed,
            )
            if dispatch.pad_to_capacity:
                layer.padded_dispatcher = build_padded_dispatcher(
                    dispatch,
                    num_experts=layer.num_experts,
                    top_k=top_k,
                    group=group,
                    placement=placement,
                    topology=mesh.topology,
                    traffic=dispatcher.traffic,
                    layer_index=layer.layer_index,
                )
                # No agreement tells the others of a rank that stops; so the step's sums bring the news to all.
                layer.router.stops_early = False
            layer.router.implementation = ops.router_topk
            whole = layer.experts
            layer.dispatcher = dispatcher
            with torch.device(whole.w1.device):
                layer.experts = Experts(
                    len(dispatcher.local_expert_ids),
                    whole.w1.shape[2],
                    whole.w1.shape[1],
                    implementation=ops.expert_mlp,
                    gemm=ops.grouped_gemm,
                )
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.implementation = ops.rms_norm
    return model


def build_model(
    model: ModelConfig,
    moe: MoEConfig,
    *,
    mesh: Mesh,
    dispatch: DispatchConfig,
    ops: OpsConfig,
    seed: int,
    dtype: torch.dtype,
    checkpoint_blocks: bool,
    placement: Sequence[int] | None = None,
    tokens_per_rank: int = 0,
) -> Transformer:
    """Build on meta, keep this rank's part, materialise it on the mesh's device with layout-independent weights.

    tokens_per_rank: of a micro-step, for `dispatch.mode=auto` to try; 0: not known.
    """
    dispatch = resolve_auto(
        dispatch,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        group=mesh.expert_group,
        topology=mesh.topology,
        device=mesh.device,
        size=StepSize(tokens_per_rank, model.hidden_size, dtype),
        placement=placement,
    )
    with torch.device("meta"):
        whole = Transformer(model, moe)
    part = parallelize(whole, mesh=mesh, dispatch=dispatch, ops=ops, placement=placement, seed=seed)
    initialise(part, seed=seed, device=mesh.device, dtype=dtype)
    part.checkpoint_blocks = checkpoint_blocks
    return part


def rank_of_expert(dispatcher: TokenDispatcher, mesh: Mesh) -> tuple[int, ...]:
    """For each global expert id, its rank in the expert group (collective over that group)."""
    ids: list[tuple[int, ...]] = [()] * mesh.expert_size
    dist.all_gather_object(ids, tuple(dispatcher.local_expert_ids), group=mesh.expert_group)
    ranks = {expert: rank for rank, own in enumerate(ids) for expert in own}
    return tuple(ranks[expert] for expert in range(dispatcher.num_experts))


def weight_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of the weights that a forward pass uses."""
    return {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}[dtype]
