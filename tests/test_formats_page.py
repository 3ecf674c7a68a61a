"""docs/formats.md can be believed: the reader that it prints reads what lowbit writes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbitcli import api
from lowbitcli.containers import CONTAINERS
from lowbitcli.errors import CheckpointError
from lowbitcli.schemes import SCHEMES
from tests import seeded

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    seeded.write(folder)
    return folder


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_the_printed_reader_reads_the_lowbit_container(source, tmp_path, scheme):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    printed: dict = {}
    exec(compile(code, "docs/formats.md", "exec"), printed)

    request = api.Request(scheme=scheme, container="lowbit")
    made = api.quantize(source, tmp_path / "q", request)
    api.dequantize(tmp_path / "q", tmp_path / "d", dtype="fp32")
    found = printed["read_lowbit"](tmp_path / "q" / "model.safetensors")
    ours = load_file(tmp_path / "d" / "model.safetensors")
    assert found.keys() == {weight.name for weight in made.plan.quantized}
    assert len(found) == 21
    for name, value in found.items():
        expected = ours[name].numpy()
        assert value.dtype == expected.dtype == np.float32 and value.shape == expected.shape, name
        assert value.tobytes() == expected.tobytes(), name


def test_the_page_has_every_scheme_and_container():
    for name in (*(s.name for s in SCHEMES), *(c.name for c in CONTAINERS)):
        assert f"| `{name}` |" in PAGE, name


@pytest.mark.parametrize("scale", ["a._weight_qdata", "a.qweight"])
def test_weights_of_a_kind_that_nothing_declares_are_refused(tmp_path, scale):
    """Neither quantized again nor passed through as if there were nothing to dequantize."""
    path = tmp_path / "in.safetensors"
    save_file({"a.weight": torch.zeros(16, 16).to(torch.float8_e4m3fn), scale: torch.ones(1)}, path)
    for run in (api.quantize, api.dequantize):
        with pytest.raises(CheckpointError, match=re.escape(scale)):
            run(path, tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()
