"""gradients.py: the pairwise order of sums, and what surrounds a shard."""

import itertools

import pytest
import torch
import torchvision
from torch import nn

from gradients import PairwiseGradientSum, ShardedStep
from sampler import VirtualShards


def pairwise_by_recursion(values, num_processes):
    """Sum each process's run of values in halves, then the processes' sums likewise: an oracle of another shape."""

    def halves(run):
        if len(run) == 1:
            return run[0]
        # The largest power of two below the length first, as a binary counter has it.
        cut = 1 << (len(run) - 1).bit_length() - 1
        return halves(run[:cut]) + halves(run[cut:])

    size = len(values) // num_processes
    return halves([halves(values[r * size : (r + 1) * size]) for r in range(num_processes)])


@pytest.mark.parametrize("num_shards", [1, 2, 4, 6, 8, 12, 16])
def test_the_order_of_sums_is_that_of_halves_and_the_same_on_any_allowed_number_of_processes(num_shards):
    generator = torch.Generator().manual_seed(num_shards)
    gradients = [torch.randn(1000, generator=generator) * 10**shard for shard in range(num_shards)]
    parameter = nn.Parameter(torch.zeros(1000))
    gradient_sum = PairwiseGradientSum(iter([parameter]), VirtualShards(num_shards, num_shards))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        gradient_sum.add_shard()
    gradient_sum.finish()
    for num_processes in range(1, num_shards + 1):
        if num_shards % num_processes == 0 and (num_shards // num_processes).bit_count() == 1:
            expected = pairwise_by_recursion(gradients, num_processes) / num_shards
            assert torch.equal(parameter.grad, expected), num_processes


def test_an_ordinary_sum_differs_from_the_pairwise_one():
    """What the order is for: the same numbers, added from left to right, end in other bits."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, generator=generator) for _ in range(8)]
    assert not torch.equal(sum(gradients), pairwise_by_recursion(gradients, 1))


def test_a_parameter_without_a_gradient_keeps_none():
    used, unused, sometimes = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    gradient_sum = PairwiseGradientSum(iter([used, unused, sometimes]), VirtualShards(4, 2))
    used.grad = torch.ones(2)
    gradient_sum.add_shard()
    used.grad, sometimes.grad = torch.ones(2), torch.ones(2)
    gradient_sum.add_shard()
    gradient_sum.finish()
    assert unused.grad is None
    assert torch.equal(used.grad, torch.ones(2))
    assert torch.equal(sometimes.grad, torch.full((2,), 0.5))


def test_pieces_hold_every_tensor_once_and_one_type():
    """As torch's own cut of a list does, which is not part of its public names."""
    tensors = [torch.zeros(size) for size in (3, 5, 20, 1, 1)]
    others = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(20, dtype=torch.bfloat16)]
    mixed = [*tensors[:2], others[0], *tensors[2:], others[1]]
    pieces = list(torch._utils._take_tensors(mixed, 32))  # 8 numbers of float32
    for dtype, expected, sizes in [(torch.float32, tensors, [2, 1, 2]), (torch.bfloat16, others, [1, 1])]:
        same = [piece for piece in pieces if piece[0].dtype == dtype]
        assert [len(piece) for piece in same] == sizes
        assert [id(t) for t in itertools.chain(*same)] == [id(t) for t in expected]
    assert sum(map(len, pieces)) == len(mixed)


@pytest.mark.parametrize("model", ["squeezenet1_1", "alexnet"])
def test_a_model_without_buffers_takes_several_shards(model):
    built = torchvision.models.get_model(model, num_classes=3)
    step = ShardedStep(built, VirtualShards(4, 2), device=torch.device("cpu"))
    for shard in range(2):
        with step.shard(0, shard):
            built(torch.randn(2, 3, 64, 64)).sum().backward()
