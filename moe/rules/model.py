"""Rules on the shape of the model."""

from collections.abc import Iterator

from moe.model.config import BalanceScope
from moe.rules.ranges import value_at
from moe.rules.words import divisors, multiples_near
from moe.schema import Problem, RunConfig


def shape(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None:
        if model.hidden_size % model.num_heads:
            yield Problem(
                path="model.hidden_size",
                value=model.hidden_size,
                rule=f"must be divisible by model.num_heads ({model.num_heads}) unless model.head_dim is given",
                way_out=f"choose {multiples_near(model.hidden_size, model.num_heads)}, or set model.head_dim",
                involves=("model.num_heads", "model.head_dim"),
            )
        elif (width := model.hidden_size // model.num_heads) % 2:
            yield Problem(
                path="model.hidden_size",
                value=model.hidden_size,
                rule=(
                    f"must give an even head, for rotary positions turn pairs: "
                    f"divided by model.num_heads ({model.num_heads}) it gives {width}"
                ),
                way_out=f"choose {multiples_near(model.hidden_size, 2 * model.num_heads)}, or set model.head_dim",
                involves=("model.num_heads", "model.head_dim"),
            )
    if model.num_heads % model.num_kv_heads:
        yield Problem(
            path="model.num_kv_heads",
            value=model.num_kv_heads,
            rule=f"must divide model.num_heads ({model.num_heads})",
            way_out=f"choose one of {divisors(model.num_heads)}",
            involves=("model.num_heads",),
        )
    if model.num_dense_layers > model.num_layers:
        yield Problem(
            path="model.num_dense_layers",
            value=model.num_dense_layers,
            rule=f"must be at most model.num_layers ({model.num_layers})",
            way_out=f"choose {model.num_layers} or less, or more layers",
            involves=("model.num_layers",),
        )


def no_sparse_layers(config: RunConfig) -> Iterator[Problem]:
    """A setting of the sparse layers has no effect in a dense model: refused, so that nobody waits for its effect."""
    model = config.model
    if model.num_dense_layers != model.num_layers:
        return
    for path, neutral in (
        ("moe.load_balancing_coef", 0),
        ("moe.router_z_coef", 0),
        ("moe.expert_bias_rate", 0),
        *((f"moe.balance.{scope.name}", 0) for scope in BalanceScope),
        ("parallel.expert", 1),
    ):
        value = value_at(config, path)
        if value != neutral:
            yield Problem(
                path=path,
                value=value,
                rule=(
                    f"has no effect: all {model.num_layers} layers are dense "
                    f"(model.num_dense_layers={model.num_dense_layers})"
                ),
                way_out=f"set {path}={neutral}, or fewer dense layers",
                involves=("model.num_dense_layers", "model.num_layers"),
            )
