"""The kernel of `fake_kernels` against torch, as `agreement` holds the others; run as a program it
prints what differs.
"""

import json

import torch

from lowbit_kernels import fake_quant as f
from tests.kernels.agreement import compare
from tests.kernels.samples import DTYPES, weights

FEW = ("wide", "ties", "subnormal", "huge", "nan", "inf")


def calls(x: torch.Tensor):
    """Yield each way to round `x [6, 96]`, with its name."""
    device = x.device
    rows = torch.tensor([0.0, 1e-9, 0.7, 3.0, 1000.0, 1e30], device=device)
    blocks = torch.linspace(0, 4, 36, device=device).view(6, 6)
    one = torch.tensor(1.25, device=device)
    yield "int8", lambda: f.fake_tensor_quant(x, one)
    yield "int8, all of the range", lambda: f.fake_tensor_quant(x, one, narrow_range=False)
    yield "int16", lambda: f.fake_tensor_quant(x, one, num_bits=16)
    yield "int4 by rows", lambda: f.fake_tensor_quant(x, rows, num_bits=4, axis=0)
    yield "int4 by blocks", lambda: f.fake_tensor_quant(x, blocks, num_bits=4, block_size=16)
    yield "int4 by columns", lambda: f.fake_tensor_quant(x, x[0].abs(), num_bits=4, axis=1)
    yield "uint8", lambda: f.fake_tensor_quant(x.abs(), one, unsigned=True)
    yield "stack", lambda: f.fake_quant_impl(x.view(2, 3, 96), rows[:2].view(2, 1, 1))
    yield "some of a stack", lambda: f.fake_quant_impl(x.view(2, 3, 96), rows[:3].view(3, 1))
    yield "e4m3", lambda: f.scaled_e4m3(x, one)
    yield "e4m3 by rows", lambda: f.scaled_e4m3(x, rows[:, None])
    yield "e4m3, no scale", lambda: f.fp8_eager(x, None)
    yield "fp4", lambda: f.fp4_cast(x)
    yield "fp4 to fp32", lambda: f.fp4_cast(x, torch.float32)
    yield "int_cast", lambda: f.int_cast(x, 8)
    yield "int_cast, all of the range", lambda: f.int_cast(x, 4, narrow_range=False)
    yield "static", lambda: f.static_block_fp4(x, blocks)
    yield "static, fp32 scales", lambda: f.static_block_fp4(x, blocks, None, False)
    yield "static to bf16", lambda: f.static_block_fp4(x, rows, out_dtype=torch.bfloat16)
    odd = torch.tensor([torch.nan, torch.inf, 0.0, 1.0, 6.0, 1e-30], device=device)
    yield "static, no numbers", lambda: f.static_block_fp4(x, odd, None, False)
    yield "turned", lambda: f.fake_tensor_quant(x.t(), x.t().abs().amax(1, keepdim=True))


def run(device: str) -> list[str]:
    """Run all cases; return what differs."""
    found = []
    for dtype in DTYPES:
        for sample, x in weights(dtype).items():
            if device == "cpu" and dtype == torch.float16 and sample not in FEW:
                continue  # the interpreter takes its time
            for name, call in calls(x.to(device)):
                text = compare(call, device)
                found += [f"{name} of {sample} {dtype}: {text}"] if text else []
    return found


if __name__ == "__main__":
    print(json.dumps(run("cpu")))
