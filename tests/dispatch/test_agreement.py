"""Ranks that do not agree, or cannot go on, all stop before rows move, with the same words; and can dispatch again."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.config import OpsConfig
from dispatch.build import build_dispatcher
from dispatch.check import DispatchError, check_pieces, checksum
from dispatch.config import DispatchConfig, DispatchMode
from dispatch.exchange import exchange_rows, open_channel
from dispatch.traffic import Traffic
from moe.errors import NumericError
from moe.model.config import MoEConfig
from moe.model.layer import MoELayer
from moe.train.mesh import build_mesh
from moe.train.parallelize import parallelize
from tests.dispatch.cases import Variant, make_inputs, run_layer, topologies
from tests.process_pool import ProcessPool

Pools = Callable[[int], ProcessPool]
MODES = ["all_to_all", "all_gather", "two_hop", "reference"]


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def message_of(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    dist.barrier()
    return str(caught.value)


def disagree_on(mode: str, what: str) -> tuple[str, str]:
    """What this rank is told when rank 1 differs at the first call, and at a later one."""
    odd = dist.get_rank() == 1
    placement = [0, 1, 1, 1] if what == "placement" and odd else [0, 0, 0, 1]
    config = DispatchConfig(mode=DispatchMode[mode], chunks=2 if what == "chunks" and odd else 1)

    def call(*, differently: bool, dispatcher: object = None) -> object:
        hidden_size = 8 if what == "hidden_size" and differently else 6
        top_k = 3 if what == "top_k" and differently else 2
        dtype = torch.bfloat16 if what == "element_type" and differently else torch.float32
        given = dispatcher or build_dispatcher(
            config,
            num_experts=4,
            group=group(),
            placement=placement,
            layer_index=5 if what == "layer" and differently else 2,
        )
        given.run(  # type: ignore[attr-defined]
            torch.ones(3, hidden_size, dtype=dtype),
            torch.arange(top_k).expand(3, top_k),
            torch.ones(3, top_k),
            lambda rows, counts, *_: rows,
        )
        return given

    first = message_of(lambda: call(differently=odd), DispatchError)
    if what in ("placement", "layer", "chunks"):
        return first, first
    dispatcher = call(differently=False)
    return first, message_of(lambda: call(differently=odd, dispatcher=dispatcher), DispatchError)


TERMS = {
    "hidden_size": "6 and 8",
    "top_k": "2 and 3",
    "element_type": "torch.float32 and torch.bfloat16",
    "placement": "",
    "layer": "2 and 5",
    "chunks": "1 and 2",
}
"""Each term, and its values on ranks 0 and 1."""


@pytest.mark.parametrize(
    ("mode", "what"),
    [(mode, what) for mode in MODES for what in TERMS if (mode, what) != ("reference", "chunks")],
)
def test_ranks_that_disagree_all_say_so(process_pool: Pools, mode: str, what: str) -> None:
    by_rank = process_pool(2).run(disagree_on, mode, what, timeout=30.0)
    for messages in by_rank:
        for message in messages:
            assert f"ranks 0 and 1 disagree before dispatch: {what} is {TERMS[what]}" in message
            assert "no row was moved" in message
    assert by_rank[0] == by_rank[1], "all ranks say the same"


def bad_id(mode: str, placement: list[int] | None) -> str:
    ids_TK = torch.tensor([[0, 9 if dist.get_rank() == 1 else 1]])
    dispatcher = build_dispatcher(
        DispatchConfig(mode=DispatchMode[mode]), num_experts=4, group=group(), placement=placement, layer_index=2
    )
    error = ValueError if dist.get_rank() == 1 else DispatchError
    return message_of(lambda: dispatcher.dispatch(torch.ones(1, 3), ids_TK), error)


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "two_hop"])
@pytest.mark.parametrize("placement", [None, [1, 0, 1, 0]])
def test_an_id_out_of_range_on_one_rank_stops_all(process_pool: Pools, mode: str, placement: list[int] | None) -> None:
    first, second = process_pool(2).run(bad_id, mode, placement, timeout=30.0)
    assert first == "rank 1 could not dispatch in layer 2; its own message says why"
    assert "expert ids from 0 to 9 were given to a dispatcher of 4 experts" in second


def sparse_layer(config: DispatchConfig, expert_size: int) -> MoELayer:
    """A MoE layer of this rank, with layer_index 3, whose router's weight is the identity."""
    mesh = build_mesh(expert_size=expert_size, device=torch.device("cpu"))
    moe = MoEConfig(num_experts=4, top_k=2, moe_intermediate_size=6)
    layer = MoELayer(4, moe, layer_index=3)
    holder = torch.nn.ModuleList([layer])
    parallelize(holder, mesh=mesh, dispatch=config, ops=OpsConfig())  # type: ignore[arg-type]
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
        for parameter in layer.experts.parameters():
            parameter.fill_(0.1)
    return layer


