"""Case 18: header metadata is kept, the config declares what was written, total_size is right.

Comfy-Org/ComfyUI#15511, huggingface/safetensors#549, ml-explore/mlx#743: writers that dropped the
metadata, wrote `total_size: 0`, or none.
"""

import json

import pytest

from lowbitcli.api import Request, dequantize, quantize
from tests import checkpoints
from tests.checkpoints import CONFIG, LAYER, sharded, weight

TENSORS = {
    LAYER + "mlp.down_proj.weight": weight(64, 64),
    LAYER + "mlp.up_proj.weight": weight(64, 64, seed=1),
    "lm_head.weight": weight(64, 64, seed=2),
}
SAID = {"format": "pt", "modelspec.title": "x", "größe": 'ä\u2028 "quoted"'}


@pytest.fixture
def source(tmp_path):
    first, *rest = TENSORS
    return sharded(
        tmp_path / "source",
        {first: TENSORS[first]},
        {name: TENSORS[name] for name in rest},
        config={**CONFIG, "hidden_size": 64},
        metadata=SAID,
    )


def tensor_bytes(root):
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for file in root.glob("*.safetensors")
        for name, entry in checkpoints.header_of(file).items()
        if name != "__metadata__"
    )


@pytest.mark.parametrize("container", ("compressed-tensors", "lowbit"))
def test_metadata_config_and_total_size(tmp_path, source, container):
    done = quantize(source, tmp_path / "out", Request(container=container), device="cpu")
    for file in done.output.glob("*.safetensors"):
        metadata = checkpoints.metadata_of(file)
        assert {key: metadata[key] for key in SAID} == SAID
        assert set(metadata) - set(SAID) == (
            set() if container == "compressed-tensors" else {"lowbit.format", "lowbit.weights"}
        )
    config = checkpoints.config_of(done.output)
    method = config.pop("quantization_config")["quant_method"]
    assert method == container
    assert config == {**CONFIG, "hidden_size": 64}
    index = json.loads((done.output / checkpoints.INDEX).read_text())
    assert index["metadata"]["total_size"] == tensor_bytes(done.output)
    back = dequantize(done.output, tmp_path / "back", device="cpu")
    assert checkpoints.config_of(back.output) == config
    for file in back.output.glob("*.safetensors"):
        assert checkpoints.metadata_of(file) == SAID
    index = json.loads((back.output / checkpoints.INDEX).read_text())
    assert index["metadata"]["total_size"] == tensor_bytes(back.output)


def test_a_source_without_metadata_gets_format_pt(tmp_path):
    """transformers refuses a file whose metadata has no format."""
    source = sharded(tmp_path / "source", {"lm_head.weight": weight(16, 16)}, TENSORS, metadata={})
    (source / checkpoints.shard_name(1, 2)).unlink()
    checkpoints.write(
        source / checkpoints.shard_name(1, 2), {"model.norm.weight": weight(1, 64)[0]}
    )
    (source / checkpoints.INDEX).unlink()
    done = quantize(source, tmp_path / "out", Request(container="compressed-tensors"), device="cpu")
    for file in done.output.glob("*.safetensors"):
        assert checkpoints.metadata_of(file) == {"format": "pt"}


def test_the_command(tmp_path, source, lowbit):
    said = lowbit("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert said.code == 0
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert checkpoints.metadata_of(file) == SAID
