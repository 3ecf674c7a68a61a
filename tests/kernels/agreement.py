"""Kernel against reference, bit for bit: the same cases for Triton's interpreter and for a GPU.

`python -m tests.kernels.agreement cpu` runs them all in this process and prints JSON, name to
difference; that needs TRITON_INTERPRET=1, which must be set before triton is imported.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lowbit_kernels import (
    amax,
    error_figures,
    fp8,
    fp8_block,
    grouped,
    hadamard,
    integer,
    layout,
    mx,
    nvfp4,
)
from lowbit_kernels.formats import E2M1, E4M3, E5M2, INT4, INT8
from lowbit_kernels.jit import references, use_kernel
from tests.kernels.samples import DTYPES, difference, weights

Call = Callable[[], "Tensor | tuple[Tensor, ...]"]


def compare(call: Call, device: str) -> str:
    """Return how the kernel's results of `call` differ from the reference's."""
    assert use_kernel(torch.ones(1, device=device)), "no kernel would run here"
    got = call()
    with references():
        want = call()
    got, want = ((r,) if isinstance(r, Tensor) else r for r in (got, want))
    assert len(got) == len(want)
    return "; ".join(filter(None, map(difference, got, want)))


def _matrices(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, a stack of two, and a view that is not contiguous."""
    samples = {name: w.to(device) for name, w in weights(dtype).items()}
    yield from samples.items()
    yield "stack", torch.stack([samples["wide"], samples["gauss"]]).reshape(2, 1, 1, 6, 96)
    yield "transposed", samples["wide"].repeat(16, 1).t()