def not_finite(config: DispatchConfig, expert_size: int) -> str:
    layer = sparse_layer(config, expert_size)
    x_BSD = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    valid_BS = torch.ones(1, 5, dtype=torch.bool)
    layer(x_BSD, valid_BS)
    bad_BSD = x_BSD.clone()
    if dist.get_rank() == 1:
        bad_BSD[0, 2, 1] = float("nan")
    message = message_of(lambda: layer(bad_BSD, valid_BS), NumericError)
    layer(x_BSD, valid_BS)
    return message


@pytest.mark.parametrize(
    "config",
    [
        *(DispatchConfig(mode=DispatchMode[mode]) for mode in MODES),
        DispatchConfig(capacity_factor=1.0),
        DispatchConfig(max_rows_per_rank=3),
    ],
    ids=str,
)
def test_a_router_that_is_not_finite_stops_every_rank(process_pool: Pools, config: DispatchConfig) -> None:
    """Layer and rank are named everywhere, nothing hangs, and the ranks are in step afterwards."""
    for message in process_pool(2).run(not_finite, config, 2, timeout=60.0):
        assert "layers.3.moe.router" in message
        assert "rank 1" in message


def splits_differ() -> list[str]:
    channel = open_channel(group(), ranks_per_node=2, traffic=Traffic(), check=True)
    rank = dist.get_rank()
    # Rank 0 sends two rows to rank 1, which awaits one.
    send, receive = ([1, 2], [1, 0]) if rank == 0 else ([0, 0], [1, 0])
    first = message_of(lambda: exchange_rows(torch.ones(sum(send), 2), send, receive, channel), DispatchError)
    sent, received = torch.ones(2, 2), torch.ones(2, 2)
    if rank == 1:
        received[0, 1] = 7.0
    second = message_of(lambda: check_pieces(sent, [1, 1], received, [1, 1], group()), DispatchError)
    return [first, second]


def test_check_compares_splits_and_rows_on_every_rank(process_pool: Pools) -> None:
    """gloo alone would leave stale memory in the receiver, or abort it."""
    (splits, rows), *others = process_pool(2).run(splits_differ, timeout=30.0)
    assert others == [[splits, rows]]
    assert splits == "rank 0 sends 2 rows to rank 1, which awaits 1; no row was moved"
    assert "rows from rank 0 did not arrive at rank 1 as they were sent: checksums" in rows


def test_a_checksum_sees_values_and_places() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    assert checksum(rows) == checksum(rows.clone())
    for other in (rows.flip(0), rows.flip(1), rows + torch.tensor([[0.0, 0.0], [1e-6, 0.0]])):
        assert checksum(rows) != checksum(other)


def checked_run(mode: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    results = []
    with topologies([Variant(mode=mode, ranks_per_node=1)], group()) as of:
        for case in ("random", "first_rank_without_tokens", "no_tokens_anywhere"):
            inputs = make_inputs(case, dist.get_rank(), 2, 5, 2)
            results.append(
                tuple(
                    run_layer(
                        build_dispatcher(
                            DispatchConfig(mode=DispatchMode[mode], chunks=2, check=check),
                            num_experts=5,
                            group=group(),
                            topology=of[1],
                        ),
                        inputs,
                        torch.bfloat16,
                        dist.get_rank(),
                    )
                    for check in (False, True)
                )
            )
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("mode", ["all_to_all", "all_gather", "two_hop"])
def test_check_changes_no_bit(process_pool: Pools, mode: str) -> None:
    """Buffers begin as NaN, so a row that no one wrote would show."""
    for results in process_pool(2).run(checked_run, mode):
        for plain, checked in results:
            for name, expected in plain.items():
                assert torch.equal(checked[name], expected), name
