"""Every public function refuses an argument of a wrong type by ValueError that names it, and takes
what its annotations name.
"""

import inspect

import pytest
import torch

from lowbit_kernels import (
    amax,
    dequantizers,
    error,
    fake_quant,
    fp8,
    fp8_block,
    grouped,
    hadamard,
    importance,
    integer,
    kv_nvfp4,
    layout,
    mx,
    nvfp4,
    typed,
)
from lowbit_kernels.formats import E2M1, E4M3
from tests.test_api_page import IN_TABLES, OWN_SECTION, functions

F32 = torch.float32
W, H = torch.linspace(-2, 2, 2048).reshape(16, 128), torch.ones(128)
ONE, BLOCKS = torch.tensor(1.25), torch.ones(8)
K = torch.linspace(-2, 2, 2048).reshape(16, 2, 64).bfloat16()
NVFP4, MXFP8, KV = nvfp4.quantize(W), mx.quantize_mxfp8(W), kv_nvfp4.quantize(K)
PARTS = dict(zip(("data", "scale", "global_scale"), NVFP4, strict=True))
INTEGERS = {"unsigned": False, "narrow_range": True}
STATIC = {
    "amax": BLOCKS,
    "global_amax": ONE,
    "quantize_block_scales": True,
    "fp8_max_for_normalization": 448.0,
}
FORMATS = {"num_bits": (2, 1), "scale_bits": (4, 3)}
MSE = {"rule": "mse", "importance": H, "layout": "linear", "nibbles": "low"}
SIGNS = {"signs": hadamard.SIGNS}
CALLS = {  # arguments that are right, all by name
    "amax.blocks": {"w": W, "width": 16},
    "amax.matrix": {"w": W},
    "amax.rows": {"w": W},
    "dequantizers.dequantize": {
        **dict(zip(("data", "scale", "global_scale"), NVFP4, strict=True)),
        **SIGNS,
        "dtype": F32,
        "mode": "nvfp4_1d",
    },
    "dequantizers.quantize": {"w": W, "mode": "nvfp4_1d", "scale": None, **SIGNS},
    "error.bands": {"w": W, "v": W},
    "error.bands_of_parts": {"w": W, "parts": PARTS, "element": E2M1, "block": (1, 16)},
    "error.bands_of_stack": {"w": W[None], "v": W[None]},
    "error.sums": {"w": W, "v": W},
    "error.sums_of_parts": {"w": W, "parts": PARTS, "element": E2M1, "block": (1, 16)},
    "fake_quant.dynamic_block_quant": {
        **{"inputs": W, "block_size": 16, "amax": ONE, "bias": ONE, "pass_through_bwd": True},
        **FORMATS,
    },
    "fake_quant.dynamic_block_quant_impl": {
        **{"inputs": W, "block_size": 16, "amax": ONE},
        **FORMATS,
    },
    "fake_quant.fake_quant_impl": {"inputs": W, "amax": ONE, "num_bits": 8, **INTEGERS},
    "fake_quant.fake_tensor_quant": {
        **{"inputs": W, "amax": ONE, "bias": ONE, "num_bits": 8, "pass_through_bwd": False},
        **INTEGERS,
        **{"block_size": None, "axis": None},
    },
    "fake_quant.fp4_cast": {"x": W, "out_dtype": F32},
    "fake_quant.fp4_cast_impl": {"x": W, "out_dtype": F32},
    "fake_quant.fp8_eager": {"x": W, "amax": ONE},
    "fake_quant.int_cast": {"x": W, "num_bits": 8, **INTEGERS},
    "fake_quant.int_cast_impl": {"x": W, "num_bits": 8, **INTEGERS},
    "fake_quant.scaled_e4m3": {
        **{"inputs": W, "amax": ONE, "bias": ONE, "E": 4, "M": 3, "pass_through_bwd": False},
    },
    "fake_quant.scaled_e4m3_impl": {"inputs": W, "amax": ONE},
    "fake_quant.static_block_fp4": {
        **{"x": W, **STATIC, "out_dtype": F32, "pass_through_bwd": False},
    },
    "fake_quant.static_block_fp4_impl": {"x": W, **STATIC, "out_dtype": F32},
    "fake_quant.static_fp4_scales": STATIC,
    "fp8.dequantize_channel": {
        **dict(zip(("data", "scale"), fp8.quantize_channel(W), strict=True)),
        "dtype": F32,
    },
    "fp8.dequantize_tensor": {
        **dict(zip(("data", "scale"), fp8.quantize_tensor(W), strict=True)),
        "dtype": F32,
    },
    "fp8.quantize_channel": {"w": W, "element": E4M3},
    "fp8.quantize_tensor": {"w": W, "scale": ONE, "element": E4M3},
    "fp8_block.dequantize": {
        **dict(zip(("data", "scale"), fp8_block.quantize(W), strict=True)),
        **{"dtype": F32, "high": 128},
    },
    "fp8_block.quantize": {"w": W, "rule": "amax", "high": 128, "element": E4M3},
    "grouped.quantize": {
        **{"ops": nvfp4.NVFP4, "ws": [W, W], "shared": [NVFP4[2], NVFP4[2]], "rule": "amax"},
    },
    "hadamard.rotate": {"x": W, **SIGNS},
    "hadamard.rotate_back": {"y": W, **SIGNS},
    "importance.column_weights": {"h": H, "block": 16},
    "importance.exponents_of": {"h": H},
    "importance.values_of": {"exponents": importance.exponents_of(H)},
    "integer.dequantize": {
        **dict(zip(("data", "scale"), integer.quantize_int4(W), strict=True)),
        "dtype": F32,
    },
    "integer.dequantize_channel": {
        **dict(zip(("data", "scale"), integer.quantize_channel(W), strict=True)),
        "dtype": F32,
    },
    "integer.quantize_channel": {"w": W},
    "integer.quantize_int4": {"w": W, "group": 128, "scale_dtype": F32},
    "kv_nvfp4.dequantize": {
        **{"packed": KV.packed, "scale": KV.scale, "global_scale": KV.global_scale, "dtype": F32},
    },
    "kv_nvfp4.quantize": {"x": K, "name": "x"},
    "kv_nvfp4.quantize_kv": {"k": K, "v": K},
    "kv_nvfp4.scale_offset": {"row": 1, "block": 1, "dim": 64},
    "kv_nvfp4.swizzle": {"scale": NVFP4[1]},
    "kv_nvfp4.unswizzle": {"scale": kv_nvfp4.swizzle(NVFP4[1]), "rows": 16, "dim": 128},
    "layout.swap_nibbles": {"packed": NVFP4[0]},
    "layout.swizzle": {"scale": MXFP8[1]},
    "layout.swizzled_shape": {"rows": 16, "cols": 4},
    "layout.unswizzle": {"scale": layout.swizzle(MXFP8[1]), "rows": 16, "cols": 4},
    "mx.dequantize": {"data": MXFP8[0], "scale": MXFP8[1], "dtype": F32},
    "mx.quantize": {"w": W, "element": E2M1, **MSE},
    "mx.quantize_mxfp4": {"w": W, **MSE},
    "mx.quantize_mxfp8": {"w": W, "rule": "amax", "layout": "linear"},
    "nvfp4.dequantize": {
        **dict(zip(("packed", "scale", "global_scale"), NVFP4, strict=True)),
        "dtype": F32,
    },
    "nvfp4.global_scale_of": {"amax": ONE},
    "nvfp4.quantize": {"w": W, "global_scale": NVFP4[2], **MSE},
}
PUBLIC = {
    f"{module}.{name}": function
    for module in (*OWN_SECTION, *IN_TABLES)
    for name, function in functions(module)
}


