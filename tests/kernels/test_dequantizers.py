"""Dequantizers by scaling mode: the values of the package they follow, arrays by DLPack, files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lowbit_kernels import dequantizers, fp8, hadamard, mx, nvfp4, tensor_file
from lowbit_kernels.dequantizers import DEQUANTIZERS, QuantizedTensor, ScalingMode, dequantize
from tests.kernels import samples
from tests.kernels.samples import DTYPES, difference

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels"
CASES = [
    (c["function"], c["input"])
    for c in json.loads((GOLDEN / "api.json").read_text())["cases"]
    if c["function"].startswith("tejax.")
]
MODES = {
    "tejax.fp8_tensor.current": ScalingMode.CURRENT_TENSOR,
    "tejax.mxfp8": ScalingMode.MXFP8_1D,
    "tejax.nvfp4.1d": ScalingMode.NVFP4_1D,
}


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "api.safetensors")


def parts(function, name, tensors):
    """Return data, scale and global scale of a case, in the dtypes of their bytes."""
    data, scale = (tensors[f"{function}|{name}|{role}"] for role in ("codes", "scales"))
    if "nvfp4" in function:
        return data, scale.view(torch.float8_e4m3fn), tensors[f"{function}|{name}|gscale"]
    return data.view(torch.float8_e4m3fn), scale, None


@pytest.mark.parametrize(("function", "name"), CASES)
def test_golden(function, name, tensors):
    want = tensors[f"{function}|{name}|dequant"]
    data, scale, shared = parts(function, name, tensors)
    got = dequantize(data, scale, want.dtype, MODES[function], shared).reshape(want.shape)
    finite = want.isfinite()
    if function == "tejax.mxfp8":
        # Its CPU flushes the scale 2^-127, code 0, to zero.
        flushed = (scale == 0).repeat_interleave(32, -1).reshape(want.shape)
        assert not want[finite & flushed].any()
        finite &= ~flushed
    assert difference(got[finite], want[finite]) == ""


@pytest.mark.parametrize(("function", "least"), [(MODE, 5000) for MODE in MODES])
def test_the_golden_values_are_mostly_finite(function, least, tensors):
    dequants = [t for key, t in tensors.items() if key.startswith(function) and "dequant" in key]
    assert sum(int(t.isfinite().sum()) for t in dequants) > least


def test_every_mode_has_a_dequantizer():
    assert set(DEQUANTIZERS) == set(ScalingMode)


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_out(dtype):
    """By the equations, in fp32, of all codes."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    number = codes.view(torch.float8_e4m3fn)
    scale = torch.tensor([0.3])
    got = dequantize(number, scale, dtype, ScalingMode.DELAYED_TENSOR)
    assert difference(got, (number.float() * scale).to(dtype)) == ""
    e8m0 = torch.tensor([[0, 1], [127, 128], [120, 130], [254, 255]], dtype=torch.uint8)
    powers = torch.exp2(e8m0.double() - 127).float()
    powers[3, 1] = torch.nan
    want = (number.float().view(4, 2, 32) * powers[..., None]).view(4, 64).to(dtype)
    for stored in (e8m0, e8m0.view(torch.float8_e8m0fnu)):
        assert difference(dequantize(number, stored, dtype, ScalingMode.MXFP8_1D), want) == ""
    half = torch.randn(3, 5).to(torch.float16)
    assert difference(dequantize(half, None, dtype, ScalingMode.NO_SCALING), half.to(dtype)) == ""


