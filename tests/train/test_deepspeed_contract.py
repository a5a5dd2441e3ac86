"""What moe/train/engine_deepspeed.py leans on in DeepSpeed beyond its documentation, name by name.

A new DeepSpeed that moves one of them fails here, with a reason, before it fails anywhere else. When a name goes because
the need for it went, remove the workaround with its test.
"""

import importlib
import importlib.metadata
import inspect

import deepspeed
import pytest
from deepspeed.module_inject import auto_ep_layer
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine as Host
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import nn

from moe.train.config import DType, EngineConfig, OptimConfig
from moe.train.zero.settings import deepspeed_settings

PINNED = "0.19.8"


def test_version_is_the_one_that_was_read() -> None:
    assert importlib.metadata.version("deepspeed") == PINNED, "read the places marked Private again, then move PINNED"
    assert deepspeed.__version__.startswith(PINNED)


@pytest.mark.parametrize(
    "table",
    ["_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
     "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS"],
)  # fmt: skip
def test_expert_groups_are_plain_tables(table: str) -> None:
    assert isinstance(getattr(groups, table), dict)


def test_world_group_is_a_cache_that_can_be_set() -> None:
    assert hasattr(groups, "_WORLD_GROUP")
    assert "_WORLD_GROUP is None" in inspect.getsource(groups._clone_world_group)


def test_marker_class_overrides_nothing_of_a_module_but_forward() -> None:
    """Our layer comes first in the method order, but what it does not define itself would come from the marker."""
    assert issubclass(auto_ep_layer.AutoEPMoELayer, nn.Module)
    overridden = {name for name in vars(auto_ep_layer.AutoEPMoELayer) if name in vars(nn.Module)}
    assert overridden - {"__module__", "__doc__", "__annotations__"} <= {"__init__", "forward"}
    assert "set_deepspeed_parallelism" in vars(auto_ep_layer.AutoEPMoELayer)


def test_layers_with_experts_are_known_by_class_alone() -> None:
    source = inspect.getsource(Host._configure_distributed_model)
    assert "isinstance(module, _AutoEPMoELayer)" in source
    assert "module.set_deepspeed_parallelism" in source


def test_shared_memory_op_can_be_left_out() -> None:
    backend = importlib.import_module("deepspeed.comm.torch")
    assert callable(backend.build_shm_op)
    assert "self.shm_comm_op = build_shm_op()" in inspect.getsource(backend.TorchBackend.__init__)


def test_bf16_optimizer_still_forces_memory_reports() -> None:
    assert callable(bf16_optimizer.see_memory_usage)
    assert "see_memory_usage('begin bf16_optimizer', force=True)" in inspect.getsource(bf16_optimizer)


@pytest.mark.parametrize("optimizer", [DeepSpeedZeroOptimizer, bf16_optimizer.BF16_Optimizer])
def test_optimizers_link_moments_and_refresh_weights(optimizer: type) -> None:
    for name in ("_lazy_init_hp_params_optimizer_state", "update_lp_params", "destroy"):
        assert callable(getattr(optimizer, name))


def test_stage_zero_asks_the_optimizer_for_its_gradients() -> None:
    assert 'hasattr(self.optimizer, "get_grads_for_reduction")' in inspect.getsource(Host.buffered_allreduce_fallback)


def test_host_engine_has_the_verbs() -> None:
    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in inspect.getsource(Host)
    for name in ("set_gradient_accumulation_boundary", "get_global_grad_norm", "was_step_applied", "step", "destroy"):
        assert callable(getattr(Host, name))
    source = inspect.getsource(Host.__init__)
    assert "self.module_forward_pre_hook" in source
    assert "self.module_forward_post_hook" in source


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_setting_arrives(stage: int, dtype: DType) -> None:
    """DeepSpeed ignores an unknown key at the top level in silence, so what it understood is read back."""
    optim = OptimConfig(clip_norm=0.7)
    settings = deepspeed_settings(optim, EngineConfig(zero_stage=stage, dtype=dtype), 3, num_elements=1001)
    parsed = DeepSpeedConfig({**settings, "train_batch_size": 3})
    assert parsed.gradient_allreduce_op == ("sum" if stage < 3 else "mean")
    assert parsed.gradient_accumulation_steps == 3
    assert parsed.gradient_clipping == (0.7 if stage else 0.0)
    assert parsed.communication_data_type is not None
    assert parsed.grad_accum_dtype == "fp32"
    assert parsed.prescale_gradients is False
    assert parsed.bfloat16_config.enabled == (dtype is DType.bf16 and stage > 0)
    assert parsed.bfloat16_config.check_grad_overflow
    assert not parsed.float16_config.enabled
    assert isinstance(parsed.zero_config, DeepSpeedZeroConfig)
    assert parsed.zero_config.stage == stage
    assert parsed.zero_config.reduce_bucket_size == parsed.zero_config.allgather_bucket_size == 1000
    assert parsed.zero_config.overlap_comm is False
    assert parsed.zero_config.prefetch_bucket_size == 1000
    assert parsed.zero_config.param_persistence_threshold == 1001 // 256
    uneven = deepspeed_settings(optim, EngineConfig(zero_stage=3), 3, num_elements=1001, equal_ranks=False)
    zero = DeepSpeedConfig({**uneven, "train_batch_size": 3}).zero_config
    assert zero.prefetch_bucket_size == zero.max_reuse_distance == 0
