"""One set of outputs for all tests of the room."""

import pytest

from tests.verify.planted import Planted


@pytest.fixture(scope="session")
def planted(tmp_path_factory) -> Planted:
    return Planted(tmp_path_factory.mktemp("planted"))
