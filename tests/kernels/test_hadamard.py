"""The rotation of sixteen columns against its matrix in fp64."""

import numpy as np
import pytest
import torch

from lowbit_kernels import hadamard


def sylvester() -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("signs", [hadamard.SIGNS, (1,) * 16, (-1, 1) * 8])
def test_rotate_is_the_product_with_the_matrix(signs):
    x = torch.randint(-1000, 1000, (7, 48), generator=torch.Generator().manual_seed(1)).float()
    matrix = np.diag(signs) @ sylvester() / 4
    want = (x.double().numpy().reshape(-1, 16) @ matrix).reshape(7, 48)
    # Sums of integers over four are exact in fp32, whatever their order.
    np.testing.assert_array_equal(hadamard.rotate(x, signs).double().numpy(), want)
    assert torch.equal(hadamard.rotate_back(hadamard.rotate(x, signs), signs), x)


def test_terms_are_added_from_first_to_last():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([1.0, 2.0**-24, 2.0**-24]) * 4
    assert hadamard.rotate(x, (1,) * 16)[0, 0].item() == 1.0


def test_refusals():
    with pytest.raises(ValueError, match="50 columns"):
        hadamard.rotate(torch.zeros(2, 50))
    with pytest.raises(ValueError, match="signs"):
        hadamard.rotate(torch.zeros(2, 16), (2,) * 16)
    with pytest.raises(ValueError, match="50 columns"):
        hadamard.rotate_back(torch.zeros(2, 50))
