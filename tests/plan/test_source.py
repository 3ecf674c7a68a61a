"""What a checkpoint is taken for: no weight is lost between what is declared and what is stored."""

import pytest

from lowbitcli import api
from lowbitcli.errors import CheckpointError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight, write

DOWN = LAYER + "mlp.down_proj.weight"


@pytest.fixture
def twice(tmp_path):
    """A weight that is stored packed, with a plain tensor of its name beside it."""
    made = api.quantize(single(tmp_path / "source", {DOWN: weight(64, 64)}), tmp_path / "made")
    tensors = {**checkpoints.read(made.output), DOWN: weight(64, 64, 100.0)}
    return single(tmp_path / "twice", tensors, checkpoints.config_of(made.output))


def test_a_weight_that_is_stored_twice_is_refused(twice, tmp_path):
    for run in (api.quantize, api.dequantize):
        with pytest.raises(CheckpointError, match="stored twice") as caught:
            run(twice, tmp_path / "out")
        assert caught.value.exit_code == 4
        assert DOWN in caught.value.message
        assert not (tmp_path / "out").exists()


def test_verify_names_the_weight_that_is_stored_twice(twice):
    found = api.verify(twice, device="cpu")
    assert found.exit_code == 1
    (problem,) = found.failures
    assert (problem.kind, problem.tensor, problem.file) == ("duplicate", DOWN, "model.safetensors")


@pytest.mark.parametrize(
    ("scheme", "container", "said"),
    [
        ("nvfp4", "compressed-tensors", "config.json"),
        ("nvfp4", "modelopt", "hf_quant_config.json"),
        ("fp8_block128", "deepseek", "config.json"),
        ("mxfp4", "gpt-oss", "config.json"),
    ],
)
def test_a_file_of_which_its_directory_says_how_it_is_quantized(tmp_path, scheme, container, said):
    config, tensors = checkpoints.CONFIG, {DOWN: weight(128, 128)}
    if container == "gpt-oss":  # whose parts have names of their own
        config = {**config, "model_type": "gpt_oss"}
        tensors = {f"{LAYER}mlp.experts.down_proj": weight(64, 64).reshape(1, 64, 64)}
    source = single(tmp_path / "source", tensors, config)
    request = api.Request(scheme=scheme, container=container)
    made = api.quantize(source, tmp_path / "made", request, device="cpu").output
    file = made / "model.safetensors"
    for run in (api.inspect, api.quantize, api.dequantize):
        with pytest.raises(UnsupportedError, match=f" and {said} beside it") as caught:
            run(file, *([] if run is api.inspect else [tmp_path / "out.safetensors"]))
        assert caught.value.hint == f"name the directory {made}"
    (problem,) = api.verify(file, device="cpu").failures
    assert problem.kind == "unreadable" and f"(name the directory {made})" in problem.message
    assert api.verify(made, device="cpu").passed


def test_a_file_without_quantized_weights_is_taken_alone(tmp_path):
    made = api.quantize(single(tmp_path / "source", {DOWN: weight(64, 64)}), tmp_path / "made")
    norms = write(made.output / "norms.safetensors", {"model.norm.weight": weight(1, 64)[0]})
    assert [one.name for one in api.inspect(norms).weights] == ["model.norm.weight"]


@pytest.mark.parametrize("config", ["{", "[]", '{"quantization_config": 3}'])
def test_a_config_beside_a_file_need_not_be_one(tmp_path, config):
    file = write(tmp_path / "model.safetensors", {"a.weight_scale": weight(1, 64)})
    (tmp_path / "config.json").write_text(config)
    (finding,) = api.inspect(file).findings
    assert finding.message == "part of a quantized weight, but nothing says of which kind"
