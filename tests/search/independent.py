"""Figures of a recipe that the search has no part in: quantize by it, verify, add up."""

import math
import re
from pathlib import Path

import pytest

from lowbitcli import api


def files(folder: Path) -> int:
    """Return the bytes of the safetensors files of a directory."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def lost(source: Path, folder: Path, how: api.Request) -> tuple[int, float]:
    """Quantize, verify, and return the bytes of the files and the error in all as verify has it,
    experts of one projection as one matrix."""
    api.quantize(source, folder, how, device="cpu")
    found = api.verify(folder, against=source, device="cpu")
    assert found.passed
    matrices: dict[str, tuple[float, float]] = {}
    for row in found.weights:
        if row.how == "quantized":
            key = re.sub(r"experts\.\d+", "experts", row.name)
            error, signal = matrices.get(key, (0.0, 0.0))
            squared = row.figures.norm**2
            matrices[key] = error + row.figures.relative**2 * squared, signal + squared
    return files(folder), math.fsum(error / signal for error, signal in matrices.values())


def beats_every_uniform_scheme(
    source: Path, folder: Path, found: api.Found, schemes=("nvfp4", "mxfp8", "fp8")
) -> int:
    """Hold a recipe against every uniform scheme that is no larger; return how many there are."""
    path = folder / "chosen.yaml"
    path.write_text(found.chosen.text)
    size, error = lost(source, folder / "chosen", api.Request(recipe=path))
    assert size == found.chosen.bytes_out
    assert error == pytest.approx(found.chosen.solution.error, rel=1e-6)
    beaten = 0
    for scheme in schemes:
        other_size, other = lost(source, folder / scheme, api.Request(scheme=scheme))
        assert other == pytest.approx(found.uniform[scheme].error, rel=1e-6)
        if other_size <= size:
            assert error < other
            beaten += 1
    return beaten


def held(source: Path, folder: Path, bits: float) -> int:
    """Choose under a budget, which must be met to 1 % and all but optimally, and return how many
    uniform schemes of no more bytes have more error: all of them."""
    found = api.choose(source, api.Wanted(bits=bits), api.Allowed("cpu"))
    solution = found.chosen.solution
    assert 0.99 * bits <= found.bits(solution.cost) <= bits
    assert solution.gap < 1e-4
    beaten = beats_every_uniform_scheme(source, folder, found)
    print(
        f"\n{source.name} {bits:g}: {found.bits(solution.cost):.4f} bits, "
        f"{found.db(solution.error):.2f} dB, gap {solution.gap:.2g}, {len(found.scores)} units, "
        f"{found.seconds:.1f} s, {found.peak_rss / 2**20:.0f} MiB, {beaten} beaten"
    )
    return beaten
