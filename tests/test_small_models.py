"""Two small trained checkpoints through quantize, inspect, verify and dequantize, every scheme.

What cannot or should not be quantized (convolutions, learned queries, 133 columns where blocks of
16 or 32 are needed) is kept, said, and the same to the byte.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lowbitcli import api
from lowbitcli.containers.lowbit import SUFFIXES

MODELS = Path(__file__).parent / "golden" / "models"
SCHEMES = (
    "fp8_tensor",
    "fp8_channel",
    "fp8_block128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8_channel",
)
BLOCKED = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}

CREPE_KEPT = {f"conv{n}.weight": "convolution" for n in range(1, 7)} | {"classifier.weight": "head"}
FRACAST_TAKEN = ("core.block.ffn.down", "core.block.ffn.up", "core.block.pw")
FRACAST_NARROW = {"core.in_proj": 7, "core.periodic.proj": 8, "core.scale.to_gb": 8}


def contents(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def kept_bytes_are_equal(plan: api.Plan, before: Path, *after: Path) -> int:
    """Hold every kept tensor of `after` against the source; return how many there are."""
    source = contents(before)
    names = [weight.name for weight in plan.weights if weight.target is None]
    for folder in after:
        found = contents(folder)
        for name in names:
            assert found[name].dtype == source[name].dtype, name
            assert found[name].shape == source[name].shape, name
            assert raw(found[name]) == raw(source[name]), name
    return len(names)


def reasons(plan: api.Plan) -> dict[str, str]:
    return {w.name: w.kept for w in plan.weights if w.target is None and len(w.shape) > 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_crepe_keeps_its_convolutions_and_its_head(tmp_path, scheme):
    source, q, d = MODELS / "crepe-tiny", tmp_path / "q", tmp_path / "d"
    made = api.quantize(source, q, api.Request(scheme=scheme))
    assert reasons(made.plan) == CREPE_KEPT
    api.dequantize(q, d, dtype="fp32")
    assert kept_bytes_are_equal(made.plan, source, q, d) == 44
    assert (
        api.inspect(q).schemes
        == api.inspect(source).schemes
        == {
            "F32": (38, 487096, 1948384),
            "I64": (6, 6, 48),
        }
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_crepe_with_its_head_quantized(tmp_path, scheme):
    source, q, d = MODELS / "crepe-tiny", tmp_path / "q", tmp_path / "d"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'quantize: [heads]\nrules:\n  - match: "*"\n    scheme: {scheme}\n')
    made = api.quantize(source, q, api.Request(recipe=recipe))
    assert [weight.name for weight in made.plan.quantized] == ["classifier.weight"]
    assert api.verify(q, against=source).passed
    api.dequantize(q, d, dtype="fp32")
    assert kept_bytes_are_equal(made.plan, source, q, d) == 43
    assert api.inspect(q).schemes[scheme][:2] == (1, 360 * 256)
    before, after = contents(source)["classifier.weight"], contents(d)["classifier.weight"]
    error = float((after - before).norm() / before.norm())
    assert error == pytest.approx(made.errors["classifier.weight"].relative, rel=1e-5)
    assert 0 < error < (0.15 if scheme in ("nvfp4", "mxfp4") else 0.04)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fracast_keeps_what_has_too_few_columns(tmp_path, scheme):
    source, q, d = MODELS / "fracast-0", tmp_path / "q", tmp_path / "d"
    made = api.quantize(source, q, api.Request(scheme=scheme))
    assert made.plan.container == "lowbit"  # its config.json is not of the Hugging Face kind
    taken = {weight.name.removesuffix(".weight") for weight in made.plan.quantized}
    kept = reasons(made.plan)
    assert kept["head.queries"] == kept["head.summary_proj.weight"] == "head"
    assert kept["core.block.dw_weight"] == "its name does not end in .weight"
    if scheme in BLOCKED:
        assert taken == set(FRACAST_TAKEN)
        for name, columns in FRACAST_NARROW.items():
            said = f"{columns} columns are no multiple of {BLOCKED[scheme]}, which {scheme} needs"
            assert kept[f"{name}.weight"] == said
    else:
        assert taken == {*FRACAST_TAKEN, *FRACAST_NARROW}
    assert api.verify(q, against=source).passed
    assert api.inspect(q).findings == ()
    api.dequantize(q, d, dtype="fp32")
    assert kept_bytes_are_equal(made.plan, source, q, d) == 47 - len(taken)
    assert contents(d).keys() == contents(source).keys()
    parts = {name + suffix for name in taken for suffix in SUFFIXES.values()}
    assert contents(q).keys() - contents(source).keys() <= parts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fracast_with_its_heads_quantized_keeps_133_columns_out_of_blocks(tmp_path, scheme):
    source, q = MODELS / "fracast-0", tmp_path / "q"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'quantize: [heads]\nrules:\n  - match: "*"\n    scheme: {scheme}\n')
    made = api.quantize(source, q, api.Request(recipe=recipe))
    kept, name = reasons(made.plan), "head.summary_proj.weight"
    assert kept["head.queries"] == "its name does not end in .weight"
    if scheme in BLOCKED:
        said = f"133 columns are no multiple of {BLOCKED[scheme]}, which {scheme} needs"
        assert kept[name] == said
    else:
        assert name not in kept
    assert api.verify(q, against=source).passed
    assert kept_bytes_are_equal(made.plan, source, q) == 47 - len(made.plan.quantized)
