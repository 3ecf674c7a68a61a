"""The CPU paths against the references, bit for bit: torch in slices, and numba where installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from lowbit_kernels import amax, cpu, fp8, fp8_block, integer, mx, nvfp4
from lowbit_kernels.formats import E2M1, E4M3, E5M2
from lowbit_kernels.jit import INTERPRETED, references
from tests.kernels.samples import DTYPES, difference, weights

HAS_NUMBA = importlib.util.find_spec("numba") is not None
NEEDS_NUMBA = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed (extra cpu)")
PATHS = ("torch", pytest.param("numba", marks=NEEDS_NUMBA))
SCALES = (1.0, 0.1, 3e-5, 2.0**-100, 2.0**110, 1e-44, 0.0, torch.inf, torch.nan)
PATTERNS = torch.arange(65536).to(torch.int16)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes every tensor")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Send what is not small to one path, cut into several slices."""
    monkeypatch.setenv("LOWBIT_NUMBA", "1" if request.param == "numba" else "0")
    monkeypatch.setattr(cpu, "SLICE", 8192 if request.param == "torch" else 4096)
    monkeypatch.setattr(cpu, "LARGE", 20000)
    found = cpu.compiled(torch.empty(20000))
    assert (found is not None) == (request.param == "numba"), "another path would be tested"
    return request.param


@pytest.fixture
def alike(path, monkeypatch):
    """Return a function that holds a call against the same call of the references."""

    def check(name, call):
        taken = []
        true_takes = cpu.takes
        monkeypatch.setattr(cpu, "takes", lambda w: taken.append(true_takes(w)) or taken[-1])
        got = call()
        assert any(taken), f"{name} did not come to the path"
        with references():
            want = call()
        got, want = ((r,) if isinstance(r, torch.Tensor) else r for r in (got, want))
        found = [difference(a, b) for a, b in zip(got, want, strict=True)]
        assert not any(found), f"{name}: {found}"
        monkeypatch.setattr(cpu, "takes", true_takes)

    return check


def large(dtype):
    """Yield weights by name, of more elements than are small, and every pattern of 16 bits."""
    samples = weights(dtype)
    for name, w in samples.items():
        yield name, w.repeat(20, 4)
    yield "stack", torch.stack([samples["wide"].repeat(16, 6), samples["gauss"].repeat(16, 6)])
    yield "many", torch.stack([samples["gauss"] * i for i in range(40)])
    yield "transposed", samples["wide"].repeat(16, 6).t()
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (96, 416), generator=generator).to(torch.int32)
    yield "any bits", bits.view(torch.float32).nan_to_num().to(dtype)


