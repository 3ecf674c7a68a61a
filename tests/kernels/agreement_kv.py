"""The kernel of `kv_nvfp4` against its reference, as `agreement` holds the others; run as a program
it prints what differs.
"""

import json

import torch

from lowbit_kernels import kv_nvfp4
from tests.kernels.agreement import compare
from tests.kernels.samples import weights

DTYPES = (torch.bfloat16, torch.float16)


def run(device: str) -> list[str]:
    """Run all cases; return what differs."""
    found = []
    for dtype in DTYPES:
        cases = {
            f"{name} {rows} x {cols}": x
            for rows, cols in ((16, 96), (144, 80), (32, 272))
            for name, x in weights(dtype, rows, cols).items()
        }
        heads = weights(dtype, 48, 64)["wide"].view(3, 16, 64)
        cases |= {"tokens and heads": heads, "turned": heads.transpose(0, 1)}
        for name, x in cases.items():
            text = compare(lambda x=x: kv_nvfp4.quantize(x.to(device)), device)
            found += [f"{name} {dtype}: {text}"] if text else []
    return found


if __name__ == "__main__":
    print(json.dumps(run("cpu")))