def amax_matrix(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, w in _matrices(device, dtype):
        yield name, lambda w=w: amax.matrix(w)
    yield "long", lambda: amax.matrix(torch.ones(3, 7000, device=device, dtype=dtype).cumsum(0))


def fp8_tensor(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for element in (E4M3, E5M2):
        for name, w in _matrices(device, dtype):
            yield f"{element.name} {name}", lambda w=w, e=element: fp8.quantize_tensor(w, None, e)
        samples = weights(dtype, 5, 13)
        for name in ("wide", "nan", "inf") if dtype == torch.bfloat16 else ("wide",):
            w, scale = samples[name].to(device), torch.tensor(0.1, device=device)
            for given, s in (("ragged", None), ("given", scale), ("small", scale * 2.0**-95)):
                yield (
                    f"{element.name} {given} {name}",
                    lambda w=w, s=s, e=element: fp8.quantize_tensor(w, s, e),
                )


def fp8_channel(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    ragged = weights(dtype, 5, 13)["wide"].to(device)
    long = torch.linspace(-3, 3, 2 * 1500, device=device).to(dtype).reshape(2, -1)
    for element in (E4M3, E5M2):
        for name, w in (*_matrices(device, dtype), ("ragged", ragged), ("long", long)):
            yield f"{element.name} {name}", lambda w=w, e=element: fp8.quantize_channel(w, e)


def fp8_dequantize(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2):
        for shape in ((2, 128), (256, 1)):
            data = codes.view(stored).reshape(shape)
            for scale in (1.0, 0.3, 1e38, 1e-43, torch.nan):
                s = torch.tensor(scale, device=device)
                yield (
                    f"{stored} tensor {shape} {scale}",
                    lambda d=data, s=s: fp8.dequantize_tensor(d, s, dtype),
                )
            s = torch.linspace(1e-6, 3, shape[0], device=device)[:, None]
            yield (
                f"{stored} channel {shape}",
                lambda d=data, s=s: fp8.dequantize_channel(d, s, dtype),
            )


def mx_quantize(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for element in (E4M3, E2M1, E5M2):
        for rule in mx.RULES:
            # All weights for the two formats of the field at bf16, some for the rest.
            few = element is E5M2 or dtype != torch.bfloat16 or rule in ("floor", "ceil")
            for name, w in _matrices(device, dtype):
                if few and name not in ("wide", "subnormal", "huge", "nan", "inf"):
                    continue
                yield (
                    f"{element.name} {rule} {name}",
                    lambda w=w, e=element, r=rule: mx.quantize(w, e, r),
                )


def mx_search(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    h = (torch.linspace(0, 3, 96) ** 4).to(device)
    for element in (E2M1, E4M3):
        for name, w in _matrices(device, dtype):
            if name in ("wide", "subnormal", "nan", "inf", "stack") and h.shape == w.shape[-1:]:
                yield (
                    f"{element.name} {name}",
                    lambda w=w, e=element: mx.quantize(w, e, "mse", importance=h),
                )


def mx_dequantize(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.tensor([[0, 1, 2, 126, 127, 130, 254, 255]], dtype=torch.uint8, device=device)
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8):
        data = codes if stored != torch.uint8 else codes[::2]
        data = data.contiguous().view(stored).reshape(1, -1)
        yield str(stored), lambda d=data: mx.dequantize(d, scales, dtype)


def nvfp4_quantize(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, w in _matrices(device, dtype):
        yield name, lambda w=w: nvfp4.quantize(w)
    w = weights(dtype)["wide"].to(device)
    for g in (1e-3, 2.0**-100, 2.0**110, 1e-44, 0.0, torch.inf, torch.nan):
        given = torch.tensor(g, device=device)
        yield f"given {g}", lambda g=given: nvfp4.quantize(w, g)


def nvfp4_dequantize(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    packed = torch.arange(256, dtype=torch.uint8, device=device).repeat(8).reshape(1, -1)
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    for g in (1.0, 0.3, 1e-44, 1e37):
        given = torch.tensor(g, device=device)
        yield f"{g}", lambda g=given: nvfp4.dequantize(packed, scale.reshape(1, -1), g, dtype)


def nvfp4_search(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    # Made on the CPU: what linspace and powers give is the device's own.
    h = (torch.linspace(0, 3, 96) ** 4).to(device)
    for name, w in _matrices(device, dtype):
        few = ("wide", "subnormal", "sparse", "nan", "inf")
        if name in (few if dtype == torch.bfloat16 else few[:1]):
            yield f"mse {name}", lambda w=w: nvfp4.quantize(w, None, "mse")
    if dtype == torch.bfloat16:
        w = weights(dtype, 3)["wide"].to(device)
        yield "weighted", lambda w=w: nvfp4.quantize(w, None, "mse", h)
        yield "all", lambda w=w: nvfp4.quantize(w, None, "mse_all")
        bad = torch.ones(2, 64)
        bad[0, 5], bad[0, 20], bad[1, 7] = torch.nan, torch.inf, -torch.inf
        bad, given = bad.to(device), torch.tensor(0.01, device=device)
        for rule in nvfp4.LARGEST_SCALE:
            yield f"no numbers {rule}", lambda r=rule: nvfp4.quantize(bad[1:], None, r)
            yield f"no numbers given {rule}", lambda r=rule: nvfp4.quantize(bad, given, r)
    if device == "cuda":
        for name, w in _matrices(device, dtype):
            yield f"all {name}", lambda w=w: nvfp4.quantize(w, None, "mse_all")


def fp8_block_both(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    few = ("wide", "gauss") if dtype != torch.bfloat16 else weights(dtype)
    samples = {name: weights(dtype, 6, 96)[name].to(device) for name in few}
    samples["large"] = weights(dtype, 140, 264)["wide"].to(device)
    samples["ragged"] = weights(dtype, 131, 133)["wide"].to(device)
    samples["stack"] = torch.stack([samples["wide"], samples["gauss"]])
    choices = itertools.product((E4M3, E5M2), fp8_block.RULES, (1, 128))
    for element, rule, high in choices:
        for name, w in samples.items():
            if element is E4M3 or name not in ("sparse", "ties", "ties_scaled", "tiny_blocks"):
                yield (
                    f"{element.name} {name} {rule} {high}",
                    lambda w=w, r=rule, h=high, e=element: fp8_block.quantize(w, r, h, e),
                )
        if rule == "amax":
            for name in ("large", "ragged", "stack"):
                with references():
                    data, scale = fp8_block.quantize(samples[name], rule, high, element)
                yield (
                    f"{element.name} back {name} {high}",
                    lambda d=data, s=scale, h=high: fp8_block.dequantize(d, s, dtype, h),
                )


def integer_both(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, w in _matrices(device, dtype):
        yield name, lambda w=w: integer.quantize_channel(w)
    data = torch.arange(-128, 128, dtype=torch.int8, device=device).reshape(2, 128)
    scale = torch.tensor([[0.3], [1e-40]], device=device)
    yield "back", lambda: integer.dequantize_channel(data, scale, dtype)
    samples = dict(_matrices(device, dtype))
    samples["many"] = weights(dtype, 70, 128)["wide"].to(device)
    for group in integer.GROUPS:
        for name, w in samples.items():
            w = w if w.shape[-1] % group == 0 else torch.cat([w] * 4, -1)
            yield f"int4 {group} {name}", lambda w=w, g=group: integer.quantize_int4(w, g)
            if group == 32:
                yield f"int4 {name} in {dtype}", lambda w=w: integer.quantize_int4(w, 32, dtype)
    nibbles = torch.arange(256, dtype=torch.uint8, device=device).reshape(2, 128)
    for count in (1, 2, 8, 32):
        scales = torch.tensor([0.3, 1e-40, torch.nan, 3e38], device=device).repeat(16)[: 2 * count]
        scales = scales.reshape(2, count)
        for name, codes in (("int4", nibbles), ("int8", data), ("odd", data[:, :96])):
            yield (
                f"{name} back {count}",
                lambda d=codes, s=scales: integer.dequantize(d, s, dtype),
            )


# Groups that divide the samples' columns, which those of INT4_G128 do not.
INT4_G32 = replace(
    integer.INT4_G128,
    quantize=lambda w, _, __: dict(
        zip(("data", "scale"), integer.quantize_int4(w, 32), strict=True)
    ),
)
PARTS = {
    "fp8_tensor": (fp8.TENSOR, E4M3, (None, None)),
    "fp8_tensor_e5m2": (fp8.TENSOR_E5M2, E5M2, (None, None)),
    "fp8_channel": (fp8.CHANNEL, E4M3, (1, None)),
    "fp8_block": (fp8_block.BLOCK128, E4M3, (128, 128)),
    "int8": (integer.INT8_CHANNEL, INT8, (1, None)),
    "int4": (INT4_G32, INT4, (1, 32)),
    "mxfp8": (mx.MXFP8, E4M3, (1, 32)),
    "mxfp4": (mx.MXFP4, E2M1, (1, 32)),
    "nvfp4": (nvfp4.NVFP4, E2M1, (1, 16)),
}


def error_sums(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    samples = {name: w.to(device) for name, w in weights(dtype).items()}
    samples["stack"] = torch.stack([samples["wide"], samples["gauss"]])
    samples["tall"] = weights(dtype, 150, 160)["wide"].to(device)
    few = ("wide", "subnormal", "nan", "inf", "stack", "tall")
    for name in few if dtype == torch.bfloat16 else ("wide", "huge"):
        w = samples[name]
        for other in DTYPES if name in ("wide", "tall") else (torch.float32,):
            v = (w.float() * 1.01).to(other)
            yield f"values {name} {other}", lambda w=w, v=v: error_figures.figures(w, v)
        for scheme, (ops, element, block) in PARTS.items():
            if name in ("wide", "stack") or scheme in ("fp8_block", "nvfp4"):
                with references():
                    parts = ops.quantize(w, ops.shared(ops.measure(w), "amax"), "amax")
                yield (
                    f"{scheme} {name}",
                    lambda w=w, p=parts, e=element, b=block: error_figures.figures_of_parts(
                        w, p, e, b
                    ),
                )


def groups(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    samples = {name: w.to(device) for name, w in weights(dtype).items()}
    few = ("wide", "huge", "subnormal", "zeros", "nan", "inf")
    group = [samples[name] for name in (few if dtype == torch.bfloat16 else few[:3])]
    group.append(torch.stack([samples["wide"], samples["gauss"], samples["ties"]]))
    group.append(weights(dtype, 40, 128)["wide"].to(device))
    group.append(samples["wide"].repeat(16, 1).t())
    given = [torch.full(w.shape[:-2], 0.1 / (i + 1), device=device) for i, w in enumerate(group)]
    ragged = [weights(dtype, 5, cols)["wide"].to(device) for cols in (13, 96, 9)]
    ragged.append(ragged[0].repeat(3, 1, 1))
    plain = ("fp8_tensor", "fp8_tensor_e5m2", "fp8_channel", "int8")

    def call(ops, ws, shared=None, rule="amax"):
        parts = grouped.quantize(ops, ws, shared, rule)
        return tuple(part for one in parts for part in one.values())

    for name in (*plain, "nvfp4", "mxfp8", "mxfp4"):
        ops = PARTS[name][0]
        yield name, lambda ops=ops: call(ops, group)
        if name in ("nvfp4", "fp8_tensor", "fp8_tensor_e5m2"):
            yield f"{name} given", lambda ops=ops: call(ops, group, given)
        if name in plain:
            yield f"{name} ragged", lambda ops=ops: call(ops, ragged)
    yield "mxfp8 even", lambda: call(mx.MXFP8, group, None, "even")


def layouts(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    codes = torch.arange(2 * 130 * 7).remainder(251).to(torch.uint8).reshape(2, 130, 7).to(device)
    padded = codes.new_zeros(2, 256, 8)
    padded[:, :130, :7] = codes
    yield "swizzle", lambda: layout.swizzle(codes)
    yield "unswizzle", lambda: layout.unswizzle(padded, 130, 7)
    yield "whole tiles", lambda: layout.swizzle(codes[0, :128, :4])
    ragged = weights(dtype, 130, 96)["wide"].to(device)
    stack = torch.stack([weights(dtype, 20, 160)[name] for name in ("wide", "gauss")]).to(device)
    if dtype != torch.bfloat16:
        yield "nvfp4", lambda: nvfp4.quantize(stack, layout="128x4", nibbles="high")
        yield "mxfp4", lambda: mx.quantize_mxfp4(stack, layout="128x4", nibbles="high")
        return
    for name, w in (("ragged", ragged), ("stack", stack)):
        for nibbles in ("low", "high"):
            yield (
                f"nvfp4 {name} {nibbles}",
                lambda w=w, n=nibbles: nvfp4.quantize(w, layout="128x4", nibbles=n),
            )
            for rule in ("amax", "mse"):
                yield (
                    f"mxfp4 {rule} {name} {nibbles}",
                    lambda w=w, r=rule, n=nibbles: mx.quantize_mxfp4(w, r, "128x4", n),
                )
        yield f"mxfp8 {name}", lambda w=w: mx.quantize_mxfp8(w, layout="128x4")
        yield f"high {name}", lambda w=w: nvfp4.quantize(w, nibbles="high")
    yield "search", lambda: nvfp4.quantize(ragged, None, "mse", layout="128x4")


def other_order(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    for name, w in _matrices(device, dtype):
        if dtype != torch.bfloat16 and name not in ("wide", "huge", "subnormal", "nan"):
            continue
        for rule in ("four_over_six", "2d"):
            yield f"{rule} {name}", lambda w=w, r=rule: nvfp4.quantize(w, None, r)
        yield f"rotate {name}", lambda w=w: hadamard.rotate(w)
        yield f"rotate back {name}", lambda w=w: hadamard.rotate_back(w, (-1, 1) * 8)
    tall = weights(dtype, 40, 272)["wide"].to(device)
    given = torch.tensor(0.01, device=device)
    for rule in ("four_over_six", "2d"):
        yield f"{rule} tall", lambda r=rule: nvfp4.quantize(tall, None, r)
        yield f"{rule} given", lambda r=rule: nvfp4.quantize(tall, given, r)


FAMILIES = (
    other_order,
    layouts,
    groups,
    error_sums,
    nvfp4_search,
    fp8_block_both,
    integer_both,
    amax_matrix,
    fp8_tensor,
    fp8_channel,
    fp8_dequantize,
    mx_quantize,
    mx_search,
    mx_dequantize,
    nvfp4_quantize,
    nvfp4_dequantize,
)
CASES = {f"{f.__name__} {str(d)[6:]}": (f, d) for f in FAMILIES for d in DTYPES}


def run(name: str, device: str) -> list[str]:
    """Run a family of cases in one dtype; return what differs."""
    family, dtype = CASES[name]
    found = [(case, compare(call, device)) for case, call in family(device, dtype)]
    assert found
    return [f"{case}: {text}" for case, text in found if text]


if __name__ == "__main__":
    print(json.dumps({name: run(name, sys.argv[1]) for name in CASES}))
