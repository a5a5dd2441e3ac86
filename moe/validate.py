"""The rules between settings: what types alone cannot refuse. Pure, torch-free; all problems are found at once."""

import math
from collections.abc import Callable, Iterator
from enum import Enum

from backends.config import OP_IMPLEMENTATIONS
from dispatch.config import CapacityScope, DispatchMode, DropPolicy
from dispatch.placement import place_experts
from moe.data.sources import source_problem
from moe.model.config import ROUTER_TRAITS, BalanceScope, BiasRule, MoEConfig, RouterKind
from moe.schema import Problem, RunConfig
from moe.train.config import EngineKind, GuardConfig, GuardPolicy, Offload, OffloadAdam
from moe.train.zero.ds_config import Ours, conflicts, read_ds_config
from moe.values import nearest

_MAX_SEED = 2**63 - 1


def validate(config: RunConfig) -> list[Problem]:
    """Every rule that this configuration breaks, in the order of the sections. Changes nothing."""
    problems = [problem for path, rule in _RANGES.items() if (problem := _out_of_range(config, path, *rule))]
    broken = {problem.path for problem in problems}
    # A rule between settings says nothing useful about a setting that is already out of its own range.
    for rule in _RULES:
        try:
            problems += [problem for problem in rule(config) if not broken & {problem.path, *problem.involves}]
        except ZeroDivisionError:
            # A rule divides by a setting that is 0, which its own range has refused.
            if not broken:
                raise
    return problems


