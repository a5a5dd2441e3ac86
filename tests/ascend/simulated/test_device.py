"""The simulated device itself: what the other tests lean on is what they believe it to be."""

import subprocess
import sys

import pytest
import torch

from backends.resolve import resolve_backend


def test_the_real_torch_npu_is_at_work() -> None:
    import torch_npu

    assert torch_npu.__version__.startswith("2.13.0")
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.npu.device_count() == 4


def test_the_backend_record_is_resolved() -> None:
    """Of device 0: a process of torch_npu must not go from one device to another before its first backward."""
    backend = resolve_backend("auto", 0)
    assert (backend.name, backend.collective, backend.device) == ("npu", "hccl", torch.device("npu", 0))
    assert backend.deepspeed_accelerator == "npu"
    assert backend.supports_bf16
    with pytest.raises(ValueError, match=r"local rank 4 has no NPU of its own: 4 visible"):
        resolve_backend("npu", 4)


def test_the_generator_is_seeded_saved_and_put_back() -> None:
    backend = resolve_backend("npu", 0)
    backend.seed(5)
    state = backend.rng_state()
    first = torch.rand(3, device=backend.device)
    second = torch.rand(3, device=backend.device)
    assert not torch.equal(first.cpu(), second.cpu())
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=backend.device).cpu(), first.cpu())


def test_memory_is_counted_and_ends() -> None:
    backend = resolve_backend("npu", 0)
    block = torch.empty(1 << 22, device=backend.device)
    assert backend.memory_bytes() >= block.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 36, device=backend.device)


def test_strides_views_and_in_place_writes_reach_the_same_memory() -> None:
    whole = torch.zeros(4, 6, device="npu")
    whole.t()[1:3, ::2].add_(1.0)
    expected = torch.zeros(4, 6)
    expected.t()[1:3, ::2].add_(1.0)
    assert torch.equal(whole.cpu(), expected)
    assert torch.equal(whole[:, 1].cpu(), expected[:, 1])


def test_an_operator_without_reference_says_so() -> None:
    import torch_npu

    with pytest.raises(NotImplementedError, match=r"no reference for npu::npu_fast_gelu"):
        torch_npu.npu_fast_gelu(torch.zeros(3, device="npu"))


def test_torch_npus_own_checks_run() -> None:
    import torch_npu

    x, weight = torch.zeros(4, 8, device="npu"), torch.zeros(2, 8, 16, device="npu")
    counts = torch.tensor([1, 3], device="npu")
    with pytest.raises(RuntimeError, match="group_type"):
        torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, group_list_type=1, split_item=2)


def test_a_reference_of_another_shape_or_type_than_torch_npus_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the references could drift from the operators they stand for."""
    import functools

    from tests.ascend.sim import install

    own = functools.partial(
        torch.library.get_kernel("npu::npu_swiglu_backward", "PrivateUse1").call_boxed,
        torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1),
    )
    wrong = install._reference("npu::npu_swiglu", lambda grad, x, dim: x[:, :-1], own)
    with pytest.raises(AssertionError, match=r"torch_npu returns .*\(3, 8\).*the reference .*\(3, 7\)"):
        wrong(torch.ones(3, 4, device="npu"), torch.ones(3, 8, device="npu"), -1)


BACKWARD_THROUGH_GROUPED_MATMUL = """
import torch, torch_npu
weight = torch.ones(2, 8, 16, device="npu", requires_grad=True)
counts = torch.tensor([1, 3], device="npu")
options = {"group_list": counts, "group_list_type": 1, "group_type": 0, "split_item": 2}
(y,) = torch_npu.npu_grouped_matmul([torch.ones(4, 8, device="npu")], [weight], **options)
y.sum().backward()
print("gradient:", weight.grad)
"""


def test_npu_grouped_matmul_alone_has_no_gradient() -> None:
    """Why the op brings its own backward. A process of its own: torch warns from a thread, which strict filters abort."""
    code = BACKWARD_THROUGH_GROUPED_MATMUL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gradient: None" in done.stdout
    assert "an autograd kernel was not registered" in done.stderr
