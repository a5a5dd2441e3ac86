"""The layers that `benchmarks.moe_layer` compares, each built from the same weights and called the same way.

The peers are imported here, when they are asked for: none is a dependency of the project beyond DeepSpeed itself, and one
that is not installed says so in its row.
"""

import contextlib
import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layer_cases import ExpertWeights, LayerShape, router_weight
from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig
from moe.model.config import MoEConfig
from moe.model.experts import Experts, SwiGLU
from moe.model.layer import MoELayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a layer is built for."""

    shape: LayerShape
    weights: ExpertWeights
    device: torch.device
    dtype: torch.dtype
    num_ranks: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A contender, ready to run."""

    forward: Callable[[Tensor], Tensor]
    """[T, D] of this rank -> [T, D]."""
    parameters: list[nn.Parameter]


class Absent(Exception):
    """Why a contender cannot run in a setting; its text goes into the table."""


def ours(setting: Setting) -> Layer:
    """Router, dispatcher and experts of this project, dropless."""
    shape = setting.shape
    moe = MoEConfig(num_experts=shape.num_experts, top_k=shape.top_k, moe_intermediate_size=shape.intermediate_size)
    layer = MoELayer(shape.hidden_size, moe, layer_index=0)
    local = setting.weights.part(setting.rank, setting.num_ranks)
    layer.experts = Experts(local.w1_EFD.shape[0], shape.hidden_size, shape.intermediate_size)
    with torch.no_grad():
        layer.router.weight.copy_(router_weight(shape))
        layer.experts.w1.copy_(local.w1_EFD)
        layer.experts.w3.copy_(local.w3_EFD)
        layer.experts.w2.copy_(local.w2_EDF)
    layer.to(device=setting.device, dtype=setting.dtype)
    group = dist.group.WORLD if setting.num_ranks > 1 else None
    layer.dispatcher = build_dispatcher(DispatchConfig(), num_experts=shape.num_experts, group=group)

    def forward(x_TD: Tensor) -> Tensor:
        y_BSD, _ = layer(x_TD.unsqueeze(0), torch.ones(1, x_TD.shape[0], dtype=torch.bool, device=x_TD.device))
        return y_BSD.squeeze(0)

    return Layer(forward=forward, parameters=list(layer.parameters()))


class _SourceBlock(nn.Module):
    """A sparse block as AutoEP's conversion reads it: a gate, and experts with fused gate and up projections."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        shape, weights = setting.shape, setting.weights
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.cat((weights.w1_EFD, weights.w3_EFD), 1))
        self.experts.down_proj = nn.Parameter(weights.w2_EDF)
        with torch.no_grad():
            self.gate.weight.copy_(router_weight(shape))


def deepspeed_autoep(setting: Setting) -> Layer:
    """DeepSpeed AutoEP's layer with its defaults, built directly: its conversion fails with transformers 5.24."""
    _prepare_deepspeed(setting)
    layers = importlib.import_module("deepspeed.module_inject.auto_ep_layer")
    config = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    shape = setting.shape
    spec = config.MoELayerSpec(
        moe_module_name="mlp", model_family="qwen3_moe", router_name="gate", experts_name="experts",
        expert_storage="fused_3d", expert_w1_name="gate_up_proj", expert_w2_name="down_proj", expert_w3_name=None,
        num_experts=shape.num_experts, top_k=shape.top_k, hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size, score_func="softmax", score_apply="post", route_norm=True,
        gate_bias=False, return_router_logits=False, router_logits_capture_target="none",
        router_logits_capture_index=None, router_logits_capture_layer_name=None, has_shared_experts=False,
        shared_experts_name="",
    )  # fmt: skip
    source = _SourceBlock(setting).to(device=setting.device, dtype=setting.dtype)
    ep_config = config.AutoEPConfig(enabled=True, autoep_size=setting.num_ranks)
    layer = layers.AutoEPMoELayer(spec, source, setting.num_ranks, setting.rank, ep_config)
    layer.to(device=setting.device, dtype=setting.dtype)
    if setting.num_ranks > 1:
        layer.set_deepspeed_parallelism()
    return Layer(forward=lambda x_TD: layer(x_TD.unsqueeze(0)).squeeze(0), parameters=list(layer.parameters()))


