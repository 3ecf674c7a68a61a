"""transformers loads experts as compressed-tensors has them, one by one, and computes with them
what it computes with our dequantized checkpoint: of a Mixtral, and of a Qwen3-MoE whose experts
were stacks. FP8 by rows and MXFP4 are what it reads right there.
"""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from compressed_tensors.quantization import disable_quantization  # noqa: E402

from lowbitcli import api  # noqa: E402
from tests import checkpoints  # noqa: E402
from tests.consumers.models import tiny_experts  # noqa: E402

PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
SCHEMES = {"fp8_channel": (torch.float32, "fp32"), "mxfp4": (torch.bfloat16, "bf16")}
MODELS = {
    "mixtral": "block_sparse_moe.experts.3.w1",
    "mixtral, stacked": "mlp.experts.3.w1",
    "qwen3_moe": "mlp.experts.3.gate_proj",
    "qwen3_moe, stacked": "mlp.experts.3.gate_proj",
}


@pytest.fixture(scope="module", autouse=True)
def offline():
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    kind, _, stacked = request.param.partition(", ")
    folder = tiny_experts(tmp_path_factory.mktemp(kind) / "model", kind, stacked=bool(stacked))
    return request.param, folder


def output(folder, dtype, **options):
    """Return the logits of a fixed sequence; every key of the file and the model has a partner."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **options
    )
    assert {key: told[key] for key in PROBLEMS if told[key]} == {}
    model.eval().apply(disable_quantization)  # of activations
    with torch.no_grad():
        return model((torch.arange(64) * 37 + 11)[None] % 251)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_loaded_and_mean_what_we_say(tmp_path, source, scheme):
    name, folder = source
    dtype, word = SCHEMES[scheme]
    done = api.quantize(folder, tmp_path / "q", api.Request(scheme=scheme), device="cpu")
    quantized = {weight.name for weight in done.plan.quantized}
    assert f"model.layers.1.{MODELS[name]}.weight" in quantized
    assert api.verify(done.output, against=folder, device="cpu").problems == ()
    plain = api.dequantize(done.output, tmp_path / "plain", dtype=word, device="cpu")
    expected = output(plain.output, dtype)
    assert bool(torch.isfinite(expected).all())
    assert torch.equal(output(done.output, dtype), expected)
    before = output(folder, dtype)
    error = float((expected - before).float().norm() / before.float().norm())
    assert 0.001 < error < 1  # a router that sees other numbers chooses other experts


def test_stacks_and_single_experts_give_the_same_files(tmp_path):
    stacked = tiny_experts(tmp_path / "stacked", "qwen3_moe", stacked=True)
    single = tiny_experts(tmp_path / "single", "qwen3_moe", stacked=False)
    request = api.Request(scheme="nvfp4")
    one = api.quantize(stacked, tmp_path / "one", request, device="cpu").output
    other = api.quantize(single, tmp_path / "other", request, device="cpu").output
    a, b = checkpoints.read(one), checkpoints.read(other)
    assert a.keys() == b.keys() and all(checkpoints.same(a[name], b[name]) for name in a)