class Strange:
    """What no annotation names."""


WRONG = {
    "an object": Strange(),
    "a class": Strange,
    "a mapping": {"a": Strange()},
    "a list": [Strange()],
    "a function": print,
    "a sparse tensor": W.to_sparse(),
    "complex numbers": W.to(torch.complex64),
    "truths": W > 0,
    "a device": torch.device("cpu"),
}


def test_every_public_function_is_called_here():
    modules = (amax, dequantizers, error, fake_quant, fp8, fp8_block, grouped, hadamard)
    modules += (importance, integer, kv_nvfp4, layout, mx, nvfp4)
    assert len(modules) == len({*OWN_SECTION, *IN_TABLES})
    assert set(CALLS) == set(PUBLIC)
    for name, arguments in CALLS.items():
        assert list(inspect.signature(PUBLIC[name]).parameters).sort() == list(arguments).sort()


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_a_wrong_type_is_refused_by_its_name(name):
    PUBLIC[name](**CALLS[name])
    for parameter in CALLS[name]:
        for what, wrong in WRONG.items():
            with pytest.raises(ValueError) as caught:
                PUBLIC[name](**{**CALLS[name], parameter: wrong})
            assert parameter in str(caught.value), f"{what}: {caught.value}"


@pytest.mark.parametrize("name", CALLS)
def test_none_is_refused_where_it_is_no_default(name):
    for parameter, value in inspect.signature(PUBLIC[name]).parameters.items():
        if "None" not in str(value.annotation) and "Any" not in str(value.annotation):
            with pytest.raises(ValueError, match=rf"\b{parameter}\b"):
                PUBLIC[name](**{**CALLS[name], parameter: None})


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("fake_quant")])
def test_tensors_without_values_are_refused(name):
    for parameter, value in CALLS[name].items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ValueError, match="on meta"):
                PUBLIC[name](**{**CALLS[name], parameter: value.to("meta")})


