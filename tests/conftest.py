"""What every test shares: `gpu` tests skip where there is no CUDA device, `slow` ones without
--slow.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    skip_slow = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)


def pytest_runtest_setup(item):
    if "gpu" in item.keywords:
        # Asked here and not at collection, so that a run without gpu tests imports no torch.
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