def test_rotation_back_is_its_formula():
    """x = y (diag(signs) H)^T / 4, with H by its own recursion; within fp32's rounding."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = (1, -1, -1, 1) * 4
    matrix = torch.diag(torch.tensor(signs, dtype=torch.float64)) @ h / 4
    q = dequantizers.quantize(x, ScalingMode.NVFP4_1D, signs=signs)
    turned = nvfp4.dequantize(*nvfp4.quantize(hadamard.rotate(x, signs)), torch.float32)
    want = (turned.double().view(8, 4, 16) @ matrix.T).view(8, 64)
    got = q.dequantize(torch.float32)
    assert (got - want).abs().max() < 1e-6
    assert (got - x).square().mean() / x.square().mean() < 0.02
    assert difference(q.dequantize(torch.bfloat16), got.bfloat16()) == ""
    assert difference(got, hadamard.rotate_back(turned, signs)) == ""


def some():
    w = samples.weights(torch.bfloat16)["gauss"]
    yield dequantizers.quantize(w, ScalingMode.NO_SCALING)
    yield dequantizers.quantize(w, ScalingMode.CURRENT_TENSOR)
    yield dequantizers.quantize(w, ScalingMode.DELAYED_TENSOR, torch.tensor(0.01))
    yield dequantizers.quantize(w, ScalingMode.MXFP8_1D)
    yield dequantizers.quantize(w, ScalingMode.NVFP4_1D)
    yield dequantizers.quantize(w, ScalingMode.NVFP4_2D, signs=hadamard.SIGNS)
    yield dequantizers.quantize(w.view(2, 3, 96), ScalingMode.NVFP4_1D)
    yield dequantizers.quantize(w.view(2, 3, 96), ScalingMode.CURRENT_TENSOR)
    yield dequantizers.quantize(w[:0], ScalingMode.MXFP8_1D)
    yield dequantizers.quantize(w.T[:32].T, ScalingMode.NO_SCALING)
    yield QuantizedTensor(*fp8.quantize_tensor(w, element=fp8.E5M2), ScalingMode.CURRENT_TENSOR)


def test_quantize_is_the_default_rule_of_each_scheme():
    w = samples.weights(torch.float32)["gauss"]
    pairs = {
        ScalingMode.CURRENT_TENSOR: fp8.quantize_tensor(w),
        ScalingMode.MXFP8_1D: mx.quantize_mxfp8(w),
        ScalingMode.NVFP4_1D: nvfp4.quantize(w),
        ScalingMode.NVFP4_2D: nvfp4.quantize(w, rule="2d"),
    }
    for mode, want in pairs.items():
        q = dequantizers.quantize(w, mode)
        got = [p for p in (q.data, q.scale, q.global_scale) if p is not None]
        assert [difference(g, p) for g, p in zip(got, want, strict=True)] == [""] * len(want)
        assert q.dtype == torch.float32 and q.dequantize().dtype == torch.float32


def test_saved_and_loaded(tmp_path):
    tensors = list(some())
    for i, q in enumerate(tensors):
        path = tmp_path / f"{i}.safetensors"
        q.save(path)
        back = QuantizedTensor.load(path)
        assert (back.mode, back.dtype, back.signs) == (q.mode, q.dtype, q.signs)
        for name in ("data", "scale", "global_scale"):
            mine, other = getattr(q, name), getattr(back, name)
            assert (mine is None) == (other is None)
            assert mine is None or difference(other, mine) == ""
        assert difference(back.dequantize(), q.dequantize()) == ""
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # tensors lie aligned
        # The package that defines the format reads the same.
        with safe_open(path, "pt") as file:
            assert file.metadata()["mode"] == q.mode.value
            assert difference(file.get_tensor("data"), q.data) == ""
    assert len(list(tmp_path.iterdir())) == len(tensors)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "q.safetensors"
    next(some()).save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole.replace(b'"BF16"', b'"F64X"'), b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"q\.safetensors"):
            QuantizedTensor.load(path)
    for offsets in (b"[0, 9]", b"[4, 2]", b"[-8,0]"):
        tensor_file.write(path, {"data": torch.zeros(2)}, {})
        path.write_bytes(path.read_bytes().replace(b"[0, 8]", offsets))
        with pytest.raises(ValueError, match="data is not in the file"):
            tensor_file.read(path)
    tensor_file.write(path, {"data": torch.zeros(2)}, {"format": "another"})
    with pytest.raises(ValueError, match="no quantized tensor"):
        QuantizedTensor.load(path)
    with pytest.raises(ValueError, match="float64"):
        tensor_file.write(path, {"data": torch.zeros(2).double()}, {})
    with pytest.raises(FileNotFoundError):
        QuantizedTensor.load(tmp_path / "none")


def test_arrays_of_other_libraries_come_without_a_copy():
    numpy = pytest.importorskip("numpy")
    packed, scale, shared = nvfp4.quantize(samples.weights(torch.float32)["gauss"])
    array = packed.numpy()
    got = dequantize(array, scale, torch.float32, ScalingMode.NVFP4_1D, shared.numpy().reshape(1))
    assert difference(got, nvfp4.dequantize(packed, scale, shared, torch.float32)) == ""
    assert dequantizers._tensor(array).data_ptr() == array.ctypes.data
    floats = numpy.ones((2, 3), numpy.float32)
    assert dequantize(floats, None, torch.bfloat16, ScalingMode.NO_SCALING).shape == (2, 3)


def test_arrays_of_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    w = samples.weights(torch.float32)["gauss"]
    packed, scale, shared = nvfp4.quantize(w)
    arrays = [jax.numpy.asarray(packed.numpy()), jax.numpy.asarray(shared.numpy().reshape(1))]
    got = dequantize(arrays[0], scale, torch.float32, ScalingMode.NVFP4_1D, arrays[1])
    assert difference(got, nvfp4.dequantize(packed, scale, shared, torch.float32)) == ""
    pointer = arrays[0].unsafe_buffer_pointer()
    assert dequantizers._tensor(arrays[0]).data_ptr() == pointer
    data = jax.numpy.asarray(w.numpy()).astype(jax.numpy.float8_e4m3fn)
    one = jax.numpy.asarray([0.5], jax.numpy.float32)
    want = w.to(torch.float8_e4m3fn).float() * 0.5
    assert difference(dequantize(data, one, torch.float32, ScalingMode.CURRENT_TENSOR), want) == ""


DATA = torch.zeros(2, 32, dtype=torch.float8_e4m3fn)
PACKED, E4M3 = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 2).to(torch.float8_e4m3fn)
E8M0, ONE = torch.zeros(2, 1, dtype=torch.uint8), torch.ones(1)
F32 = torch.float32
REFUSED = {
    "dtype": ((DATA, ONE, torch.float64, ScalingMode.CURRENT_TENSOR), "float64"),
    "list": (([1.0], ONE, F32, ScalingMode.CURRENT_TENSOR), "DLPack"),
    "integers unscaled": ((PACKED, None, F32, ScalingMode.NO_SCALING), "floating"),
    "scaled unscaled": ((DATA, ONE, F32, ScalingMode.NO_SCALING), "has no scale"),
    "no scale": ((DATA, None, F32, ScalingMode.CURRENT_TENSOR), "needs a scale"),
    "two for one": ((DATA, torch.ones(2), F32, ScalingMode.CURRENT_TENSOR), "scale belonging"),
    "global for tensor": ((DATA, ONE, F32, ScalingMode.CURRENT_TENSOR, ONE), "no global_scale"),
    "rotated fp8": ((DATA, E8M0, F32, ScalingMode.MXFP8_1D, None, hadamard.SIGNS), "no rotation"),
    "packed mxfp8": ((PACKED, E8M0, F32, ScalingMode.MXFP8_1D), "E4M3 or E5M2"),
    "transposed scales": ((DATA, E8M0.T, F32, ScalingMode.MXFP8_1D), "not those"),
    "no global": ((PACKED, E4M3, F32, ScalingMode.NVFP4_1D), "needs a global scale"),
    "scales of others": ((PACKED, E4M3.T[:1], F32, ScalingMode.NVFP4_1D, ONE), "not those"),
    "signs": ((PACKED, E4M3, F32, ScalingMode.NVFP4_1D, ONE, (1, 2)), "sixteen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        dequantize(*arguments)


def test_quantizing_is_refused_with_what_a_mode_has_not():
    w = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="no scale"):
        dequantizers.quantize(w, ScalingMode.MXFP8_1D, ONE)
    with pytest.raises(ValueError, match="no rotation"):
        dequantizers.quantize(w, ScalingMode.MXFP8_1D, None, hadamard.SIGNS)
    with pytest.raises(ValueError, match="decided before"):
        dequantizers.quantize(w, ScalingMode.DELAYED_TENSOR)
