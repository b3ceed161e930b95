"""losses.py: binary cross-entropy against its definition."""

import pytest
import torch

from losses import BinaryCrossEntropy


def by_definition(output, target):
    probability = 1 / (1 + (-output.double()).exp())
    return -(target * probability.log() + (1 - target) * (1 - probability).log()).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_indices_become_one_decision_a_class(smoothing):
    output, target = torch.tensor([[0.5, -1.0, 2.0, 0.0], [1.0, 0.0, 0.0, -3.0]]), torch.tensor([2, 0])
    expected = torch.full((2, 4), smoothing / 4, dtype=torch.float64)
    expected[0, 2] += 1 - smoothing
    expected[1, 0] += 1 - smoothing
    loss = BinaryCrossEntropy(smoothing)(output, target)
    assert float(loss) == pytest.approx(float(by_definition(output, expected)), rel=1e-6)  # float32


def test_a_class_above_the_threshold_is_fully_there():
    output, target = torch.randn(2, 4), torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.9, 0.0, 0.1, 0.0]])
    expected = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).double()
    loss = BinaryCrossEntropy(target_threshold=0.2)(output, target)
    assert float(loss) == pytest.approx(float(by_definition(output, expected)), rel=1e-6)
