"""What is seen of codes is the same by every path: in pieces, by the compiled loop, and whole."""

import importlib.util

import pytest
import torch

from lowbit_kernels import error_codes, error_looks, error_pieces
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.schemes import SCHEMES
from lowbitcli.tensors import DATA, SCALE
from lowbitcli.verify.bound import BF16_WRITER, ruler, step_of

HAS_NUMBA = importlib.util.find_spec("numba") is not None
PATHS = (False, True) if HAS_NUMBA else (False,)  # whether compiled
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SHAPES = ((130, 256), (1, 128), (257, 133))


def flipped(w, parts, generator):
    codes = parts[DATA].view(torch.uint8).view(-1)
    codes[len(codes) // 3] ^= 1
    codes[-1] ^= 0x11


def no_number(w, parts, generator):
    w[0, 0], w[-1, -1], w[-1, -2] = torch.nan, torch.inf, -torch.inf


def no_step(w, parts, generator):
    if parts[SCALE].dtype != torch.uint8:
        scale = parts[SCALE].float()
        scale.view(-1)[[0, scale.numel() // 2]] = 0
        parts[SCALE] = scale.to(parts[SCALE].dtype)


def clipped(w, parts, generator):
    w *= 3


def any_codes(w, parts, generator):
    codes = parts[DATA].view(torch.uint8)
    codes.copy_(torch.randint(0, 256, codes.shape, generator=generator))


def zeros(w, parts, generator):
    w[:, ::7], w[:, 1::7] = -0.0, w[:, 1::7] * 1e-9
    parts[DATA].view(torch.uint8).view(-1)[0] = 0x80


def alike(w, parts, generator):
    half = w.shape[0] // 2
    w[w.shape[0] - half :] = w[:half].clone()


CHANGES = (flipped, no_number, no_step, clipped, any_codes, zeros, alike)


def made(one, rows, cols, dtype):
    generator = torch.Generator().manual_seed(rows * cols)
    spread = torch.exp2(torch.randint(-4, 3, (rows, 1), generator=generator).float())
    w = (torch.randn(rows, cols, generator=generator) * spread).to(dtype)
    w[rows // 2] = 0
    ops, rule = ops_of(one), one.rules[0]
    shared = ops.shared(ops.measure(w), rule)
    return w, dict(ops.quantize(w, shared, rule)), generator


def copied(fresh):
    w, parts, generator = fresh
    again = torch.Generator().set_state(generator.get_state())
    return w.clone(), {name: part.clone() for name, part in parts.items()}, again


def takes(one, cols):
    return one.block[1] is None or cols % one.block[1] == 0 or one.block == (128, 128)


CASES = [(one, shape) for one in SCHEMES for shape in SHAPES if takes(one, shape[1])]


@pytest.mark.parametrize(("one", "shape"), CASES, ids=lambda x: getattr(x, "name", None))
def test_every_path_sees_the_same(monkeypatch, one, shape):
    """In pieces, and by the compiled loop where numba is installed."""
    monkeypatch.setattr(error_looks, "LARGE", 0)
    monkeypatch.setattr(error_pieces, "PIECE", 8192)
    high, wide = one.block[0] or 1, one.block[1] or shape[1]
    fresh = [made(one, *shape, dtype) for dtype in DTYPES]
    for number, change in enumerate((None, *CHANGES)):
        w, parts, generator = copied(fresh[number % len(DTYPES)])
        if change is not None:
            change(w, parts, generator)
        step = step_of(one, parts, 0, shape[0])
        v = ops_of(one).dequantize(parts, torch.float32)
        for widening in (None, BF16_WRITER):
            held_to = ruler(one.element, widening)
            want = error_codes.reference(w, v, parts[DATA], step, held_to, high, wide)
            for compiled in PATHS:
                monkeypatch.setenv("LOWBIT_NUMBA", "1" if compiled else "0")
                assert (error_looks.compiled(w) is not None) == compiled
                seen = error_looks.look(w, v, parts[DATA], step, held_to, one.block)
                assert seen == want, (change, compiled)
        values = error_pieces.values(parts[DATA], step, held_to, one.block)
        assert torch.equal(values.isnan(), v.isnan())
        assert torch.equal(values.nan_to_num(), v.nan_to_num())


@pytest.mark.parametrize("one", SCHEMES, ids=lambda one: one.name)
def test_what_is_in_order_is_seen_in_pieces(monkeypatch, one):
    """The reference is asked only of bands in which something is out of the ordinary."""
    w, parts, _ = made(one, 300, 640, torch.bfloat16)
    step, asked = step_of(one, parts, 0, 300), []
    v, held_to = ops_of(one).dequantize(parts, torch.float32), ruler(one.element, BF16_WRITER)
    monkeypatch.setenv("LOWBIT_NUMBA", "0")
    monkeypatch.setattr(error_pieces, "reference", lambda *args: asked.append(args) or whole(*args))
    whole = error_codes.reference
    error_looks.look(w, v, parts[DATA], step, held_to, one.block)
    assert not asked
    parts[DATA].view(torch.uint8)[200, 5] ^= 0x44
    error_looks.look(w, v, parts[DATA], step, held_to, one.block)
    assert [args[0].shape for args in asked] == [(128, 640)]


def test_nothing_is_nothing():
    one = SCHEMES[0]
    empty = torch.empty(0, 16)
    looked = error_looks.look(empty, empty, empty, empty, ruler(one.element, None), (1, 16))
    assert looked == error_codes.Look()
