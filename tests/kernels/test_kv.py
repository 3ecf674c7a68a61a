"""Keys and values in NVFP4: bits of the package that they follow, tiles by a written-out offset."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowbit_kernels import kv_nvfp4
from tests.kernels.samples import difference

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "kernels"
KV = (torch.bfloat16, torch.float16)
CASES = [
    c["input"]
    for c in json.loads((GOLDEN / "api.json").read_text())["cases"]
    if c["function"] == "te.nvfp4.1d" and not c["input"].endswith("f32")
]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "api.safetensors")


def to_16_rows(x):
    """Return `x` as rows, filled up with zeros to a multiple of 16 rows and columns."""
    x = x.reshape(-1, x.shape[-1])
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 16, 0, -x.shape[0] % 16))


@pytest.mark.parametrize("name", CASES)
def test_golden(name, tensors):
    x = tensors[f"input|{name}"]
    filled = to_16_rows(x)
    rows, cols = x.reshape(-1, x.shape[-1]).shape
    q = kv_nvfp4.quantize(filled)
    scale = kv_nvfp4.unswizzle(q.scale, *filled.shape)
    want = {role: tensors[f"te.nvfp4.1d|{name}|{role}"] for role in ("codes", "scales", "gscale")}
    if name.startswith("nan"):
        # Codes of what is no number are ours, see nvfp4_te; nothing of it decodes to a number.
        assert want["gscale"].isnan().all() and q.global_scale.isnan()
        assert kv_nvfp4.dequantize(*q).isnan().all()
        return
    across = want["scales"].shape[1]
    assert difference(q.packed[:rows, : (cols + 1) // 2], want["codes"]) == ""
    assert difference(scale.view(torch.uint8)[:rows, :across], want["scales"]) == ""
    assert difference(q.global_scale.reshape(1), want["gscale"]) == ""


@pytest.mark.parametrize("dtype", KV)
@pytest.mark.parametrize("shape", [(8, 2, 64), (48, 5, 80), (32, 16), (272, 128)])
def test_dequantized_is_its_formula(shape, dtype):
    """Element by element: value times scale, rounded to fp32, times the global scale."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    q = kv_nvfp4.quantize(x)
    assert q.packed.shape == (*shape[:-1], shape[-1] // 2)
    rows, dim = x.shape[:-1].numel(), shape[-1]
    tiles = q.scale.view(torch.uint8).flatten()
    offsets = [kv_nvfp4.scale_offset(r, b, dim) for r in range(rows) for b in range(dim // 16)]
    assert len(set(offsets)) == len(offsets)
    linear = tiles[offsets].view(torch.float8_e4m3fn).float().view(rows, -1, 1)
    nibbles = torch.stack((q.packed & 15, q.packed >> 4), -1).reshape(rows, -1, 16).int()
    value = torch.tensor(E2M1)[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    for wanted in (torch.bfloat16, torch.float32):
        without = kv_nvfp4.dequantize(q.packed, q.scale, dtype=wanted)
        assert difference(without, (value * linear).to(wanted).view(shape)) == ""
        with_it = kv_nvfp4.dequantize(*q, wanted)
        want = ((value * linear) * q.global_scale).to(wanted).view(shape)
        assert difference(with_it, want) == ""
    error = (kv_nvfp4.dequantize(*q).double() - x.double()).square().mean()
    assert error / x.double().square().mean() < 0.01
    # What belongs to no row or block is zero.
    beside = torch.ones(len(tiles), dtype=torch.bool)
    beside[offsets] = False
    assert not tiles[beside].any()
    assert tuple(q.scale.shape) == (-(-rows // 128) * 128, -(-dim // 64) * 4)


def test_offsets_of_a_few_scales():
    """Where cuBLAS' table has them: 32 rows of 16 bytes, four times four scales to each."""
    assert [kv_nvfp4.scale_offset(r, 0, 64) for r in (0, 1, 31, 32, 96, 127)] == [
        0, 16, 496, 4, 12, 508,
    ]  # fmt: skip
    assert [kv_nvfp4.scale_offset(0, b, 128) for b in (3, 4, 7)] == [3, 512, 515]
    assert kv_nvfp4.scale_offset(128, 0, 128) == 1024


@pytest.mark.parametrize(("rows", "dim"), [(16, 16), (128, 64), (144, 80), (272, 256)])
def test_tiles_and_back(rows, dim):
    codes = torch.randint(0, 255, (rows, dim // 16), generator=torch.Generator().manual_seed(3))
    scale = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    tiles = kv_nvfp4.swizzle(scale)
    assert difference(kv_nvfp4.unswizzle(tiles, rows, dim), scale) == ""
    flat = tiles.view(torch.uint8).flatten()
    for row in range(0, rows, 7):
        for block in range(dim // 16):
            assert flat[kv_nvfp4.scale_offset(row, block, dim)] == codes[row, block]


def test_keys_and_values_are_apart():
    k = torch.randn(16, 2, 64).bfloat16()
    v = (torch.randn(4, 4, 32) * 100).half()
    both = kv_nvfp4.quantize_kv(k, v)
    for got, x in zip(both, (k, v), strict=True):
        for g, w in zip(got, kv_nvfp4.quantize(x), strict=True):
            assert difference(g, w) == ""
    assert both[0].global_scale != both[1].global_scale


def test_both_are_looked_at_before_either_is_quantized(monkeypatch):
    monkeypatch.setattr(kv_nvfp4, "quantize", None)
    with pytest.raises(ValueError, match="dimension of V"):
        kv_nvfp4.quantize_kv(ZEROS, ZEROS[:, :8])


def test_what_is_not_contiguous_and_zeros():
    x = torch.randn(64, 4, 16).bfloat16().transpose(0, 1)
    for got, want in zip(kv_nvfp4.quantize(x), kv_nvfp4.quantize(x.contiguous()), strict=True):
        assert difference(got, want) == ""
    q = kv_nvfp4.quantize(torch.zeros(16, 16).bfloat16())
    assert q.global_scale == 0 and not q.packed.any() and not q.scale.view(torch.uint8).any()
    assert not kv_nvfp4.dequantize(*q).any()


ZEROS = torch.zeros(16, 16, dtype=torch.bfloat16)
Q = kv_nvfp4.quantize(ZEROS)
REFUSED = {
    "fp32": (lambda: kv_nvfp4.quantize(ZEROS.float()), "bfloat16 or float16"),
    "rank": (lambda: kv_nvfp4.quantize(ZEROS[0]), "tokens, heads, dim"),
    "rank 4": (lambda: kv_nvfp4.quantize(ZEROS[None, None]), "tokens, heads, dim"),
    "dim": (lambda: kv_nvfp4.quantize(ZEROS[:, :8]), "8, is no multiple of 16"),
    "rows": (lambda: kv_nvfp4.quantize(ZEROS[:8]), "8 rows"),
    "heads": (lambda: kv_nvfp4.quantize(ZEROS.view(4, 4, 16)[:, :3]), "12 rows"),
    "nothing": (lambda: kv_nvfp4.quantize(ZEROS[:0]), "no elements"),
    "V": (lambda: kv_nvfp4.quantize_kv(ZEROS, ZEROS[:, :8]), "dimension of V"),
    "offset": (lambda: kv_nvfp4.scale_offset(0, 4, 64), "no block 4"),
    "row": (lambda: kv_nvfp4.scale_offset(-1, 0, 64), "row -1"),
    "packed": (lambda: kv_nvfp4.dequantize(ZEROS, Q.scale), "packed is uint8"),
    "half a block": (lambda: kv_nvfp4.dequantize(Q.packed[:, :4], Q.scale), "whole blocks"),
    "scale": (lambda: kv_nvfp4.dequantize(Q.packed, Q.scale[:16]), "scale in tiles"),
    "linear": (lambda: kv_nvfp4.unswizzle(Q.scale[:16], 16, 16), "not the tiles"),
    "dtype": (lambda: kv_nvfp4.dequantize(*Q, torch.float64), "float64"),
    "list": (
        lambda: kv_nvfp4.quantize([1.0], "K"),
        "x is a dense tensor of real numbers, this is list",
    ),
    "sparse": (lambda: kv_nvfp4.quantize(ZEROS.to_sparse()), "dense tensor"),
    "nothing for V": (lambda: kv_nvfp4.quantize_kv(ZEROS, None), "v is a dense tensor"),
    "no dim": (lambda: kv_nvfp4.quantize(ZEROS[:, :0]), "no elements"),
    "offset in half a block": (lambda: kv_nvfp4.scale_offset(0, 0, 24), "multiple of 16"),
    "offset of a float": (lambda: kv_nvfp4.scale_offset(0.5, 0, 64), "row is an integer"),
    "tiles of nothing": (lambda: kv_nvfp4.swizzle(None), "scale is a dense tensor"),
    "tiles of fp32": (lambda: kv_nvfp4.swizzle(ZEROS.float()), "a byte each"),
    "half a block back": (lambda: kv_nvfp4.unswizzle(Q.scale, 16, 40), "multiple of 16"),
    "no rows back": (lambda: kv_nvfp4.unswizzle(Q.scale, 0, 16), "rows is a number"),
    "no packed": (lambda: kv_nvfp4.dequantize(None, Q.scale), "packed is a dense tensor"),
    "no scale": (lambda: kv_nvfp4.dequantize(Q.packed, None), "scale is a dense tensor"),
    "a float for global": (
        lambda: kv_nvfp4.dequantize(Q.packed, Q.scale, 1.0),
        "global_scale is a dense",
    ),
    "bytes for scales": (
        lambda: kv_nvfp4.dequantize(Q.packed, Q.scale.view(torch.uint8)),
        "scale in tiles",
    ),
    "global": (lambda: kv_nvfp4.dequantize(Q.packed, Q.scale, torch.ones(2)), "one fp32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_kernel_equals_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.agreement_kv"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []
