"""The search on a GPU: the figures, and so the recipe, that a CPU gives."""

import pytest

from lowbitcli import api
from lowbitcli.pipeline import memory
from tests import experts as stacks
from tests.search import models

pytestmark = pytest.mark.gpu


def chosen(source, device, bits):
    return api.choose(source, api.Wanted(bits=bits), api.Allowed(device)).chosen.text


@pytest.mark.parametrize("make", [models.dense, models.experts])
def test_the_recipe_of_a_cpu(tmp_path, make, monkeypatch):
    source = make(tmp_path / "m")
    usual = chosen(source, "cpu", 6.0)
    assert chosen(source, "cuda", 6.0) == usual
    small = memory.Budget(2, 1 << 13, 0)
    monkeypatch.setattr(memory, "budget", lambda *_: small)
    assert chosen(source, "cuda", 6.0) == usual


def test_stacks(tmp_path):
    source = stacks.model(tmp_path / "m", "gpt_oss")
    assert chosen(source, "cuda", 4.6) == chosen(source, "cpu", 4.6)
