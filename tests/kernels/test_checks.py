"""Parts that do not belong together are refused before anything reads them."""

import pytest
import torch

from lowbit_kernels import checks, error, fp8, grouped, mx, nvfp4
from lowbit_kernels.formats import E2M1, INT8
from tests.kernels.operations import QUANTIZERS
from tests.kernels.test_alone import KERNELS, run

ROWS = {"few": (2, 16, 256), "sliced on the CPU": (2, 256, 256)}  # rows that blocks of 128 share


def parts_of(name: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return list(QUANTIZERS[name][0](w))


def refused(name: str, parts: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(ValueError, match=r"belong|codes are|values come|no whole|group of"):
        QUANTIZERS[name][1](*parts, dtype)


@pytest.mark.parametrize("shape", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_scales_of_another_shape_dtype_or_device_are_refused(name, shape):
    parts = parts_of(name, shape)
    for place in range(1, len(parts)):
        scale = parts[place]
        wrong = [
            scale[:1],
            scale[None],
            torch.cat((scale, scale[:1])),
            scale.to(torch.float64),
        ]
        if scale.dim() > 1:
            wrong += [scale[:, :-1], torch.cat((scale, scale), dim=1), scale[0]]
        else:
            wrong += [scale[0], scale[:, None]]
        for other in wrong:
            refused(name, [other if i == place else part for i, part in enumerate(parts)])
        elsewhere = torch.empty_like(scale, device="meta")
        with pytest.raises(ValueError, match="on meta"):
            QUANTIZERS[name][1](*parts[:place], elsewhere, *parts[place + 1 :], torch.float32)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_codes_that_are_none_are_refused(name):
    parts = parts_of(name, ROWS["few"])
    for codes in (parts[0].view(torch.int16), parts[0].to(torch.float32), parts[0][0, 0]):
        refused(name, [codes, *parts[1:]])
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        refused(name, parts, dtype)


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name.startswith(("mx", "nvfp4"))])
def test_codes_without_whole_blocks_are_refused(name):
    data, scale, *shared = parts_of(name, ROWS["few"])
    refused(name, [data[..., :-4], scale[..., :-1], *shared])


@pytest.mark.parametrize(
    "scale",
    [torch.ones(3), torch.ones(()), torch.ones(2, 1), torch.ones(2).double(), torch.ones(1)],
    ids=["too many", "one", "an axis more", "fp64", "too few"],
)
def test_shared_scales_that_are_not_one_to_a_matrix_are_refused(scale):
    w = torch.randn(ROWS["few"])
    for rule in nvfp4.LARGEST_SCALE:
        with pytest.raises(ValueError, match="global scale belonging"):
            nvfp4.quantize(w, scale, rule)
    with pytest.raises(ValueError, match="scale belonging"):
        fp8.quantize_tensor(w, scale)
    for ops in (nvfp4.NVFP4, fp8.TENSOR):
        with pytest.raises(ValueError, match="scale belonging"):
            grouped.quantize(ops, [w, w], [scale, scale])


def test_global_scales_of_another_number_have_no_error_sums():
    w = torch.randn(ROWS["few"])
    data, scale, shared = nvfp4.quantize(w)
    for other in (torch.ones(3), shared[0]):
        parts = {"data": data, "scale": scale, "global_scale": other}
        with pytest.raises(ValueError, match="global scales do not belong"):
            error.sums_of_parts(w, parts, E2M1, (1, 16))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_carry_no_gradient(name):
    w = torch.nn.Parameter(torch.randn(128, 256, generator=torch.Generator().manual_seed(5)))
    parts = QUANTIZERS[name][0](w)
    assert not any(part.requires_grad for part in parts), [part.grad_fn for part in parts]
    scale = nvfp4.quantize(w, rule="2d")[1]
    assert not scale.requires_grad


@pytest.mark.parametrize("w", [None, [[1.0] * 32], torch.eye(32).to_sparse()])
def test_what_is_no_dense_tensor_is_refused(w):
    for quantize in (nvfp4.quantize, mx.quantize_mxfp8, fp8.quantize_tensor, fp8.quantize_channel):
        with pytest.raises(ValueError, match="a dense tensor"):
            quantize(w)


def test_what_lies_on_another_device_is_refused():
    w = torch.ones(2, 64)
    checks.check_device(w, torch.device("cpu"), "importance")
    with pytest.raises(ValueError, match="importance lies on meta, what it belongs to on cpu"):
        checks.check_device(w.to("meta"), w.device, "importance")
    for quantize in (nvfp4.quantize, mx.quantize_mxfp4):
        for wrong in (torch.ones(63), torch.ones(2, 64)):
            with pytest.raises(ValueError, match="importance is a number for each column"):
                quantize(w, rule="mse", importance=wrong)


def test_an_element_that_mx_does_not_have_is_refused():
    with pytest.raises(ValueError, match="an MX element is"):
        mx.quantize(torch.randn(4, 64), INT8)


@pytest.mark.parametrize("variable", ["TRITON_INTERPRET", "LOWBIT_TRITON"])
def test_triton_that_was_asked_for_and_is_not_there_is_an_error(variable):
    code = "import sys; sys.modules['triton'] = None\nfrom lowbit_kernels import nvfp4"
    done = run(KERNELS, code, {variable: "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "ImportError: TRITON_INTERPRET=1 and LOWBIT_TRITON=1 ask for triton" in done.stderr