def value_at(config: RunConfig, path: str) -> object:
    """The setting at a dotted path."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# One setting by itself: path -> (test, rule, way out). None passes: it means a default derived elsewhere.
_POSITIVE: tuple[Callable, str, str] = (lambda value: value >= 1, "must be at least 1", "choose 1 or more")
_NOT_NEGATIVE: tuple[Callable, str, str] = (lambda value: value >= 0, "must not be negative", "choose 0 or more")
_ABOVE_ZERO: tuple[Callable, str, str] = (lambda value: value > 0, "must be above 0", "choose a positive number")
_SHARE: tuple[Callable, str, str] = (
    lambda value: 0 <= value <= 1,
    "must lie between 0 and 1",
    "choose a share, as 0.1",
)
_DECAY: tuple[Callable, str, str] = (lambda value: 0 <= value < 1, "must be at least 0 and below 1", "choose 0.9, say")

_RANGES: dict[str, tuple[Callable, str, str]] = {
    "run.dir": (
        lambda value: value.strip() and "\0" not in value,
        "must name a folder",
        "write null for runs/<recipe>-<time>",
    ),
    "model.vocab_size": (
        lambda value: value >= 300,
        "must be at least 300: 256 bytes, the special tokens and some merges",
        "choose 4096, say",
    ),
    "model.hidden_size": _POSITIVE,
    "model.num_layers": _POSITIVE,
    "model.num_dense_layers": _NOT_NEGATIVE,
    "model.intermediate_size": _POSITIVE,
    "model.num_heads": _POSITIVE,
    "model.num_kv_heads": _POSITIVE,
    "model.head_dim": (
        lambda value: value >= 2 and value % 2 == 0,
        "must be even, for rotary positions turn pairs",
        "choose an even number, or null for hidden_size / num_heads",
    ),
    "model.rope_theta": (lambda value: value > 1, "must be above 1", "choose 10000, say"),
    "model.norm_eps": _ABOVE_ZERO,
    "model.init_std": _ABOVE_ZERO,
    "moe.num_experts": _POSITIVE,
    "moe.top_k": _POSITIVE,
    "moe.moe_intermediate_size": _POSITIVE,
    "moe.num_shared_experts": _NOT_NEGATIVE,
    "moe.routed_scale": _ABOVE_ZERO,
    "moe.load_balancing_coef": _NOT_NEGATIVE,
    "moe.router_z_coef": _NOT_NEGATIVE,
    "moe.expert_bias_rate": _NOT_NEGATIVE,
    "moe.expert_bias_clamp": _NOT_NEGATIVE,
    "moe.expert_bias_freeze_after": _SHARE,
    "moe.num_groups": _POSITIVE,
    "moe.topk_groups": _POSITIVE,
    "moe.router_logit_cap": _NOT_NEGATIVE,
    "moe.router_jitter": (lambda value: 0 <= value < 1, "must be at least 0 and below 1", "choose 0.01, say"),
    "moe.router_noise": _NOT_NEGATIVE,
    "moe.router_seed": (lambda value: 0 <= value <= _MAX_SEED, "must lie between 0 and 2^63 - 1", "choose 0, say"),
    "moe.forced_skew": _NOT_NEGATIVE,
    "moe.balance.micro_batch": _NOT_NEGATIVE,
    "moe.balance.sequence": _NOT_NEGATIVE,
    "moe.balance.batch": _NOT_NEGATIVE,
    "moe.balance.global_batch": _NOT_NEGATIVE,
    "parallel.nproc": _POSITIVE,
    "parallel.expert": _POSITIVE,
    "parallel.ranks_per_node": _POSITIVE,
    "dispatch.chunks": _POSITIVE,
    "dispatch.capacity_factor": (
        lambda value: 0 < value <= 1000,
        "must be above 0 and at most 1000",
        "choose 1.25, say, or null to serve every pick",
    ),
    "dispatch.min_capacity": _NOT_NEGATIVE,
    "dispatch.max_rows_per_rank": _POSITIVE,
    "guard.max_in_row": _POSITIVE,
    "guard.z_score": _NOT_NEGATIVE,
    "guard.window": (lambda value: value >= 20, "must be at least 20", "choose 100, the default"),
    "engine.zero_stage": (lambda value: value in (0, 1, 2, 3), "must be 0, 1, 2 or 3", "choose 1, the base"),
    "engine.ds_config": (
        lambda value: value.strip() and "\0" not in value,
        "must name a file",
        "write null for none",
    ),
    "optim.lr": _ABOVE_ZERO,
    "optim.beta1": _DECAY,
    "optim.beta2": _DECAY,
    "optim.eps": _ABOVE_ZERO,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.clip_norm": _NOT_NEGATIVE,
    "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.min_lr_ratio": _SHARE,
    "trainer.max_steps": _POSITIVE,
    "trainer.batch_size": _POSITIVE,
    "trainer.accumulation": _POSITIVE,
    "trainer.seed": (lambda value: 0 <= value <= _MAX_SEED, "must lie between 0 and 2^63 - 1", "choose 0, say"),
    "trainer.save_every": _NOT_NEGATIVE,
    "trainer.keep_last": _NOT_NEGATIVE,
    "trainer.keep_every": _NOT_NEGATIVE,
    "trainer.eval_every": _NOT_NEGATIVE,
    "trainer.eval_batches": _NOT_NEGATIVE,
    "trainer.resume": (
        lambda value: value.strip() and "\0" not in value,
        "must be auto, never or a checkpoint's path",
        "choose auto",
    ),
    "trainer.sample_tokens": _NOT_NEGATIVE,
    "data.sources": (
        lambda value: len(set(value)) == len(value) > 0 and all(value),
        "must name one or more different sources",
        "choose [stdlib, topics], say",
    ),
    "data.seq_len": (lambda value: value >= 8, "must be at least 8", "choose 256, say"),
    "data.heldout_fraction": (
        lambda value: 0 < value < 1,
        "must lie between 0 and 1, both excluded",
        "choose 0.03, say",
    ),
    "data.cache_dir": (
        lambda value: value.strip() and "\0" not in value,
        "must name a folder",
        "write null for the user's cache folder",
    ),
}


def _out_of_range(config: RunConfig, path: str, test: Callable, rule: str, way_out: str) -> Problem | None:
    value = value_at(config, path)
    if value is None or (test(value) and not (isinstance(value, float) and not math.isfinite(value))):
        return None
    return Problem(path=path, value=value, rule=rule, way_out=way_out)


def _model_shape(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None:
        if model.hidden_size % model.num_heads:
            yield Problem(
                path="model.hidden_size",
                value=model.hidden_size,
                rule=f"must be divisible by model.num_heads ({model.num_heads}) unless model.head_dim is given",
                way_out=f"choose {_multiples_near(model.hidden_size, model.num_heads)}, or set model.head_dim",
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
                way_out=f"choose {_multiples_near(model.hidden_size, 2 * model.num_heads)}, or set model.head_dim",
                involves=("model.num_heads", "model.head_dim"),
            )
    if model.num_heads % model.num_kv_heads:
        yield Problem(
            path="model.num_kv_heads",
            value=model.num_kv_heads,
            rule=f"must divide model.num_heads ({model.num_heads})",
            way_out=f"choose one of {_divisors(model.num_heads)}",
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


def _routing(config: RunConfig) -> Iterator[Problem]:
    moe = config.moe
    if moe.top_k > moe.num_experts:
        yield Problem(
            path="moe.top_k",
            value=moe.top_k,
            rule=f"must be at most moe.num_experts ({moe.num_experts})",
            way_out=f"choose {moe.num_experts} or less, or more experts",
            involves=("moe.num_experts",),
        )
    if moe.top_k == 1 and moe.normalize_topk:
        yield Problem(
            path="moe.normalize_topk",
            value="true",
            rule="must be false with moe.top_k=1: a weight that is always 1 cuts the router off from the task",
            way_out="set moe.normalize_topk=false",
            involves=("moe.top_k",),
        )
    traits = ROUTER_TRAITS[moe.router]
    if not traits.exact_top_k and moe.normalize_topk:
        yield Problem(
            path="moe.normalize_topk",
            value="true",
            rule=f"must be false with moe.router={moe.router.name}: a token that one expert takes would weigh 1, untaught",
            way_out="set moe.normalize_topk=false",
            involves=("moe.router",),
        )
    if moe.expert_bias_rate > 0 and not traits.expert_bias:
        yield Problem(
            path="moe.expert_bias_rate",
            value=moe.expert_bias_rate,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="set moe.router=sigmoid (moe=bias_balanced sets both), or moe.expert_bias_rate=0",
            involves=("moe.router",),
        )
    if moe.router is not RouterKind.skewed and moe.forced_skew != 1:
        yield Problem(
            path="moe.forced_skew",
            value=moe.forced_skew,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="set moe.router=skewed, or leave it out",
            involves=("moe.router",),
        )
    yield from _bias_schedule(config)
    yield from _groups(config)
    fresh = MoEConfig()
    draws = moe.router in (RouterKind.hash, RouterKind.random, RouterKind.balanced, RouterKind.skewed)
    if moe.router_seed != fresh.router_seed and not (draws or moe.router_jitter or moe.router_noise):
        yield Problem(
            path="moe.router_seed",
            value=moe.router_seed,
            rule=f"has no effect with moe.router={moe.router.name} and neither jitter nor noise: nothing is drawn",
            way_out="leave it out, or set moe.router_jitter or moe.router_noise",
            involves=("moe.router", "moe.router_jitter", "moe.router_noise"),
        )
    if moe.balance_scope is not fresh.balance_scope and moe.load_balancing_coef == 0:
        yield Problem(
            path="moe.balance_scope",
            value=moe.balance_scope.name,
            rule="has no effect with moe.load_balancing_coef=0",
            way_out="set moe.load_balancing_coef=0.01, say, or leave the scope out",
            involves=("moe.load_balancing_coef",),
        )


def _bias_schedule(config: RunConfig) -> Iterator[Problem]:
    """How the selection bias moves says nothing when it does not."""
    moe = config.moe
    if moe.expert_bias_rate > 0:
        if moe.expert_bias_freeze_after == 0:
            yield Problem(
                path="moe.expert_bias_rate",
                value=moe.expert_bias_rate,
                rule="has no effect with moe.expert_bias_freeze_after=0: the bias is frozen from the start",
                way_out="set moe.expert_bias_freeze_after=0.9, say, or moe.expert_bias_rate=0",
                involves=("moe.expert_bias_freeze_after",),
            )
        return
    for path, value, neutral in (
        ("moe.expert_bias_rule", moe.expert_bias_rule.name, BiasRule.sign.name),
        ("moe.expert_bias_clamp", moe.expert_bias_clamp, 0.0),
        ("moe.expert_bias_freeze_after", moe.expert_bias_freeze_after, 1.0),
    ):
        if value != neutral:
            yield Problem(
                path=path,
                value=value,
                rule="has no effect with moe.expert_bias_rate=0",
                way_out=f"set moe.expert_bias_rate=1e-3 (with a router that has a bias), or {path}={neutral}",
                involves=("moe.expert_bias_rate",),
            )


def _groups(config: RunConfig) -> Iterator[Problem]:
    """Group-limited routing."""
    moe = config.moe
    if moe.num_groups < 1 or (moe.num_groups == 1 and moe.topk_groups == 1):
        return
    if not ROUTER_TRAITS[moe.router].groups:
        yield Problem(
            path="moe.num_groups",
            value=moe.num_groups,
            rule=f"has no effect with moe.router={moe.router.name}",
            way_out="choose moe.router=softmax, sigmoid or sqrt_softplus, or moe.num_groups=1 and moe.topk_groups=1",
            involves=("moe.router", "moe.topk_groups"),
        )
    elif moe.num_experts % moe.num_groups:
        yield Problem(
            path="moe.num_groups",
            value=moe.num_groups,
            rule=f"must divide moe.num_experts ({moe.num_experts})",
            way_out=f"choose one of {_divisors(moe.num_experts)}",
            involves=("moe.num_experts",),
        )
    elif moe.topk_groups > moe.num_groups:
        yield Problem(
            path="moe.topk_groups",
            value=moe.topk_groups,
            rule=f"must be at most moe.num_groups ({moe.num_groups})",
            way_out=f"choose {moe.num_groups} or less, or more moe.num_groups",
            involves=("moe.num_groups",),
        )
    elif moe.topk_groups == moe.num_groups:
        yield Problem(
            path="moe.topk_groups",
            value=moe.topk_groups,
            rule=f"must be below moe.num_groups ({moe.num_groups}): with all groups allowed there is no limit",
            way_out=f"choose {moe.num_groups - 1} or less, or moe.num_groups=1 and moe.topk_groups=1",
            involves=("moe.num_groups",),
        )
    elif moe.top_k > (allowed := moe.topk_groups * (moe.num_experts // moe.num_groups)):
        yield Problem(
            path="moe.top_k",
            value=moe.top_k,
            rule=f"must be at most the experts of moe.topk_groups ({moe.topk_groups}) groups, {allowed}",
            way_out=f"choose {allowed} or less, or more moe.topk_groups",
            involves=("moe.topk_groups", "moe.num_groups", "moe.num_experts"),
        )


def _balance(config: RunConfig) -> Iterator[Problem]:
    """One way of asking for a load-balancing loss, and only of a router that it can balance."""
    moe = config.moe
    listed = {f"moe.balance.{scope.name}": getattr(moe.balance, scope.name) for scope in BalanceScope}
    listed = {path: value for path, value in listed.items() if value}
    if listed and moe.load_balancing_coef:
        path, value = next(iter(listed.items()))
        yield Problem(
            path=path,
            value=value,
            rule=(
                f"must not stand beside moe.load_balancing_coef ({moe.load_balancing_coef}), "
                f"which asks for moe.balance_scope={moe.balance_scope.name} already"
            ),
            way_out=(
                f"set moe.load_balancing_coef=0 and name every scope in moe.balance, or leave {path} out "
                f"and set moe.balance_scope"
            ),
            involves=("moe.load_balancing_coef",),
        )
    if not ROUTER_TRAITS[moe.router].balance_loss:
        asked = {**listed, "moe.load_balancing_coef": moe.load_balancing_coef}
        for path, value in asked.items():
            if value:
                yield Problem(
                    path=path,
                    value=value,
                    rule=f"has no effect with moe.router={moe.router.name}, whose choice follows no probabilities",
                    way_out=f"set {path}=0",
                    involves=("moe.router",),
                )


def _no_sparse_layers(config: RunConfig) -> Iterator[Problem]:
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


def _layout(config: RunConfig) -> Iterator[Problem]:
    moe, parallel, trainer = config.moe, config.parallel, config.trainer
    if parallel.nproc % parallel.expert:
        yield Problem(
            path="parallel.expert",
            value=parallel.expert,
            rule=f"must divide the number of processes, parallel.nproc ({parallel.nproc})",
            way_out=(
                f"choose one of {_divisors(parallel.nproc)}, "
                f"or parallel.nproc {_multiples_near(parallel.nproc, parallel.expert)}"
            ),
            involves=("parallel.nproc",),
        )
    if parallel.expert > moe.num_experts:
        yield Problem(
            path="parallel.expert",
            value=parallel.expert,
            rule=f"must be at most moe.num_experts ({moe.num_experts}): every rank of an expert group holds an expert",
            way_out=f"choose {moe.num_experts} or less, or more experts",
            involves=("moe.num_experts",),
        )
    parts = parallel.nproc * trainer.accumulation
    if trainer.batch_size % parts:
        yield Problem(
            path="trainer.batch_size",
            value=trainer.batch_size,
            rule=(
                f"must be divisible by parallel.nproc * trainer.accumulation "
                f"({parallel.nproc} * {trainer.accumulation} = {parts})"
            ),
            way_out=f"choose {_multiples_near(trainer.batch_size, parts)}",
            involves=("parallel.nproc", "trainer.accumulation"),
        )
    nodes = parallel.ranks_per_node
    if nodes is not None and parallel.expert % nodes and nodes % parallel.expert:
        yield Problem(
            path="parallel.ranks_per_node",
            value=nodes,
            rule=(
                f"must divide parallel.expert ({parallel.expert}) or be a multiple of it: an expert group covers whole "
                "nodes or lies inside one"
            ),
            way_out=(
                f"choose one of {_divisors(parallel.expert)}, or parallel.expert one of {_divisors(nodes)} or "
                f"{_multiples_near(parallel.expert, nodes)}"
            ),
            involves=("parallel.expert",),
        )


def _placement(config: RunConfig) -> Iterator[Problem]:
    moe, parallel, engine = config.moe, config.parallel, config.engine
    if parallel.expert > moe.num_experts:
        return
    path, value = "moe.num_experts", str(moe.num_experts)
    way_out = (
        f"choose {_multiples_near(moe.num_experts, parallel.expert)}, "
        f"or parallel.expert one of {_divisors(moe.num_experts)}"
    )
    if parallel.expert_placement is not None:
        path, value = "parallel.expert_placement", str(parallel.expert_placement)
        way_out = "name every rank equally often"
        try:
            place_experts(moe.num_experts, parallel.expert, parallel.expert_placement)
        except ValueError as error:
            rule, _, correction = str(error).removeprefix("the expert placement ").partition("; ")
            yield Problem(
                path=path, value=value, rule=rule, way_out=correction, involves=("moe.num_experts", "parallel.expert")
            )
            return
    counts = place_experts(moe.num_experts, parallel.expert, parallel.expert_placement).experts_per_rank
    if len(set(counts)) > 1 and engine.kind is EngineKind.deepspeed and engine.zero_stage == 2:
        yield Problem(
            path=path,
            value=value,
            rule=(
                f"must be divisible by parallel.expert ({parallel.expert}) with engine.zero_stage={engine.zero_stage}"
                if parallel.expert_placement is None
                else f"must give every rank equally many experts with engine.zero_stage={engine.zero_stage}"
            )
            + ": while backward runs DeepSpeed cuts the reduction of all gradients into pieces by how much a rank has, so "
            "unequal ranks wait for each other forever",
            way_out=f"{way_out}, or engine.zero_stage=1, or engine.kind=torch",
            involves=("moe.num_experts", "parallel.expert", "engine.kind", "engine.zero_stage"),
        )


def _offload(config: RunConfig) -> Iterator[Problem]:
    """Where masters and moments live, and who updates them there."""
    engine = config.engine
    if engine.offload_optimizer is Offload.none:
        if engine.offload_adam is not OffloadAdam.torch:
            yield Problem(
                path="engine.offload_adam",
                value=engine.offload_adam.name,
                rule="has no effect with engine.offload_optimizer=none",
                way_out="set engine.offload_optimizer=cpu, or leave it out",
                involves=("engine.offload_optimizer",),
            )
    elif engine.kind is not EngineKind.deepspeed or engine.zero_stage < 2:
        yield Problem(
            path="engine.offload_optimizer",
            value=engine.offload_optimizer.name,
            rule=(
                "must be none with engine.kind=torch"
                if engine.kind is not EngineKind.deepspeed
                else f"must be none with engine.zero_stage={engine.zero_stage}: stages 2 and 3 alone can offload"
            ),
            way_out="set engine.zero_stage=2 or 3 (engine.kind=deepspeed), or engine.offload_optimizer=none",
            involves=("engine.kind", "engine.zero_stage"),
        )


def _ds_config(config: RunConfig) -> Iterator[Problem]:
    """A DeepSpeed configuration file: what contradicts our settings, with both sources, and what cannot be taken over."""
    engine, moe, parallel = config.engine, config.moe, config.parallel
    if engine.ds_config is None:
        return
    if engine.kind is not EngineKind.deepspeed:
        yield Problem(
            path="engine.ds_config",
            value=engine.ds_config,
            rule=f"has no effect with engine.kind={engine.kind.name}",
            way_out="set engine.kind=deepspeed, or engine.ds_config=null",
            involves=("engine.kind",),
        )
        return
    try:
        file = read_ds_config(engine.ds_config)
    except ValueError as error:
        yield Problem(path="engine.ds_config", value=engine.ds_config, rule=str(error), way_out="name a JSON file")
        return
    equal_ranks = moe.num_experts % parallel.expert == 0
    if parallel.expert_placement is not None:
        equal_ranks = len({parallel.expert_placement.count(rank) for rank in range(parallel.expert)}) == 1
    ours = Ours(
        engine=engine,
        optim=config.optim,
        accumulation=config.trainer.accumulation,
        batch_size=config.trainer.batch_size,
        num_ranks=parallel.nproc,
        equal_ranks=equal_ranks,
    )
    for conflict in conflicts(file, ours):
        yield Problem(
            path=f"{engine.ds_config}:{conflict.key}",
            value=conflict.value,
            rule=conflict.rule,
            way_out=conflict.way_out,
            involves=(conflict.setting,) if conflict.setting else (),
        )


def _dispatch(config: RunConfig) -> Iterator[Problem]:
    dispatch, parallel = config.dispatch, config.parallel
    if dispatch.mode is DispatchMode.local and parallel.expert > 1:
        yield Problem(
            path="dispatch.mode",
            value="local",
            rule=f"must not be local with parallel.expert={parallel.expert}: rows have to reach other ranks",
            way_out="choose auto or all_to_all, or parallel.expert=1",
            involves=("parallel.expert",),
        )
    if dispatch.capacity_factor is None:
        for path, neutral in (
            ("dispatch.min_capacity", 0),
            ("dispatch.capacity_scope", CapacityScope["global"]),
            ("dispatch.pad_to_capacity", False),
        ):
            value = value_at(config, path)
            if value != neutral:
                yield Problem(
                    path=path,
                    value=_plain(value),
                    rule="has no effect without dispatch.capacity_factor",
                    way_out=f"set dispatch.capacity_factor=1.25, say, or {path}={_plain(neutral)}",
                    involves=("dispatch.capacity_factor",),
                )
        if dispatch.drop_policy is not DropPolicy.probability and dispatch.max_rows_per_rank is None:
            yield Problem(
                path="dispatch.drop_policy",
                value=dispatch.drop_policy.name,
                rule="has no effect without dispatch.capacity_factor or dispatch.max_rows_per_rank: nothing is dropped",
                way_out="set one of them, or dispatch.drop_policy=probability",
                involves=("dispatch.capacity_factor", "dispatch.max_rows_per_rank"),
            )
    elif dispatch.pad_to_capacity:
        yield from _static_shapes(config)


def _static_shapes(config: RunConfig) -> Iterator[Problem]:
    """What dispatch.pad_to_capacity cannot be combined with."""
    dispatch = config.dispatch
    flat = (DispatchMode.auto, DispatchMode.local, DispatchMode.all_to_all)
    for path, fits, reason, way_out in (
        (
            "dispatch.capacity_scope",
            dispatch.capacity_scope is CapacityScope["local"],
            "must be local with dispatch.pad_to_capacity: ranks that decide together have to exchange counts",
            "set dispatch.capacity_scope=local",
        ),
        (
            "dispatch.mode",
            dispatch.mode in flat,
            "must be auto, local or all_to_all with dispatch.pad_to_capacity: the others send what the routing asks for",
            "set dispatch.mode=auto",
        ),
        (
            "dispatch.chunks",
            dispatch.chunks == 1,
            "must be 1 with dispatch.pad_to_capacity: every chunk would be filled up to the whole capacity",
            "set dispatch.chunks=1",
        ),
        (
            "dispatch.save_memory",
            not dispatch.save_memory,
            "has no effect with dispatch.pad_to_capacity",
            "set dispatch.save_memory=false",
        ),
        (
            "dispatch.max_rows_per_rank",
            dispatch.max_rows_per_rank is None,
            "has no effect with dispatch.pad_to_capacity: a rank gets its experts' capacity, whatever the routing",
            "set dispatch.max_rows_per_rank=null",
        ),
    ):
        if not fits:
            yield Problem(
                path=path,
                value=_plain(value_at(config, path)),
                rule=reason,
                way_out=f"{way_out}, or dispatch.pad_to_capacity=false",
                involves=("dispatch.pad_to_capacity",),
            )


def _plain(value: object) -> object:
    """A setting as the command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value.name if isinstance(value, Enum) else value


