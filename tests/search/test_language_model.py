"""SmolLM2-135M: the budget is met to 1 %, and no uniform scheme of that size has less error."""

import pytest

from tests.consumers.test_smollm2 import gguf, source  # noqa: F401  fixtures
from tests.search.independent import held

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("bits", "beaten"), [(4.6, 1), (8.4, 3)])
def test_smollm2(source, tmp_path, bits, beaten):  # noqa: F811
    assert held(source, tmp_path, bits) == beaten
