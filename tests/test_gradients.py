"""models/gradients.py: the pairwise order of sums, and what surrounds a shard."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models.gradients import PairwiseGradientSum, ShardedStep
from sampler import VirtualShards
from tests.ranks import run_check


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
    gradient_sum = PairwiseGradientSum(nn.ParameterList([parameter]), VirtualShards(num_shards, num_shards))
    for gradient in gradients:
        parameter.grad = gradient.clone()
        gradient_sum.add_shard()
    gradient_sum.finish()
    for num_processes in range(1, num_shards + 1):
        if num_shards % num_processes == 0 and (num_shards // num_processes).bit_count() == 1:
            expected = pairwise_by_recursion(gradients, num_processes) / num_shards
            assert torch.equal(parameter.grad, expected), num_processes


def test_a_parameter_without_a_gradient_keeps_none():
    used, unused, sometimes = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    gradient_sum = PairwiseGradientSum(nn.ParameterList([used, unused, sometimes]), VirtualShards(4, 2))
    for gradients in ((torch.ones(2), None), (torch.ones(2), torch.ones(2))):
        used.grad, sometimes.grad = gradients
        gradient_sum.add_shard()
    gradient_sum.finish()
    assert unused.grad is None
    assert (used.grad.tolist(), sometimes.grad.tolist()) == ([1, 1], [0.5, 0.5])


class WeightedSums(nn.Module):
    """Its parameters' gradients are the factors that it is called with."""

    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.weights.append(torch.zeros(5, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def forward(self, factors):
        return sum((parameter * factor).sum() for parameter, factor in zip(self.weights, factors, strict=True))


def sum_over_ranks(rank, world_size, num_shards):
    """Compare the gradients of several buckets, of sizes that no number of ranks divides, with the oracle's."""
    shards = VirtualShards(num_shards, num_shards, rank, world_size)
    model = WeightedSums((1_000_003, 5, 300_001))
    step = ShardedStep(DistributedDataParallel(model), shards, device=torch.device("cpu"), is_deterministic=True)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        factors = [
            [torch.randn(parameter.shape, generator=generator) * 10**shard for parameter in model.weights]
            for shard in range(num_shards)
        ]
        model.zero_grad()
        for shard in shards.local:
            with step.shard(number, shard):
                step.model(factors[shard]).backward()
        step.finish_gradients(number)
        for parameter, gradients in zip(model.weights, zip(*factors, strict=True), strict=True):
            assert torch.equal(parameter.grad, pairwise_by_recursion(gradients, world_size) / num_shards), number


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "num_shards"), [(2, 8), (3, 3), (4, 8)])
def test_buckets_are_summed_beside_the_backward_pass_in_the_order_of_halves(world_size, num_shards, tmp_path):
    run_check(world_size, sum_over_ranks, tmp_path, num_shards)


def test_a_model_without_buffers_takes_several_shards():
    model = nn.Linear(3, 3)
    step = ShardedStep(model, VirtualShards(4, 2), device=torch.device("cpu"))
    for shard in range(2):
        with step.shard(0, shard):
            model(torch.randn(2, 3)).sum().backward()
