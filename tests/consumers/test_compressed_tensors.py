"""compressed_tensors decompresses what we write to the numbers that we read back ourselves.

Equality is of bits. For NVFP4 that package computes fl(s / G), G the stored reciprocal, where a
scale that multiplies gives fl(s * fl(1 / G)): each is held against its own formula. Those two
differ by an ulp of fp32 for 23 % of all pairs (s, G), and so hardly ever once rounded to bf16.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowbitcli import api
from tests import seeded
from tests.consumers.models import SCHEMES, quantized_names, stored

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import (
    CompressedTensorsDequantizer,
)
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint whose weights have largest magnitudes without an exact reciprocal."""
    folder = tmp_path_factory.mktemp("source") / "model"
    seeded.write(folder)
    uneven = {
        name: (w * (1 + number / 37)).to(w.dtype) if w.dim() == 2 else w
        for number, (name, w) in enumerate(sorted(stored(folder).items()))
    }
    save_file(uneven, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(folder: Path) -> QuantizationConfig:
    """Return a checkpoint's config as that package understands it."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    said.pop("quant_method")
    return QuantizationConfig.model_validate(said)


def scheme_of(folder: Path) -> QuantizationScheme:
    """Return the one group of a checkpoint's config."""
    config = config_of(folder)
    (group,) = config.config_groups.values()
    assert group.format == infer_module_format(torch.nn.Linear, group).value == config.format
    return group


def decompressed(folder: Path, name: str, scheme: QuantizationScheme | None = None) -> torch.Tensor:
    """Return one weight as that package decompresses the module on its own."""
    stem = name.removesuffix("weight")
    parts = {
        key.removeprefix(stem): tensor
        for key, tensor in stored(folder).items()
        if key.startswith(stem)
    }
    scheme = scheme or scheme_of(folder)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(parts, scheme)["weight"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("scheme", [one for one in SCHEMES if one != "nvfp4"])
def test_its_numbers_are_ours(source, tmp_path, scheme):
    made = api.quantize(source, tmp_path / "q", api.Request(scheme=scheme))
    api.dequantize(tmp_path / "q", tmp_path / "d", dtype="fp32")
    ours = stored(tmp_path / "d")
    names = quantized_names(made.plan)
    assert len(names) == 21
    for name in names:
        # an E4M3 or E2M1 element times a power of two is exact in the bf16 that it computes in
        assert same_bits(decompressed(tmp_path / "q", name).float(), ours[name]), name


def test_each_group_of_a_mixed_checkpoint_is_ours(source, tmp_path):
    rules = {"*self_attn.o*": "mxfp8", "*self_attn*": "fp8_channel", "*mlp.down*": "mxfp4"}
    rules["*"] = "fp8_block128"
    listed = ", ".join(f'{{match: "{x}", scheme: {y}}}' for x, y in rules.items())
    (tmp_path / "r.yaml").write_text(f"rules: [{listed}]\n")
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=tmp_path / "r.yaml"))
    api.dequantize(tmp_path / "q", tmp_path / "d", dtype="fp32")
    ours, config = stored(tmp_path / "d"), config_of(tmp_path / "q")
    assert config.format == "mixed-precision" and len(config.config_groups) == len(rules)
    modules = {x.removesuffix(".weight") for x in quantized_names(made.plan)}
    found: dict[str, torch.Tensor] = {}
    for group in config.config_groups.values():
        assert group.format == infer_module_format(torch.nn.Linear, group).value
        for target in group.targets:  # of several groups, by name
            found[target] = decompressed(tmp_path / "q", f"{target}.weight", group)
    assert found.keys() == modules and len(modules) == 21
    for module, value in found.items():
        assert same_bits(value.float(), ours[f"{module}.weight"]), module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_its_converter_finds_every_weight_and_leaves_nothing_over(source, tmp_path, scheme):
    made = api.quantize(source, tmp_path / "q", api.Request(scheme=scheme))
    converter = CompressedTensorsDequantizer(str(tmp_path / "q"), dtype=torch.float32)
    found = converter.validate(stored(tmp_path / "q"))
    before = stored(source)
    assert found.keys() == before.keys()
    quantized = set(quantized_names(made.plan))
    for name, tensor in found.items():
        if name not in quantized:
            assert same_bits(tensor, before[name]), name
        else:
            assert same_bits(tensor, decompressed(tmp_path / "q", name).float()), name


def test_nvfp4_is_its_formula_and_ours_but_where_the_two_quotients_differ(source, tmp_path):
    made = api.quantize(source, tmp_path / "q", api.Request(scheme="nvfp4"))
    api.dequantize(tmp_path / "q", tmp_path / "d", dtype="fp32")
    parts, ours = stored(tmp_path / "q"), stored(tmp_path / "d")
    scheme = scheme_of(tmp_path / "q")
    scales = unequal = weights = rounded_apart = 0
    for name in quantized_names(made.plan):
        packed, s = parts[f"{name}_packed"], parts[f"{name}_scale"].float()
        reciprocal = parts[f"{name}_global_scale"]
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        element = E2M1[codes.long()].unflatten(-1, (s.shape[-1], 16))
        divided, multiplied = s / reciprocal, s * reciprocal.reciprocal()

        theirs = dequantize(
            x_q=unpack_fp4_from_uint8(packed, *codes.shape, dtype=torch.float32),
            scale=s,
            args=scheme.weights,
            global_scale=reciprocal,
            dtype=torch.float32,
        )
        formula = (element * divided.unsqueeze(-1)).flatten(-2)
        assert torch.equal(theirs, formula), name
        assert torch.equal(decompressed(tmp_path / "q", name), formula.bfloat16()), name

        assert torch.equal(ours[name], (element * multiplied.unsqueeze(-1)).flatten(-2)), name
        equal = (divided == multiplied).unsqueeze(-1).expand(*s.shape, 16).flatten(-2)
        assert torch.equal(theirs[equal], ours[name][equal]), name
        apart = (divided.view(torch.int32) - multiplied.view(torch.int32)).abs()
        assert int(apart.max()) <= 1, name
        scales, unequal = scales + s.numel(), unequal + int((divided != multiplied).sum())
        weights += theirs.numel()
        rounded_apart += int((theirs.bfloat16() != ours[name].bfloat16()).sum())
    assert 0 < unequal < scales / 3  # otherwise this says nothing of where they differ
    assert rounded_apart <= weights / 1000
