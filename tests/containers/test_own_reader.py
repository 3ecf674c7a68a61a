"""A `lowbit` file can be read with nothing but what docs say of it.

`read` below is such a reader: it uses the JSON of the header, and no code of lowbit.
"""

import json
import struct

import numpy as np
import pytest

from lowbitcli.api import Request, dequantize, quantize
from tests import checkpoints
from tests.checkpoints import LAYER, weight

SCHEMES = ("fp8", "fp8-dynamic", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int8", "fp8-e5m2", "int4")


def e2m1(code):
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[code & 7]
    return np.where(code & 8, -value, value)


def e4m3(code):
    exponent, mantissa = (code >> 3 & 15).astype(int), (code & 7).astype(np.float32)
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(code & 128, -value, value).astype(np.float32)


def int4(code):
    return np.where(code & 8, code.astype(np.float32) - 16, code).astype(np.float32)


DECODE = {
    "E2M1": lambda raw: e2m1(np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)),
    "E4M3": e4m3,
    "E8M0": lambda raw: (2.0 ** (raw.astype(np.float64) - 127)).astype(np.float32),
    "E5M2": lambda raw: (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32),
    "INT4": lambda raw: int4(np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1)),
    "INT8": lambda raw: raw.view(np.int8).astype(np.float32),
    "F32": lambda raw: raw.view(np.float32).reshape(raw.shape[:-1]),
    "F16": lambda raw: raw.view(np.float16).reshape(raw.shape[:-1]).astype(np.float32),
    "BF16": lambda raw: (
        (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(raw.shape[:-1])
    ),
}


def read(path):
    """Return name -> (values, dtype of the original)."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    said = header["__metadata__"]
    convention = json.loads(said["lowbit.format"])
    assert convention["version"] == 1 and convention["nibble_order"] == "low_first"
    assert convention["scale_meaning"] == convention["global_scale_meaning"] == "multiply"
    weights = {}
    for name, entry in json.loads(said["lowbit.weights"]).items():
        raw = {}
        for part, tensor in entry["tensors"].items():
            place = header[tensor]
            start, stop = (8 + length + offset for offset in place["data_offsets"])
            width = {"F32": (4,), "F16": (2,), "BF16": (2,)}.get(place["dtype"], ())
            raw[part] = np.frombuffer(data[start:stop], np.uint8).reshape(*place["shape"], *width)
        rows, cols = entry["shape"]
        high, wide = entry["block"]
        step = DECODE[entry["scale_format"]](raw["scale"])
        if "global_scale" in raw:
            step = step * DECODE["F32"](raw["global_scale"])
        if high is not None:
            step = np.repeat(np.repeat(step, high, 0), wide or cols, 1)[:rows, :cols]
        value = DECODE[entry["element"]](raw["data"]) * step
        assert value.dtype == np.float32 and value.shape == (rows, cols)
        weights[name] = (value, entry["dtype"])
    return weights


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_reads_what_dequantize_writes(tmp_path, scheme):
    wide = 4 if scheme == "int4" else 1  # blocks of 128 columns
    tensors = {
        LAYER + "mlp.down_proj.weight": weight(48, 64 * wide),
        LAYER + "mlp.up_proj.weight": weight(64, 96 * wide, 1e-3).float(),
        LAYER + "mlp.gate_proj.weight": weight(64, 96 * wide, 100).half(),
        LAYER + "norm.weight": weight(1, 64)[0],
    }
    source = checkpoints.write(tmp_path / "x.safetensors", tensors)
    request = Request(scheme=scheme)
    done = quantize(source, tmp_path / "low.safetensors", request, device="cpu")
    back = dequantize(done.output, tmp_path / "back.safetensors", dtype="fp32", device="cpu")
    found = read(done.output)
    assert {name: dtype for name, (_, dtype) in found.items()} == {
        LAYER + "mlp.down_proj.weight": "BF16",
        LAYER + "mlp.up_proj.weight": "F32",
        LAYER + "mlp.gate_proj.weight": "F16",
    }
    wanted = checkpoints.read(back.output)
    for name, (value, _) in found.items():
        assert value.tobytes() == checkpoints.raw(wanted[name]), name
