"""Codes and scales in another order than the declared one, planted: what numbers tell by
themselves, and what they tell beside the source. Nothing is told of what is right."""

import json
from pathlib import Path

import pytest
import torch

from lowbit_kernels import layout, nvfp4, rounding
from lowbitcli import api
from lowbitcli.containers.layouts import SWIZZLED128X4
from lowbitcli.verify import plausible
from tests import checkpoints
from tests.checkpoints import single, weight
from tests.verify.planted import DOWN, GATE, SCHEMES, UP, change

GOLDEN = Path(__file__).parents[1] / "golden"
DATA = DOWN + "weight_packed"
SCALE = DOWN + "weight_scale"
NAME = DOWN + "weight"
ROWS, COLS = 256, 512


def uneven(rows: int = ROWS, cols: int = COLS, seed: int = 1) -> torch.Tensor:
    """Return a weight with larger and smaller rows and columns, as trained ones have them."""
    generator = torch.Generator().manual_seed(seed)
    high = torch.randn(rows, 1, generator=generator).mul(0.7).exp()
    wide = torch.randn(1, cols, generator=generator).mul(0.3).exp()
    return (weight(rows, cols, 0.02).float() * high * wide).to(torch.bfloat16)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return (folder, source, a function that makes an output to change)."""
    folder = tmp_path_factory.mktemp("orders")
    source = single(folder / "source", {NAME: uneven()})

    def make(scheme, container, name, **options):
        output = folder / name
        file = container == "comfyui"
        start = source / "model.safetensors" if file else source
        output = output.with_suffix(".safetensors") if file else output
        request = api.Request(scheme=scheme, container=container, **options)
        api.quantize(start, output, request, device="cpu", force=True)
        (output / "lowbit.json").unlink(missing_ok=True) if not file else None
        return output

    return source, make


def layouts(output, against=None):
    found = api.verify(output, against=against, device="cpu")
    assert json.dumps(found.to_dict())
    return [(one.tensor, one.message) for one in found.problems if one.kind == "layout"]


def told(output, words, tensor, against=None):
    found = layouts(output, against)
    assert [words in message for _, message in found] == [True], found
    assert found[0][0] == tensor


def repacked(kind: str):
    """Return an edit that packs codes in another way."""

    def edit(tensors):
        packed = tensors[DATA]
        codes = rounding.unpack(packed)
        rows, cols = codes.shape
        if kind == "transposed":
            turned = rounding.pack(codes.t().contiguous())
        elif kind == "along rows":
            turned = codes[0::2] | (codes[1::2] << 4)
        elif kind == "halves":
            turned = codes[:, : cols // 2] | (codes[:, cols // 2 :] << 4)
        else:
            turned = rounding.pack(codes[:, [x ^ 1 for x in range(cols)]])
        tensors[DATA] = turned.reshape(rows, cols // 2).contiguous()

    return edit


REPACKED = [
    ("transposed", "its codes lie transposed"),
    ("along rows", "packed along rows"),
    ("halves", "packed in halves"),
]


@pytest.mark.parametrize(("kind", "words"), REPACKED)
def test_codes_that_are_packed_otherwise_are_told_without_a_source(outputs, kind, words):
    source, make = outputs
    output = make("nvfp4", "compressed-tensors", kind.replace(" ", "-"))
    change(output, repacked(kind))
    told(output, words, DATA)
    found = layouts(output, source)
    assert found[0] == layouts(output)[0]
    assert found[1] == (NAME, "against the source: " + found[1][1].partition(": ")[2])
    assert words in found[1][1]


def test_exchanged_nibbles_are_told_beside_the_source(outputs):
    source, make = outputs
    output = make("nvfp4", "compressed-tensors", "swapped")
    change(output, repacked("exchanged"))
    assert layouts(output) == []  # every block holds what it held
    told(output, "the nibbles of its bytes are exchanged", NAME, source)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("container", ["compressed-tensors", "modelopt"])
def test_swizzled_scales_where_linear_ones_are_read(outputs, scheme, container):
    if (scheme, container) == ("mxfp4", "modelopt"):
        pytest.skip("not written")
    source, make = outputs
    output = make(scheme, container, f"swizzled-{scheme}-{container}")

    def edit(tensors):
        scale = tensors[SCALE]
        raw = scale.view(torch.uint8)
        swizzled = SWIZZLED128X4.at(raw.shape).encode(raw)
        tensors[SCALE] = swizzled.reshape(raw.shape).view(scale.dtype)

    change(output, edit)
    told(output, "its scales look swizzled", SCALE)
    assert "its scales are swizzled, not as declared" in layouts(output, source)[-1][1]


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_linear_scales_in_a_file_for_comfyui(outputs, scheme):
    source, make = outputs
    output = make(scheme, "comfyui", f"linear-{scheme}")

    def edit(tensors):
        scale = tensors[SCALE]
        raw = scale.view(torch.uint8)
        tensors[SCALE] = SWIZZLED128X4.at(raw.shape).decode(raw).view(scale.dtype)

    change(output, edit)
    told(output, "its scales look linear", SCALE)
    against = layouts(output, source / "model.safetensors")
    assert "its scales are linear, not as declared" in against[-1][1]


def test_linear_scales_that_are_padded(tmp_path):
    source = tmp_path / "a.safetensors"
    checkpoints.write(source, {NAME: weight(200, 1040)})
    output = tmp_path / "out.safetensors"
    request = api.Request(scheme="nvfp4", container="comfyui")
    api.quantize(source, output, request, device="cpu")
    assert layouts(output, source) == []

    def edit(tensors):
        raw = tensors[SCALE].view(torch.uint8)
        tensors[SCALE] = SWIZZLED128X4.at(raw.shape).decode(raw).view(torch.float8_e4m3fn)

    change(output, edit)
    assert "padded with zeros, and swizzled they are not" in layouts(output)[0][1]


@pytest.mark.parametrize("name", [NAME, SCALE])
def test_padding_that_is_not_zero(tmp_path, name):
    source = tmp_path / "a.safetensors"
    checkpoints.write(source, {NAME: weight(200, 1040)})
    output = tmp_path / "out.safetensors"
    request = api.Request(scheme="nvfp4", container="comfyui")
    api.quantize(source, output, request, device="cpu")

    def edit(tensors):
        tensors[name].view(torch.uint8)[-1, -1] = 0x38  # of the last row and column

    change(output, edit)
    told(output, "what pads it is not zero: 1 bytes", name)


def test_fp8_bytes_in_a_file_that_says_nvfp4(outputs):
    _, make = outputs
    output = make("nvfp4", "compressed-tensors", "bytes")

    def edit(tensors):
        w = uneven().float()
        codes = (w / w.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
        tensors[DATA] = codes.view(torch.uint8)[:, : COLS // 2].contiguous()

    change(output, edit)
    told(output, "its bytes look like FP8", DATA)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8"])
def test_half_as_many_scales(outputs, scheme):
    _, make = outputs
    output = make(scheme, "compressed-tensors", f"half-{scheme}")
    change(output, lambda tensors: tensors.update({SCALE: tensors[SCALE][:, ::2].contiguous()}))
    told(output, "half as many scales", SCALE)
    change(output, lambda tensors: tensors.update({SCALE: tensors[SCALE].repeat(1, 4)}))
    told(output, "twice as many scales", SCALE)


def test_scales_whose_shape_is_that_of_swizzled_ones(tmp_path):
    source = single(tmp_path / "source", {NAME: weight(200, 512)})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme="nvfp4"), device="cpu")
    (output / "lowbit.json").unlink()

    def edit(tensors):
        raw = tensors[SCALE].view(torch.uint8)
        tensors[SCALE] = SWIZZLED128X4.at(raw.shape).encode(raw).view(torch.float8_e4m3fn)

    change(output, edit)
    told(output, "padded to tiles of 128 x 4", SCALE)
    shape = (32, 200)
    change(output, lambda t: t.update({SCALE: torch.ones(shape).to(torch.float8_e4m3fn)}))
    told(output, "the scales are stored transposed", SCALE)


def test_values_that_are_all_wrong_by_one_factor(outputs):
    source, make = outputs
    output = make("nvfp4", "compressed-tensors", "factor")
    change(output, lambda tensors: tensors[DOWN + "weight_global_scale"].mul_(4))
    assert layouts(output) == []
    told(output, "all values are 0.25", NAME, source)


def test_a_whole_file_of_modelopt_that_is_called_one_for_comfyui(outputs):
    """Trap 1: names, dtypes and shapes are the same, nibbles and scales are not."""
    source, make = outputs
    other = checkpoints.read(make("nvfp4", "modelopt", "other"))
    output = make("nvfp4", "comfyui", "mixed")
    change(output, lambda tensors: tensors.update(other))
    found = layouts(output, source / "model.safetensors")
    assert "its scales look linear" in found[0][1]
    words = "the nibbles of its bytes are exchanged and its scales are linear, not as declared"
    assert words in found[1][1]


@pytest.mark.parametrize("scale", ["amax", "mse", "mse_all", "four_over_six", "2d"])
def test_no_rule_of_scales_raises_an_alarm(tmp_path, scale):
    recipe = tmp_path / "a.yaml"
    recipe.write_text(f'rules: [{{match: "*", scheme: nvfp4, scale: {scale}}}]\n')
    tensors = {NAME: uneven(), GATE + "weight": weight(256, 256), UP + "weight": weight(256, 256)}
    source = single(tmp_path / "source", tensors)
    for container in ("compressed-tensors", "modelopt", "comfyui"):
        start = source / "model.safetensors" if container == "comfyui" else source
        output = tmp_path / f"{container}{'.safetensors' if container == 'comfyui' else ''}"
        request = api.Request(recipe=recipe, container=container)
        api.quantize(start, output, request, device="cpu")
        assert layouts(output, start) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scheme_raises_an_alarm(planted, scheme, tmp_path):
    source = single(tmp_path / "source", {NAME: uneven(), "m.zero.weight": torch.zeros(128, 512)})
    api.quantize(source, tmp_path / "out", api.Request(scheme=scheme), device="cpu")
    assert layouts(tmp_path / "out", source) == []
    assert layouts(planted.made(scheme, "lowbit")) == []


GOLDENS = [
    *(path.parent for path in sorted(GOLDEN.glob("*/*/model.safetensors"))),
    *(x for x in sorted(GOLDEN.glob("comfyui/*.safetensors")) if "dequantized" not in x.name),
]


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_is_told_of_what_peers_wrote(path):
    assert layouts(path) == []


def test_tiles_that_share_a_scale_are_no_order_of_rows():
    """16 rows of 16 x 16 tiles repeat one scale: 128 numbers in 128 x 16 scales, no 2,048."""
    worst = 0.0
    for seed in range(60):
        w = torch.randn(128, 256, generator=torch.Generator().manual_seed(seed))
        _, scale, _ = nvfp4.quantize(w.bfloat16(), rule="2d")
        other = layout.unswizzle(scale, 128, 16)
        own = plausible._distinct(scale) * 16
        assert own == 128
        worst = max(worst, plausible._told(other, False, 128 * 16))
        assert plausible._told(other, False, own) <= 0.0
    assert worst > plausible.TELLS / 2  # what would be near to a finding
    generator = torch.Generator().manual_seed(5)
    high, wide = (torch.randn(64, generator=generator).mul(x).exp() for x in (0.7, 0.3))
    of_tiles = torch.outer(high.repeat_interleave(16), wide.repeat_interleave(16))
    _, scale, _ = nvfp4.quantize(of_tiles * weight(1024, 1024, 0.02).float(), rule="2d")
    turned = layout.swizzle(scale)
    back = layout.unswizzle(turned, 1024, 64)
    own = min(plausible._distinct(turned), plausible._distinct(back)) * 64
    found = plausible._told(back, False, own)
    assert found > max(plausible._told(turned, False, own), 0.0) + plausible.TELLS