def _guard(config: RunConfig) -> Iterator[Problem]:
    guard, fresh = config.guard, GuardConfig()
    if guard.policy is GuardPolicy.stop and guard.max_in_row != fresh.max_in_row:
        yield Problem(
            path="guard.max_in_row",
            value=guard.max_in_row,
            rule="has no effect with guard.policy=stop: the first bad step ends the run",
            way_out="choose guard.policy=skip or roll_back, or leave it out",
            involves=("guard.policy",),
        )
    if not guard.z_score and guard.window != fresh.window:
        yield Problem(
            path="guard.window",
            value=guard.window,
            rule="has no effect with guard.z_score=0",
            way_out="set guard.z_score=6, say, or leave it out",
            involves=("guard.z_score",),
        )
    if guard.policy is GuardPolicy.roll_back and config.trainer.save_every == 0:
        yield Problem(
            path="guard.policy",
            value="roll_back",
            rule="needs a checkpoint to go back to, and trainer.save_every is 0",
            way_out="set trainer.save_every=50, say, or choose guard.policy=skip",
            involves=("trainer.save_every",),
        )


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.eval_every > 0 and trainer.eval_batches == 0:
        yield Problem(
            path="trainer.eval_every",
            value=trainer.eval_every,
            rule="has no effect with trainer.eval_batches=0",
            way_out="set trainer.eval_every=0, or trainer.eval_batches=8",
            involves=("trainer.eval_batches",),
        )


