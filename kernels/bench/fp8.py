"""FP8 E4M3: per tensor with its amax, cast with the scale given, per channel, 128x128; INT8."""

import peers
import torch
from roofline import Contender, Operation

from lowbit_kernels import fp8, fp8_block, integer
from lowbit_kernels.jit import references


def _scale(w: torch.Tensor) -> torch.Tensor:
    return fp8.scale_of(fp8.amax_of.matrix(w))


def _cast(w: torch.Tensor):
    scale = _scale(w)
    return lambda: fp8.quantize_tensor(w, scale)


def _tensor(w: torch.Tensor):
    return lambda: fp8.quantize_tensor(w)


def _channel(w: torch.Tensor):
    return lambda: fp8.quantize_channel(w)


def _back(w: torch.Tensor):
    data, scale = fp8.quantize_tensor(w)
    return lambda: fp8.dequantize_tensor(data, scale)


def _channel_back(w: torch.Tensor):
    data, scale = fp8.quantize_channel(w)
    return lambda: fp8.dequantize_channel(data, scale)


def _eager_cast(w: torch.Tensor):
    scale = _scale(w)[..., None, None]
    return lambda: fp8._cast_reference(w, scale)


def _compiled_cast(w: torch.Tensor):
    scale = _scale(w)[..., None, None]
    compiled = torch.compile(lambda w, s: (w.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn))
    return lambda: compiled(w, scale)


def _torch_to(w: torch.Tensor):
    return lambda: w.to(torch.float8_e4m3fn)


def _compiled_tensor(w: torch.Tensor):
    def quantize(w: torch.Tensor):
        scale = w.abs().amax().float() / 448
        return (w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    compiled = torch.compile(quantize)
    return lambda: compiled(w)


def _compiled_channel(w: torch.Tensor):
    def quantize(w: torch.Tensor):
        scale = w.abs().amax(-1, keepdim=True).float() / 448
        return (w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    compiled = torch.compile(quantize)
    return lambda: compiled(w)


def _compiled_back(w: torch.Tensor):
    data, scale = fp8.quantize_tensor(w)
    compiled = torch.compile(lambda d, s: (d.float() * s).to(torch.bfloat16))
    return lambda: compiled(data, scale[..., None, None])


def _check(w: torch.Tensor) -> None:
    scale = _scale(w)
    ours, _ = fp8.quantize_tensor(w, scale)
    reference = fp8._cast_reference(w, scale[..., None, None])
    assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def _check_channel(w: torch.Tensor) -> None:
    data, scale = fp8.quantize_channel(w)
    want = fp8.scale_of(fp8.amax_of.rows(w)).unsqueeze(-1)
    assert torch.equal(scale, want)
    assert torch.equal(data.view(torch.uint8), fp8._cast_reference(w, want).view(torch.uint8))


def _check_back(w: torch.Tensor) -> None:
    data, scale = fp8.quantize_tensor(w)
    want = (data.float() * scale[..., None, None]).to(torch.bfloat16)
    assert torch.equal(fp8.dequantize_tensor(data, scale).view(torch.int16), want.view(torch.int16))


def _block_back(w: torch.Tensor):
    parts = fp8_block.quantize(w)
    return lambda: fp8_block.dequantize(*parts)


def _check_block(w: torch.Tensor) -> None:
    _check_against_reference(fp8_block.quantize, w)


def _check_int8(w: torch.Tensor) -> None:
    _check_against_reference(integer.quantize_channel, w)


def _check_against_reference(quantize, w: torch.Tensor) -> None:
    with references():
        want = quantize(w)
    for ours, reference in zip(quantize(w), want, strict=True):
        assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))


def _bytes(w: torch.Tensor) -> float:
    return w.numel() * (w.element_size() + 1)


OPERATIONS = (
    Operation(
        "fp8 cast, scale given",
        _bytes,
        [
            Contender("lowbit", _cast),
            Contender("torch eager", _eager_cast),
            Contender("torch.compile", _compiled_cast),
            Contender("torch .to", _torch_to),
            *peers.contenders(comfy=peers.comfy_fp8),
        ],
        check=_check,
    ),
    Operation(
        "fp8 per tensor, amax + cast",
        _bytes,
        [Contender("lowbit", _tensor), Contender("torch.compile", _compiled_tensor)],
        moved=lambda w: _bytes(w) + w.numel() * w.element_size(),
        check=_check,
    ),
    Operation(
        "fp8 per channel",
        _bytes,
        [Contender("lowbit", _channel), Contender("torch.compile", _compiled_channel)],
        check=_check_channel,
    ),
    Operation(
        "fp8 per tensor dequantize",
        _bytes,
        [
            Contender("lowbit", _back),
            Contender("torch.compile", _compiled_back),
            *peers.contenders(comfy=peers.comfy_fp8_dequantize),
        ],
        check=_check_back,
    ),
    Operation(
        "fp8 per channel dequantize",
        _bytes,
        [Contender("lowbit", _channel_back)],
        check=_check_channel,
    ),
    Operation(
        "fp8 128x128",
        _bytes,
        [
            Contender("lowbit", lambda w: lambda: fp8_block.quantize(w)),
            *peers.contenders(torchao=peers.ao_fp8_block),
        ],
        check=_check_block,
    ),
    Operation("fp8 128x128 dequantize", _bytes, [Contender("lowbit", _block_back)]),
    Operation(
        "int8 per channel",
        _bytes,
        [Contender("lowbit", lambda w: lambda: integer.quantize_channel(w))],
        check=_check_int8,
    ),
)