def every(dtype):
    """Return all patterns of 16 bits, in order and mixed, as a finite and as a whole matrix."""
    w = PATTERNS.view(dtype if dtype != torch.float32 else torch.bfloat16).to(dtype)
    mixed = w[torch.arange(65536) * 421 % 65536]
    finite = torch.where(mixed.isfinite(), mixed, 0)
    return {
        "in order": w.view(-1, 512),
        "mixed": mixed.view(-1, 512),
        "finite": finite.view(-1, 512),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestQuantize:
    def test_fp8(self, dtype, alike):
        for name, w in large(dtype):
            alike(name, lambda w=w: fp8.quantize_tensor(w))
            alike(name, lambda w=w: fp8.quantize_channel(w))

    def test_fp8_of_every_pattern(self, dtype, alike):
        for name, w in every(dtype).items():
            for scale in SCALES:
                given = torch.tensor(scale)
                alike(f"{name} {scale}", lambda w=w, s=given: fp8.quantize_tensor(w, s))
            alike(f"{name} rows", lambda w=w: fp8.quantize_channel(w))

    @pytest.mark.parametrize("element", (E4M3, E5M2, E2M1), ids=lambda e: e.name)
    def test_mx(self, dtype, element, alike):
        for name, w in [*large(dtype), *every(dtype).items()]:
            for rule in mx.RULES:
                if rule != "mse" or name in ("wide", "nan"):
                    alike(f"{name} {rule}", lambda w=w, r=rule: mx.quantize(w, element, r))

    def test_mx_searches(self, dtype, alike):
        samples = dict(large(dtype))
        for name in ("wide", "tiny_blocks", "nan", "inf", "stack"):
            w = samples[name]
            alike(name, lambda w=w: mx.quantize(w, E2M1, "mse"))
            h = torch.linspace(0, 3, w.shape[-1])
            alike(f"{name} weighted", lambda w=w, h=h: mx.quantize(w, E2M1, "mse", importance=h))

    def test_nvfp4(self, dtype, alike):
        for name, w in large(dtype):
            alike(name, lambda w=w: nvfp4.quantize(w))

    def test_nvfp4_searches(self, dtype, alike):
        samples = dict(large(dtype))
        for name in ("wide", "huge", "subnormal", "tiny_blocks", "nan", "inf", "stack"):
            w = samples[name]
            alike(name, lambda w=w: nvfp4.quantize(w, None, "mse"))
            h = torch.linspace(0, 3, w.shape[-1])
            alike(f"{name} weighted", lambda w=w, h=h: nvfp4.quantize(w, None, "mse", h))
        for name in ("gauss", "ties", "one_subnormal", "nan"):
            alike(f"{name} all", lambda w=samples[name]: nvfp4.quantize(w, None, "mse_all"))
        given = torch.tensor(1e-44)
        alike("no step", lambda: nvfp4.quantize(samples["wide"], given, "mse_all"))

    def test_nvfp4_in_the_other_order(self, dtype, alike):
        samples = dict(large(dtype))
        ragged = weights(dtype, 150, 304)["wide"]
        for name, w in (("ragged", ragged), ("stack", samples["stack"]), ("nan", samples["nan"])):
            for rule in ("four_over_six", "2d"):
                alike(f"{name} {rule}", lambda w=w, r=rule: nvfp4.quantize(w, None, r))

    def test_nvfp4_of_every_pattern(self, dtype, alike):
        for name, w in every(dtype).items():
            for scale in SCALES:
                given = torch.tensor(scale)
                alike(f"{name} {scale}", lambda w=w, g=given: nvfp4.quantize(w, g))

    def test_the_rest(self, dtype, alike):
        for name, w in large(dtype):
            alike(name, lambda w=w: amax.matrix(w))
            alike(name, lambda w=w: integer.quantize_channel(w))
            for rule in fp8_block.RULES:
                for high in (1, 128):
                    alike(name, lambda w=w, r=rule, h=high: fp8_block.quantize(w, r, h))


def test_nvfp4_at_each_midpoint(alike):
    # Of a block with amax 6 and step s the midpoints, and the bf16 numbers on either side.
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    steps = torch.linspace(0.5, 2, 600)[:, None]
    middle = (midpoints * steps).to(torch.bfloat16).view(torch.int16)
    near = torch.cat([middle - 1, middle, middle + 1], dim=1).view(torch.bfloat16)
    w = torch.zeros(600, 48, dtype=torch.bfloat16)
    w[:, :15], w[:, 16:22] = near[:, :15], near[:, 15:]
    w[:, [15, 31]] = (6 * steps).to(torch.bfloat16)
    for scale in (1.0, 0.37, 2.0**-7):
        alike(f"{scale}", lambda s=scale: nvfp4.quantize(w, torch.tensor(s)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(dtype, alike):
    codes = torch.arange(256, dtype=torch.uint8)
    all_pairs = codes.repeat(256).view(256, 256)
    e8m0 = codes.repeat_interleave(8).view(256, 8)
    steps = torch.tensor([1.0, 0.3, 1e38, 1e-43, torch.nan, torch.inf, -0.0, 448.0]).repeat(32)
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2):
        data = all_pairs.view(stored)
        alike(f"mx {stored}", lambda d=data: mx.dequantize(d, e8m0, dtype))
    wide = torch.cat([all_pairs, all_pairs], 1)
    alike("mxfp4", lambda: mx.dequantize(wide, torch.cat([e8m0] * 4, 1), dtype))
    e4m3 = codes.repeat_interleave(64).view(256, 64).view(torch.float8_e4m3fn)
    for g in (1.0, 0.3, 1e-44, 1e37, torch.nan):
        given = torch.tensor(g)
        alike(f"nvfp4 {g}", lambda g=given: nvfp4.dequantize(wide, e4m3, g, dtype))
    data = all_pairs.view(torch.float8_e4m3fn)
    alike("channel", lambda: fp8.dequantize_channel(data, steps[:, None], dtype))
    stack = data.view(8, 32, 256)
    alike("tensor", lambda: fp8.dequantize_tensor(stack, steps[:8], dtype))
    signed = all_pairs.view(torch.int8)
    alike("int8", lambda: integer.dequantize_channel(signed, steps[:, None], dtype))
    ragged = data[:131, :133].contiguous()
    with references():
        parts = fp8_block.quantize(ragged.float().nan_to_num(), "amax")
        rows = fp8_block.quantize(ragged.float().nan_to_num(), "amax", 1)
    tall = data.repeat(2, 1)[:300]
    scale = parts[1].repeat(2, 1)[:3]
    alike("128x128", lambda: fp8_block.dequantize(tall, scale[:, :2], dtype))
    alike("1x128", lambda: fp8_block.dequantize(tall[:131], rows[1], dtype, 1))


def test_bytes_do_not_depend_on_threads(path):
    w = weights(torch.bfloat16)["wide"].repeat(40, 8)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([*nvfp4.quantize(w), *mx.quantize_mxfp8(w), *fp8.quantize_channel(w)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert not any(map(difference, other, found[0]))


def test_a_weight_that_learns_is_taken(path):
    w = torch.randn(256, 256)
    with references():
        want = nvfp4.quantize(w)
    got = nvfp4.quantize(w.clone().requires_grad_())
    assert not any(map(difference, got, want))


def python(code, **env):
    """Run `code` in a process of its own; return what it prints."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", **kept, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LOADED = """
import sys, torch
{before}
from lowbit_kernels import MODULES, nvfp4
import importlib
for name in MODULES: importlib.import_module("lowbit_kernels." + name)
assert "numba" not in sys.modules or sys.modules["numba"] is None
nvfp4.quantize(torch.randn(64, 64)); print("numba" in sys.modules)
nvfp4.quantize(torch.randn(1024, 1024)); print(sys.modules.get("numba") is not None)
"""


@NEEDS_NUMBA
def test_numba_is_imported_for_what_is_large_alone():
    assert python(LOADED.format(before="")) == ["False", "True"]
    assert python(LOADED.format(before=""), LOWBIT_NUMBA="0") == ["False", "False"]


def test_without_numba_torch_does_it():
    assert python(LOADED.format(before='sys.modules["numba"] = None')) == ["True", "False"]


@NEEDS_NUMBA
def test_code_is_compiled_where_it_cannot_be_kept(monkeypatch):
    numba = pytest.importorskip("numba")
    vectors = importlib.import_module("lowbit_kernels.cpu_vectors")
    true_njit = numba.njit

    def njit(*args, **options):
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return true_njit(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert vectors.jit(lambda x: x + 1)(2) == 3


@NEEDS_NUMBA
def test_compiled_code_is_kept_by_the_digest_of_its_sources(tmp_path):
    vectors = importlib.import_module("lowbit_kernels.cpu_vectors")
    code = "import torch; from lowbit_kernels import nvfp4; nvfp4.quantize(torch.ones(1024, 1024))"
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)) == []
    kept = sorted(tmp_path.rglob("*.nbc"))
    assert kept and all(vectors._DIGEST in path.name for path in kept)
    before = [path.stat().st_mtime_ns for path in kept]
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)) == []
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.nbc"))] == before


@NEEDS_NUMBA
def test_vectors_refuse_what_does_not_lie_side_by_side():
    numba = pytest.importorskip("numba")
    casts = importlib.import_module("lowbit_kernels.cpu_casts")
    every_other = torch.zeros(4, 512, dtype=torch.int32)[:, ::2].numpy()
    tops = torch.zeros(4, dtype=torch.int32).numpy()
    with pytest.raises((numba.core.errors.NumbaError, TypeError), match="side by side"):
        casts.tops_of_groups(every_other, numba.int32(0x7FFFFFFF), tops)


PEAK = """
import resource, torch
from lowbit_kernels import {module}
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
w = torch.zeros(4096, 8192, dtype=torch.bfloat16)
w.view(torch.int16).random_(0x3C00, 0x3F00)
{call}(w[:8].repeat(8, 1))
before = peak()
parts = {call}(w)
print(peak() - before - sum(p.numel() * p.element_size() for p in parts) // 2**20)
"""


@pytest.mark.parametrize("numba", ["0", pytest.param("1", marks=NEEDS_NUMBA)])
@pytest.mark.parametrize("call", ["nvfp4.quantize", "mx.quantize_mxfp8", "fp8.quantize_tensor"])
def test_memory_is_that_of_the_results(call, numba):
    # 64 MiB of bf16; one fp32 temporary of its size would be 128. numba itself takes some 70.
    code = PEAK.format(module=call.split(".")[0], call=call)
    (extra,) = python(code, LOWBIT_NUMBA=numba)
    assert int(extra) < (30 if numba == "0" else 110)
