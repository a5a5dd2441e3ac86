"""Recording which experts every token went to, and routing by such a record: beside the token path.

Under replay the ids come from the record and everything else from the model as it is: weights, probabilities, stats.
So a policy can be trained on the routes of the engine that sampled its text, or two layouts compared expert by expert.

Legend: L MoE layers, B rows, S tokens of a row, P picks per token.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe.model.router import Router, Routing


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """While open, each forward writes its routes into the result: layer index -> [B, S, P] int64 (the newest forward's).

    A recomputed forward writes the same again.
    """
    routes: dict[int, Tensor] = {}

    def note(router: nn.Module, arguments: tuple[Any, ...], routing: Routing) -> None:
        assert isinstance(router, Router)
        routes[router.layer_index] = routing.topk_expert_ids_TK.detach().unflatten(0, arguments[1].shape)

    with ExitStack() as stack:
        for router in _routers(model):
            stack.callback(router.register_forward_hook(note).remove)
        yield routes


@contextmanager
def replaying(model: nn.Module, routes: dict[int, Tensor]) -> Iterator[None]:
    """While open, every router goes by `routes`, as `recording` gave them; padding still goes nowhere.

    Keep it open around forward and backward: a recomputed block routes again.

    Raises ValueError when a layer has no routes or routes name experts that it lacks; a batch of another shape is
    refused by its first forward.
    """
    routers = list(_routers(model))
    missing = [router.layer_index for router in routers if router.layer_index not in routes]
    if missing:
        raise ValueError(f"no recorded routes for layers {missing}; there are some for {sorted(routes)}")
    for router in routers:
        ids_BSP = routes[router.layer_index]
        if ids_BSP.numel() and not -1 <= int(ids_BSP.min()) <= int(ids_BSP.max()) < router.moe.num_experts:
            raise ValueError(
                f"recorded routes of layer {router.layer_index} name experts {int(ids_BSP.min())} to {int(ids_BSP.max())}, "
                f"the model has moe.num_experts={router.moe.num_experts}; replay on the model that was recorded"
            )
    try:
        for router in routers:
            router.replayed_ids_BSP = routes[router.layer_index].to(router.weight.device)
        yield
    finally:
        for router in routers:
            router.replayed_ids_BSP = None


def save_routes(path: Path, routes: dict[int, Tensor]) -> None:
    """Write routes as a safetensors file, one int32 tensor `layers.<index>` each."""
    tensors = {f"layers.{index}": ids_BSP.to("cpu", torch.int32).contiguous() for index, ids_BSP in routes.items()}
    save_file(tensors, path)


def load_routes(path: Path) -> dict[int, Tensor]:
    """Read what `save_routes` wrote."""
    return {int(name.removeprefix("layers.")): ids.long() for name, ids in load_file(path).items()}


def _routers(model: nn.Module) -> Iterator[Router]:
    return (module for module in model.modules() if isinstance(module, Router))