def deepspeed_moe_dropping(setting: Setting) -> Layer:
    """DeepSpeed's older MoE with its default capacity factor of 1: does less work where experts overflow."""
    return _deepspeed_moe(setting, drop_tokens=True)


def deepspeed_moe_dropless(setting: Setting) -> Layer:
    """The same without drops: every expert is padded to the fullest."""
    return _deepspeed_moe(setting, drop_tokens=False)


def _deepspeed_moe(setting: Setting, *, drop_tokens: bool) -> Layer:
    _prepare_deepspeed(setting)
    moe_layer = importlib.import_module("deepspeed.moe.layer")
    shape = setting.shape
    layer = moe_layer.MoE(
        shape.hidden_size,
        SwiGLU(shape.hidden_size, shape.intermediate_size),
        num_experts=shape.num_experts,
        ep_size=setting.num_ranks,
        k=shape.top_k,
        drop_tokens=drop_tokens,
        # Sampling the second expert would change the routing under comparison.
        top2_2nd_expert_sampling=False,
    )
    local = setting.weights.part(setting.rank, setting.num_ranks)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(router_weight(shape))
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            expert.gate_proj.weight.copy_(local.w1_EFD[number])
            expert.up_proj.weight.copy_(local.w3_EFD[number])
            expert.down_proj.weight.copy_(local.w2_EDF[number])
    layer.to(device=setting.device, dtype=setting.dtype)
    if setting.num_ranks > 1:
        with contextlib.redirect_stdout(io.StringIO()):
            layer.set_deepspeed_parallelism()
    return Layer(forward=lambda x_TD: layer(x_TD.unsqueeze(0))[0].squeeze(0), parameters=list(layer.parameters()))


def hf_eager(setting: Setting) -> Layer:
    """Hugging Face's Qwen3-MoE block with its loop over experts."""
    return _hugging_face(setting, "eager")


def hf_grouped(setting: Setting) -> Layer:
    """The same with its backend `grouped_mm`."""
    return _hugging_face(setting, "grouped_mm")


def _hugging_face(setting: Setting, implementation: str) -> Layer:
    if setting.num_ranks > 1:
        raise Absent("no exchange of its own")
    if importlib.util.find_spec("transformers") is None:
        raise Absent("transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        configs = importlib.import_module("transformers.models.qwen3_moe.configuration_qwen3_moe")
    shape = setting.shape
    config = configs.Qwen3MoeConfig(
        hidden_size=shape.hidden_size, moe_intermediate_size=shape.intermediate_size, num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = implementation
    layer = models.Qwen3MoeSparseMoeBlock(config)
    with torch.no_grad():
        layer.gate.weight.copy_(router_weight(shape))
        layer.experts.gate_up_proj.copy_(torch.cat((setting.weights.w1_EFD, setting.weights.w3_EFD), 1))
        layer.experts.down_proj.copy_(setting.weights.w2_EDF)
    layer.to(device=setting.device, dtype=setting.dtype)
    return Layer(forward=lambda x_TD: layer(x_TD.unsqueeze(0)).squeeze(0), parameters=list(layer.parameters()))


def _prepare_deepspeed(setting: Setting) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise Absent("deepspeed is not installed")
    # Its own collectives sit on top of the process group that is already there; the shared-memory op of its CPU build
    # takes a minute to compile and serves inference alone.
    torch_backend = importlib.import_module("deepspeed.comm.torch")
    setattr(torch_backend, "build_shm_op", lambda: None)  # noqa: B010 (a name that its annotations do not show)
    comm = importlib.import_module("deepspeed.comm")
    if setting.num_ranks > 1 and not comm.is_initialized():
        comm.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)


CONTENDERS: dict[str, Callable[[Setting], Layer]] = {
    "ours": ours,
    "DS AutoEP": deepspeed_autoep,
    "DS MoE, drops": deepspeed_moe_dropping,
    "DS MoE, padded": deepspeed_moe_dropless,
    "HF eager": hf_eager,
    "HF grouped": hf_grouped,
}
"""In the order of the table. Ours first: all others are given as multiples of its time."""

EQUAL_RESULTS = ("DS AutoEP", "DS MoE, padded", "HF eager", "HF grouped")
"""Those that compute the same function, which is checked before anything is timed."""
