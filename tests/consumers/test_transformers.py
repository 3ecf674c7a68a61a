"""transformers loads what we write: every key accounted for, and the outputs of the dequantized
model.

Two ways in: `dequantize=True`, and the checkpoint as it is, which decompresses at the first
forward. Both are held to equality with our own dequantized checkpoint, no tolerance, in a dtype
where transformers rounds nothing else: FP8 scales are F32 here and are rounded to the model's
dtype as it is, MXFP8 and NVFP4 are decompressed to bf16 whatever that dtype is. Where activations
are declared dynamic, transformers quantizes them too: for equality that is switched off, and with
it on only the error is bounded.
"""

from pathlib import Path

import pytest
import torch

from lowbitcli import api
from tests.consumers.models import SCHEMES, minilm, tiny_llama

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from compressed_tensors.quantization import disable_quantization  # noqa: E402

MODELS = ("minilm", "llama-tied", "llama-untied")
AS_IT_IS = {
    "fp8_tensor": (torch.float32, "fp32"),
    "fp8_channel": (torch.float32, "fp32"),
    "fp8_block128": (torch.float32, "fp32"),
    "int8_channel": (torch.float32, "fp32"),
    "mxfp8": (torch.bfloat16, "bf16"),
    "mxfp4": (torch.bfloat16, "bf16"),
    "nvfp4": (torch.bfloat16, "bf16"),
}
PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@pytest.fixture(scope="module", autouse=True)
def offline():
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory) -> Path:
    if request.param == "minilm":
        return minilm()
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return tiny_llama(folder, tied=request.param == "llama-tied")


@pytest.fixture(scope="module", params=SCHEMES)
def quantized(source, request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "quantized"
    api.quantize(source, folder, api.Request(scheme=request.param))
    return request.param, folder


def loaded(folder: Path, dtype: torch.dtype, **options):
    """Load a model; every key of the file and of the model must have found its partner."""
    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    auto = transformers.AutoModelForCausalLM if kind == "llama" else transformers.AutoModel
    model, told = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert {key: told[key] for key in PROBLEMS if told[key]} == {}
    return model.eval()


def output(model) -> torch.Tensor:
    """Return logits or hidden states of a fixed sequence of 64 tokens."""
    tokens = (torch.arange(64) * 37 + 11)[None] % 251
    with torch.no_grad():
        return model(tokens)[0]


def dequantized(folder: Path, dtype: torch.dtype, name: str) -> torch.Tensor:
    target = folder.with_name(f"dequantized-{name}")
    if not target.exists():
        api.dequantize(folder, target, dtype=name)
    return output(loaded(target, dtype))


def test_dequantizing_on_load_gives_our_dequantized_model(quantized):
    _, folder = quantized
    config = transformers.CompressedTensorsConfig(dequantize=True)
    found = output(loaded(folder, torch.bfloat16, quantization_config=config))
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found, dequantized(folder, torch.bfloat16, "bf16"))


def test_loaded_as_it_is_gives_our_dequantized_model(quantized):
    scheme, folder = quantized
    dtype, name = AS_IT_IS[scheme]
    model = loaded(folder, dtype)
    model.apply(disable_quantization)  # of activations: the weights are decompressed all the same
    assert torch.equal(output(model), dequantized(folder, dtype, name))


def test_activations_quantized_as_declared_cost_a_known_error(quantized):
    scheme, folder = quantized
    dtype, name = AS_IT_IS[scheme]
    found, expected = output(loaded(folder, dtype)), dequantized(folder, dtype, name)
    error = float((found - expected).float().norm() / expected.float().norm())
    if scheme in ("nvfp4", "mxfp4"):
        assert error == 0  # weight-only: nothing is declared
    else:
        assert 0 < error < 0.2  # E4M3 in random layers; it also shows that the declaration is read


def test_mixed_schemes_loaded_as_they_are_give_our_dequantized_model(source, tmp_path):
    """With `dequantize=True` transformers 5.24 cannot load several formats."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('rules: [{match: "*att*", scheme: mxfp8}, {match: "*", scheme: nvfp4}]\n')
    made = api.quantize(source, tmp_path / "quantized", api.Request(recipe=recipe))
    assert len({weight.target.name for weight in made.plan.quantized if weight.target}) == 2
    model = loaded(tmp_path / "quantized", torch.bfloat16)
    model.apply(disable_quantization)
    assert torch.equal(output(model), dequantized(tmp_path / "quantized", torch.bfloat16, "bf16"))