NUMBERS = {"a bool": True, "a fraction": 1.5, "words": "1"}


@pytest.mark.parametrize("name", CALLS)
def test_no_number_is_taken_for_another_kind(name):
    """A bool is no integer, an integer no bool, a fraction no integer."""
    for parameter, value in CALLS[name].items():
        if type(value) is int:
            for wrong in NUMBERS.values():
                with pytest.raises(ValueError, match=f"{parameter} is an integer"):
                    PUBLIC[name](**{**CALLS[name], parameter: wrong})
        if type(value) is bool:
            for wrong in (0, 1, None, "yes", torch.tensor(True)):
                with pytest.raises(ValueError, match=f"{parameter} is True or False"):
                    PUBLIC[name](**{**CALLS[name], parameter: wrong})


def test_what_annotations_name_is_taken():
    def takes(annotation, x):
        return typed.kind_of(annotation, meta=False)[1](x)

    assert takes(float, 3) and not takes(float, True) and not takes(int, 3.0)
    assert takes(tuple[int, ...], [1, 2, 3]) and takes(tuple[int, ...], ())
    assert takes(tuple[int, int], (1, 2)) and not takes(tuple[int, int], (1, 2, 3))
    assert takes(int | None, None) and takes(torch.nn.Parameter, torch.nn.Parameter(W))
    assert takes(torch.Tensor, torch.nn.Parameter(W)) and not takes(torch.Tensor, W.tolist())
    quantized = torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)
    assert not takes(torch.Tensor, quantized)


def test_arguments_by_place_by_name_and_too_many():
    @typed.typed
    def add(a: int, b: int = 1) -> int:
        """Return a sum."""
        return a + b

    assert add(1) == 2 and add(1, 2) == 3 and add(b=3, a=1) == 4
    assert add.__doc__ == "Return a sum." and str(inspect.signature(add)).startswith("(a: int")
    for call in (lambda: add("1"), lambda: add(1, "1"), lambda: add(1, b=None)):
        with pytest.raises(ValueError, match="is an integer, this is"):
            call()
    for call in (lambda: add(), lambda: add(1, 2, 3), lambda: add(1, c=2)):
        with pytest.raises(TypeError):  # as Python says of every function
            call()
