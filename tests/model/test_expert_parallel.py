"""What the model owes to several ranks that share its experts."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from dispatch.build import build_dispatcher
from dispatch.config import DispatchConfig
from moe.model.experts import Experts
from moe.model.generate import generate
from moe.model.init import initialise
from moe.model.transformer import Transformer
from tests.model.cases import build, tiny_model, tiny_moe
from tests.process_pool import ProcessPool

MOE = tiny_moe(num_experts=6)
PROMPT = [3, 5, 7]


def text_of_this_rank(end_id: int | None) -> list[int]:
    """Runs on every rank of a pool: 6 experts shared by the ranks, sampled text out."""
    with torch.device("meta"):
        model = Transformer(tiny_model(), MOE)
        for layer in model.moe_layers():
            layer.dispatcher = build_dispatcher(DispatchConfig(), num_experts=6, group=dist.group.WORLD)
            layer.experts = Experts(len(layer.dispatcher.local_expert_ids), 12, MOE.moe_intermediate_size)
    initialise(model, seed=0, device="cpu")
    return generate(model, PROMPT, 10, temperature=0.8, seed=4, end_id=end_id)


def test_all_ranks_sample_the_text_of_one_process(process_pool: Callable[[int], ProcessPool]) -> None:
    """With and without an end token, on two ranks: the collectives stay in step and the text is the same."""
    model = build(moe=MOE)
    text = generate(model, PROMPT, 10, temperature=0.8, seed=4, end_id=None)
    for end_id in (None, text[5]):
        expected = generate(model, PROMPT, 10, temperature=0.8, seed=4, end_id=end_id)
        assert process_pool(2).run(text_of_this_rank, end_id) == [expected, expected]
