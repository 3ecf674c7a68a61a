"""MiniLM: the budget is met to 1 %, and no uniform scheme of that size has less error."""

import pytest

from lowbitcli import api
from tests.consumers.models import minilm
from tests.search.independent import held

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("bits", "beaten"), [(4.6, 1), (5.5, 1), (8.4, 3)])
def test_minilm(tmp_path, bits, beaten):
    assert held(minilm(), tmp_path, bits) == beaten


def test_a_size_of_minilm(tmp_path):
    wanted, path = 57_000_000, tmp_path / "r.yaml"
    found = api.choose(minilm(), api.Wanted(size=wanted), api.Allowed("cpu"), path)
    api.quantize(minilm(), tmp_path / "q", api.Request(recipe=path), device="cpu")
    size = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert size == found.chosen.bytes_out
    assert 0.99 * wanted <= size <= wanted
