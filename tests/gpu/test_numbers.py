"""F16 on a CUDA device: numbers and shapes that arithmetic stumbles over have the bytes and figures
that they have on the CPU, and what is refused there is refused here, in the same words."""

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import LowbitError
from lowbitcli.schemes import SCHEMES
from tests import checkpoints
from tests.cases.test_numbers import EXTREMES, TENSORS, one

pytestmark = pytest.mark.gpu

SCHEME_NAMES = [scheme.name for scheme in SCHEMES]
WRONG = {str(x): one(x, 1.0) for x in (torch.nan, torch.inf, -torch.inf)}


def by(device, source, output, scheme):
    """Return the bytes and figures of a run, or what it refuses with."""
    request = api.Request(scheme=scheme, container="lowbit")
    try:
        done = api.quantize(source, output, request, device=device)
    except LowbitError as error:
        assert not output.exists()
        return type(error), error.message, error.hint
    return checkpoints.hashes(done.output), done.errors


def back(device, stored, output, dtype):
    """Return the bytes of numbers that are decoded, or what that refuses with."""
    try:
        return checkpoints.hashes(api.dequantize(stored, output, dtype=dtype, device=device).output)
    except LowbitError as error:
        return type(error), error.message, error.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_the_bytes_of_the_cpu(tmp_path, scheme, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    source = checkpoints.write(tmp_path / "in.safetensors", tensors)
    cpu, cuda = (
        by(device, source, tmp_path / device / "out.safetensors", scheme)
        for device in ("cpu", "cuda")
    )
    assert cuda == cpu and isinstance(cpu[0], dict)


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_what_is_refused(tmp_path, scheme):
    for number, (name, tensor) in enumerate({**EXTREMES, **WRONG}.items()):
        source = checkpoints.write(tmp_path / f"in{number}.safetensors", {"w.weight": tensor})
        cpu, cuda = (
            by(device, source, tmp_path / f"{device}{number}.safetensors", scheme)
            for device in ("cpu", "cuda")
        )
        assert cuda == cpu, name


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_what_is_stored_is_decoded_to_the_bytes_of_the_cpu(tmp_path, scheme):
    source = checkpoints.write(tmp_path / "in.safetensors", TENSORS)
    stored = tmp_path / "stored.safetensors"
    by("cpu", source, stored, scheme)
    for dtype in ("fp32", "bf16", "fp16"):  # the last cannot hold all of it, and says so
        cpu, cuda = (
            back(device, stored, tmp_path / f"{device}-{dtype}.safetensors", dtype)
            for device in ("cpu", "cuda")
        )
        assert cuda == cpu and isinstance(cpu, dict) == (dtype != "fp16"), dtype