def _sources(config: RunConfig) -> Iterator[Problem]:
    for source in config.data.sources:
        if problem := source_problem(source):
            rule, _, way_out = problem.removeprefix(f"data.sources: {source} ").partition("; ")
            yield Problem(path="data.sources", value=source, rule=rule, way_out=way_out)


def _ops(config: RunConfig) -> Iterator[Problem]:
    for op, names in OP_IMPLEMENTATIONS.items():
        name = getattr(config.backend.ops, op)
        if name not in ("auto", *names):
            near = nearest(name, ["auto", *names])
            yield Problem(
                path=f"backend.ops.{op}",
                value=name,
                rule=f"must be auto or one of {', '.join(names)}",
                way_out=f"did you mean {near}?" if near else "see switchyard ls ops",
            )
    ops = config.backend.ops
    if ops.grouped_gemm != "auto" and ops.expert_mlp not in ("auto", "grouped"):
        yield Problem(
            path="backend.ops.grouped_gemm",
            value=ops.grouped_gemm,
            rule=f"has no effect with backend.ops.expert_mlp={ops.expert_mlp}",
            way_out="choose backend.ops.expert_mlp=grouped, or backend.ops.grouped_gemm=auto",
            involves=("backend.ops.expert_mlp",),
        )


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _model_shape,
    _routing,
    _balance,
    _no_sparse_layers,
    _layout,
    _placement,
    _offload,
    _ds_config,
    _dispatch,
    _evaluation,
    _guard,
    _sources,
    _ops,
)


def _divisors(number: int) -> str:
    """The divisors of a number, as a list to choose from; the smallest ones when there are many or it is huge."""
    found = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    shown = found if len(found) <= 12 else [*found[:11], number]
    return ", ".join(map(str, shown))


def _multiples_near(number: int, of: int) -> str:
    """The positive multiples just below and above a number: "8 or 10"."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)
