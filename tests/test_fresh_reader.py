"""What a reader of docs/api.md alone builds: a linear layer in NVFP4, trained as such and then
stored, and attention over quantized keys and values.

Nothing here may be known from elsewhere: where it breaks, the page is wrong.
"""

import pytest
import torch
from torch import nn

from lowbit_kernels import dequantizers, fake_quant, kv_nvfp4
from lowbit_kernels.dequantizers import QuantizedTensor, ScalingMode

NVFP4, MXFP8 = ((2, 1), (4, 3)), ((4, 3), (8, 0))


class Trained(nn.Linear):
    """Computes with the weight as NVFP4 has it and the input as MXFP8 has it."""

    def forward(self, x):
        weight = fake_quant.dynamic_block_quant(self.weight, 16, None, None, *NVFP4)
        x = fake_quant.dynamic_block_quant(x, 32, None, None, *MXFP8)
        return nn.functional.linear(x, weight, self.bias)


class Stored(nn.Module):
    """Holds the weight in NVFP4, dequantizes it at each call."""

    def __init__(self, layer):
        super().__init__()
        q = dequantizers.quantize(layer.weight, ScalingMode.NVFP4_1D)
        self.register_buffer("data", q.data)
        self.register_buffer("scale", q.scale)
        self.register_buffer("global_scale", q.global_scale)
        self.bias = layer.bias

    def forward(self, x):
        weight = dequantizers.dequantize(
            self.data, self.scale, x.dtype, ScalingMode.NVFP4_1D, self.global_scale
        )
        x = fake_quant.dynamic_block_quant(x, 32, None, None, *MXFP8)
        return nn.functional.linear(x, weight, self.bias)


def trained(dtype):
    """Return a layer after a few steps towards another, and its losses."""
    torch.manual_seed(5)
    layer, goal = Trained(128, 48, dtype=dtype), nn.Linear(128, 48, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(80):
        x = torch.randn(64, 128, dtype=dtype)
        loss = (layer(x) - goal(x).detach()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return layer, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_trained_and_stored_with_the_same_outputs(dtype, tmp_path):
    layer, losses = trained(dtype)
    assert losses[-1] < losses[0] / 4
    stored = Stored(layer)
    x = torch.randn(7, 128, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(stored(x), layer(x))
    size = sum(buffer.nbytes for buffer in stored.buffers())
    assert size == 48 * 128 // 2 + 48 * 128 // 16 + 4
    # Into a checkpoint of torch and out again.
    torch.save(stored.state_dict(), tmp_path / "layer.pt")
    again = Stored(Trained(128, 48, dtype=dtype))
    again.load_state_dict(torch.load(tmp_path / "layer.pt"))
    with torch.no_grad():
        assert torch.equal(again(x), stored(x))


def test_a_stored_layer_between_graphs_and_in_another_dtype():
    stored = Stored(trained(torch.float32)[0])
    x = torch.randn(3, 128)
    compiled = torch.compile(stored, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), stored(x))
    stored.bias = None
    assert stored(x.half()).dtype == torch.float16
    with pytest.raises(ValueError, match="scale"):
        stored.half()(x.half())


def test_only_the_bias_of_a_stored_layer_learns():
    stored = Stored(trained(torch.float32)[0])
    x = torch.randn(4, 128, requires_grad=True)
    stored(x).sum().backward()
    assert [name for name, _ in stored.named_parameters()] == ["bias"]
    assert stored.bias.grad is not None and x.grad is not None and x.grad.isfinite().all()


def test_a_weight_goes_through_a_file(tmp_path):
    layer = trained(torch.float32)[0]
    dequantizers.quantize(layer.weight, "nvfp4_1d").save(tmp_path / "weight.safetensors")
    weight = QuantizedTensor.load(tmp_path / "weight.safetensors")
    with torch.no_grad():
        rounded = fake_quant.dynamic_block_quant(layer.weight, 16, None, None, *NVFP4)
    assert torch.equal(weight.dequantize(), rounded)


def test_a_model_of_such_layers_compiles():
    model = nn.Sequential(Trained(64, 64), nn.ReLU(), Trained(64, 16))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 64)
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_attention_over_quantized_keys_and_values():
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 16, 4, 64, dtype=torch.bfloat16)  # tokens, heads, dim
    keys, values = kv_nvfp4.quantize_kv(k, v)
    k_again, v_again = kv_nvfp4.dequantize(*keys), kv_nvfp4.dequantize(*values)
    attention = nn.functional.scaled_dot_product_attention
    want = attention(*(t.transpose(0, 1).float() for t in (q, k, v)))
    got = attention(*(t.transpose(0, 1).float() for t in (q, k_again, v_again)))
    assert ((got - want).square().mean() / want.square().mean()) < 0.05
    kept = keys.packed.nbytes + keys.scale.nbytes
    assert kept == k.numel() // 2 + 128 * 4  # 64 rows of 4 scales, filled up to 128
