"""transformers loads a small gpt-oss whose experts we wrote, and its logits are those of our
dequantized checkpoint, bit for bit."""

import pytest
import torch

from lowbitcli import api

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two layers of four experts, random BF16 with outliers, biases that are not zero."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=96,
        head_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
            parameter.view(-1)[::97] *= 8
    folder = tmp_path_factory.mktemp("gpt-oss") / "model"
    model.save_pretrained(folder)
    return folder


def logits(folder, **options):
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert {key: found for key, found in told.items() if found} == {}
    with torch.no_grad():
        return model.eval()((torch.arange(64) * 37 + 11)[None] % 251)[0].float()


def test_transformers_runs_what_we_wrote(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request = api.Request(scheme="mxfp4", container="gpt-oss")
    made = api.quantize(source, tmp_path / "q", request, device="cpu")
    assert len(made.plan.quantized) == 4
    api.dequantize(tmp_path / "q", tmp_path / "d", device="cpu")
    found = logits(tmp_path / "q", quantization_config=transformers.Mxfp4Config(dequantize=True))
    ours, before = logits(tmp_path / "d"), logits(source)
    assert torch.equal(found, ours)
    assert 0.01 < float((ours - before).norm() / before.norm()) < 0.5
