"""Weights at the very top of fp32: rounded up, they would be read as Inf."""

import pytest
import torch
from safetensors.torch import save_file

from lowbitcli import api
from lowbitcli.errors import UnsupportedError


def test_values_that_would_be_read_as_infinite_are_refused(tmp_path):
    source = tmp_path / "top.safetensors"
    save_file({"a.weight": torch.full((32, 32), 3.39e38)}, source)
    with pytest.raises(UnsupportedError, match=r"a.weight has values that mxfp8 rounds up"):
        api.quantize(source, request=api.Request(scheme="mxfp8"))
    assert [path.name for path in tmp_path.iterdir()] == ["top.safetensors"]
    made = api.quantize(source, request=api.Request(scheme="nvfp4"))
    assert made.errors["a.weight"].relative < 0.1
