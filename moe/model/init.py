"""Initial weights: between building on meta and the first step, the same in every layout.

Legend: e local experts.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from moe.model.config import ModelConfig
from moe.model.layer import MoELayer
from moe.model.norm import RMSNorm
from moe.model.transformer import Transformer

OUTPUT_PROJECTIONS = frozenset({"o_proj", "down_proj", "w2"})
"""What writes into the residual stream."""


def initialise(
    model: Transformer, *, seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> None:
    """Give every parameter and buffer of a model (on meta or not) its memory on `device` and its initial value.

    | tensor                                            | distribution                                   |
    |---------------------------------------------------|------------------------------------------------|
    | embedding, head, q/k/v/gate/up projections, w1, w3 | normal, mean 0, std model.init_std             |
    | router weight                                     | normal, mean 0, std model.init_std             |
    | o_proj, down_proj, w2 (they write to the stream)  | normal, std model.init_std / sqrt(2 · layers)  |
    | norm weights                                      | 1                                              |
    | expert bias                                       | 0, always fp32                                 |
    | frozen router weight (a buffer)                   | as a router weight, always fp32                |

    Each tensor is drawn in fp32 on the CPU from a generator of its own, seeded by (seed, global name), each expert of a
    stacked tensor by (seed, global name, global expert id), and cast to `dtype` afterwards. So the values do not depend
    on layout, device, dtype or the order of drawing, and experts differ pairwise.

    Source: the scale of the output projections is that of Radford et al. 2019 (GPT-2), section 2.3.
    """
    local_expert_ids = {
        f"{name}.experts": module.dispatcher.local_expert_ids
        for name, module in model.named_modules()
        if isinstance(module, MoELayer)
    }
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            path = f"{module_name}.{name}"
            if isinstance(module, RMSNorm):
                value = torch.ones(parameter.shape)
            elif module_name in local_expert_ids:
                std = standard_deviation(path, model.model_config)
                value = _draw_experts(path, parameter.shape, local_expert_ids[module_name], std=std, seed=seed)
            else:
                value = _draw(path, parameter.shape, std=standard_deviation(path, model.model_config), seed=seed)
            replacement = nn.Parameter(value.to(device, dtype), requires_grad=parameter.requires_grad)
            # Marks that a layout has put on the parameter (whose gradients are shared with whom) stay on it.
            replacement.__dict__.update(parameter.__dict__)
            setattr(module, name, replacement)
        for name, buffer in module.named_buffers(recurse=False):
            path = f"{module_name}.{name}"
            drawn = path.endswith("router.weight")
            std = standard_deviation(path, model.model_config)
            value = _draw(path, buffer.shape, std=std, seed=seed) if drawn else torch.zeros(buffer.shape)
            setattr(module, name, value.to(device, buffer.dtype))


def standard_deviation(path: str, model: ModelConfig) -> float:
    """Width of the normal distribution of the parameter at a global path such as layers.3.moe.experts.w2."""
    writes_to_stream = not OUTPUT_PROJECTIONS.isdisjoint(path.split("."))
    return model.init_std / math.sqrt(2 * model.num_layers) if writes_to_stream else model.init_std


def _draw_experts(path: str, shape: torch.Size, expert_ids: tuple[int, ...], *, std: float, seed: int) -> Tensor:
    if shape[0] != len(expert_ids):
        raise ValueError(
            f"{path} has {shape[0]} experts but its dispatcher names {len(expert_ids)} local ones ({expert_ids}); "
            f"install experts and dispatcher together"
        )
    experts = [_draw(f"{path}[{expert}]", shape[1:], std=std, seed=seed) for expert in expert_ids]
    return torch.stack(experts) if experts else torch.empty(shape)


def _draw(key: str, shape: torch.Size, *, std: float, seed: int) -> Tensor:
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
