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


def test_a_mode_may_be_named_by_its_value(tmp_path):
    for q in some():
        named = QuantizedTensor(q.data, q.scale, q.mode.value, q.dtype, q.global_scale, q.signs)
        assert named.mode is q.mode
        named.save(tmp_path / "named.safetensors")
        assert QuantizedTensor.load(tmp_path / "named.safetensors").mode is q.mode
    with pytest.raises(ValueError, match="nvfp5"):
        QuantizedTensor(q.data, q.scale, "nvfp5")


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


@pytest.fixture
def to_jax():
    """Return a function that makes arrays of JAX, of the same bits, in the dtypes of tensors."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    one_byte = {torch.float8_e4m3fn: jax.numpy.float8_e4m3fn, torch.uint8: jax.numpy.uint8}

    def convert(tensor):
        if tensor is None or tensor.dtype not in one_byte:
            return None if tensor is None else jax.numpy.asarray(tensor.numpy())
        array = jax.numpy.asarray(tensor.view(torch.uint8).numpy())
        return jax.lax.bitcast_convert_type(array, one_byte[tensor.dtype])

    return convert


@pytest.mark.parametrize("mode", ScalingMode)
def test_arrays_of_jax(mode, to_jax):
    w = samples.weights(torch.float32)["gauss"]
    scale = torch.tensor(0.01) if mode is ScalingMode.DELAYED_TENSOR else None
    q = dequantizers.quantize(w, mode, scale)
    data, scales, shared = (to_jax(part) for part in (q.data, q.scale, q.global_scale))
    got = dequantize(data, scales, torch.float32, mode, shared)
    assert difference(got, q.dequantize()) == ""
    assert dequantizers._tensor(data).data_ptr() == data.unsafe_buffer_pointer()


def test_values_go_back_to_jax(to_jax):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    values = dequantize(to_jax(torch.ones(2, 32)), None, torch.float32, ScalingMode.NO_SCALING)
    array = jax.dlpack.from_dlpack(values)
    assert array.shape == (2, 32) and float(array.sum()) == 64
    codes = jax.lax.bitcast_convert_type(jax.numpy.arange(3, dtype="uint8"), "float8_e8m0fnu")
    assert dequantizers._tensor(codes).dtype == torch.float8_e8m0fnu
    with pytest.raises(ValueError, match="by DLPack"):
        dequantizers._tensor(jax.numpy.ones(4, "float4_e2m1fn"))


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
    "sparse": ((torch.ones(2, 2).to_sparse(), None, F32, ScalingMode.NO_SCALING), "dense tensor"),
    "a mode that is none": ((DATA, ONE, F32, "fp8"), "no scaling mode 'fp8': there is no_scaling"),
    "scale of another device": (
        (PACKED, E4M3.to("meta"), F32, ScalingMode.NVFP4_1D, ONE),
        "on meta",
    ),
    "fp32 scales": ((PACKED, E4M3.float(), F32, ScalingMode.NVFP4_1D, ONE), "float8_e4m3fn"),
    "signs in words": (
        (PACKED, E4M3, F32, ScalingMode.NVFP4_1D, ONE, "+" * 16),
        "signs is a list or tuple",
    ),
    "signs": ((PACKED, E4M3, F32, ScalingMode.NVFP4_1D, ONE, (1, 2)), "sixteen"),
    "signs of a value": (
        (PACKED, E4M3, F32, ScalingMode.NVFP4_1D, ONE, (True,) * 16),
        "each an integer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        dequantize(*arguments)


@pytest.mark.parametrize("signs", ((True,) * 16, (1.0,) * 16, (1,) * 15))
def test_a_value_takes_the_signs_that_it_can_use(signs):
    with pytest.raises(ValueError, match="signs are sixteen of 1 and -1"):
        QuantizedTensor(PACKED, E4M3, ScalingMode.NVFP4_1D, F32, ONE, signs)


@pytest.mark.parametrize("mode", ScalingMode)
def test_what_is_no_weight_is_refused(mode):
    w = torch.ones(2, 32)
    for bad, words in (
        (None, "dense tensor of real numbers, this is NoneType"),
        ([1.0], "dense tensor of real numbers, this is list"),
        (w.double(), "float64"),
        (w.int(), "int32"),
        (w.to_sparse(), "dense"),
    ):
        with pytest.raises(ValueError, match=words):
            dequantizers.quantize(bad, mode, ONE.reshape(()))


@pytest.mark.parametrize("mode", ScalingMode)
def test_nothing_of_something_and_its_name(mode, tmp_path):
    """No rows, no columns; a mode by its value; gradients stay outside; and into a file."""
    delayed = mode is ScalingMode.DELAYED_TENSOR
    for shape in ((0, 64), (4, 0), (2, 0, 64)):
        scale = torch.full(shape[:-2], 0.1) if delayed else None
        q = dequantizers.quantize(torch.zeros(shape), mode.value, scale)
        assert q.mode is mode
        assert q.dequantize().shape == shape
        q.save(tmp_path / "q")
        assert QuantizedTensor.load(tmp_path / "q").dequantize().shape == shape
    leaf = torch.nn.Parameter(torch.ones(4, 64))
    q = dequantizers.quantize(leaf, mode, torch.tensor(0.1) if delayed else None)
    assert not any(p.requires_grad for p in (q.data, q.scale, q.global_scale) if p is not None)


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "q"
    for held, dtype, words in (
        (torch.ones(2, 2, device="meta"), F32, "no bytes"),
        (torch.ones(2, 2).to_sparse(), F32, "dense tensor"),
        (torch.ones(2, 2), torch.float64, "not as torch.float64"),
    ):
        with pytest.raises(ValueError, match=words):
            QuantizedTensor(held, None, ScalingMode.NO_SCALING, dtype).save(path)
        assert not path.exists()
    for mode, dtype, words in (("fp8", "float32", "scaling mode"), ("no_scaling", "int8", "int8")):
        said = {"format": "lowbit.quantized_tensor", "mode": mode, "dtype": dtype}
        tensor_file.write(path, {"data": torch.ones(2)}, said)
        with pytest.raises(ValueError, match=words):
            QuantizedTensor.load(path)
    next(some()).save(bytes(path))
    assert QuantizedTensor.load(bytes(path)).data.shape == next(some()).data.shape


def test_memory_that_cannot_be_taken_is_refused():
    class Elsewhere:
        def __dlpack__(self, **_):
            raise BufferError("no such memory here")

        def __dlpack_device__(self):
            return (1, 0)

    with pytest.raises(ValueError, match="no such memory here"):
        dequantize(Elsewhere(), None, F32, ScalingMode.NO_SCALING)


def test_quantizing_is_refused_with_what_a_mode_has_not():
    w = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="no scale"):
        dequantizers.quantize(w, ScalingMode.MXFP8_1D, ONE)
    with pytest.raises(ValueError, match="no rotation"):
        dequantizers.quantize(w, ScalingMode.MXFP8_1D, None, hadamard.SIGNS)
    with pytest.raises(ValueError, match="decided before"):
        dequantizers.quantize(w, ScalingMode.DELAYED_TENSOR)
