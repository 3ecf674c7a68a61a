"""Wrong codes, scales and bytes planted in outputs that were right, each found under its own name.

The manifest is taken away unless a test is about it: its hashes would see every one of them.
"""

import pytest
import torch

from lowbitcli import api
from lowbitcli.errors import UsageError
from tests import checkpoints
from tests.checkpoints import LAYER, weight
from tests.verify.planted import (
    CONTAINERS,
    DOWN,
    GATE,
    UP,
    change,
    message,
    poke,
    told,
)

Q, K = LAYER + "self_attn.q_proj.", LAYER + "self_attn.k_proj."


def test_one_flipped_code(planted):
    output = planted.copy("nvfp4", "lowbit")
    poke(output, DOWN + "weight", 32 * 5 + 3, lambda byte: byte ^ 0x01)
    found = planted.verify(output)
    assert told(found) == [("fail", "bound", DOWN + "weight")]
    assert found.exit_code == 1
    text = message(found, "bound")
    assert text.startswith("1 of 4096 elements are not in the interval of their code; the first at")
    assert "row 5, column 6, block [5, 0]:" in text
    (row,) = [row for row in found.weights if row.name == DOWN + "weight"]
    assert row.figures is not None
    assert (row.figures.outside, row.figures.first_outside) == (1, (5, 6))


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "mxfp8"])
def test_one_flipped_fp8_code(planted, scheme):
    output = planted.copy(scheme, "compressed-tensors")
    poke(output, DOWN + "weight", 64 * 7 + 2, lambda byte: byte ^ 0x01)
    found = planted.verify(output)
    assert told(found) == [("fail", "bound", DOWN + "weight")]
    block = [0, 0] if scheme == "fp8_tensor" else [7, 0]
    assert f"row 7, column 2, block {block}:" in message(found, "bound")


def test_a_tie_rounded_to_odd_is_wrong_where_lowbit_wrote_it(tmp_path):
    """Another writer may break ties as it likes; with a manifest it is known how it was done."""
    w = torch.full((16, 32), 2.5, dtype=torch.bfloat16)
    w[:, ::16] = 6.0
    source = checkpoints.single(tmp_path / "source", {DOWN + "weight": w})
    output = tmp_path / "out"
    api.quantize(source, output, api.Request(scheme="nvfp4", container="lowbit"), device="cpu")
    poke(output, DOWN + "weight", 1, lambda byte: byte ^ 0x01)
    found = api.verify(output, against=source, device="cpu")
    assert told(found) == [
        ("fail", "manifest", DOWN + "weight"),
        ("fail", "bound", DOWN + "weight"),
    ]
    (output / "lowbit.json").unlink()
    assert told(api.verify(output, against=source, device="cpu")) == []


@pytest.mark.parametrize(("scheme", "sign"), [("nvfp4", 0x88), ("mxfp8", 0x80)])
def test_flipped_signs(planted, scheme, sign):
    output = planted.copy(scheme, "lowbit")
    poke(output, DOWN + "weight", 100, lambda byte: byte ^ sign)
    assert told(planted.verify(output)) == [("fail", "bound", DOWN + "weight")]


def test_without_a_source_a_flipped_code_is_not_seen_but_for_the_manifest(planted):
    """The other tests would show nothing if something else had found their faults."""
    output = planted.copy("nvfp4", "lowbit")
    poke(output, DOWN + "weight", 100, lambda byte: byte ^ 0x01)
    assert told(planted.verify(output, source=False)) == []


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_byte_in_an_e4m3_scale(planted, byte):
    output = planted.copy("nvfp4", "lowbit")
    poke(output, DOWN + "weight_scale", 9, lambda _: byte)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "scale", DOWN + "weight_scale")]
    assert message(found, "scale") == (
        f"1 of 256 E4M3 scales are NaN or negative, the first at [2, 1]: nan (byte {byte})"
    )


def test_a_negative_e4m3_scale(planted):
    output = planted.copy("nvfp4", "lowbit")
    poke(output, DOWN + "weight_scale", 9, lambda byte: byte | 0x80)
    assert told(planted.verify(output, source=False)) == [("fail", "scale", DOWN + "weight_scale")]


def test_a_zero_e4m3_scale(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    poke(output, DOWN + "weight_scale", 9, lambda _: 0)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "scale", DOWN + "weight_scale")]
    assert "a step of zero, over codes that are not zero, first at [2, 1]" in message(
        found, "scale"
    )


def test_a_zero_e4m3_scale_over_zeros_is_fine(planted):
    """Other writers leave byte 0 for blocks of zeros; -0 (code 8) is a zero too."""
    output = planted.copy("nvfp4", "lowbit")

    def zero(tensors):
        tensors[DOWN + "weight"][0, :8] = torch.tensor([0x00, 0x80, 0x08, 0x88] * 2)
        tensors[DOWN + "weight_scale"].view(torch.uint8)[0, 0] = 0

    change(output, zero)
    assert told(planted.verify(output, source=False)) == []


def test_e8m0_bytes(planted):
    output = planted.copy("mxfp8", "compressed-tensors")
    poke(output, DOWN + "weight_scale", 0, lambda _: 255)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "scale", DOWN + "weight_scale")]
    assert "the first at [0, 0]: 255.0 (byte 255)" in message(found, "scale")
    poke(output, DOWN + "weight_scale", 0, lambda _: 0)
    found = planted.verify(output, source=False)
    assert told(found) == [("warn", "scale", DOWN + "weight_scale")]
    assert ("fail", "bound", DOWN + "weight") in told(planted.verify(output))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_global_scale_that_is_none(planted, container, value):
    """compressed-tensors stores the reciprocal: what is stored counts, not only what it means."""
    output = planted.copy("nvfp4", container)
    change(output, lambda tensors: tensors[DOWN + "weight_global_scale"].fill_(value))
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "scale", DOWN + "weight_global_scale")]
    assert "1 of 1 scales are not above zero" in message(found, "scale")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel"])
def test_an_fp8_scale_that_is_none(planted, scheme, value):
    output = planted.copy(scheme, "compressed-tensors")
    change(output, lambda tensors: tensors[DOWN + "weight_scale"].reshape(-1)[:1].fill_(value))
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "scale", DOWN + "weight_scale")]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_code(planted, byte):
    output = planted.copy("fp8_channel", "lowbit")
    poke(output, DOWN + "weight", 64 * 3 + 1, lambda _: byte)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "code", DOWN + "weight")]
    assert message(found, "code") == "1 of 4096 codes are no numbers, the first at [3, 1]"
    with_source = told(planted.verify(output))
    assert ("fail", "bound", DOWN + "weight") in with_source


@pytest.mark.parametrize(
    ("scheme", "part", "byte", "kind", "place"),
    [("nvfp4", "weight_scale", 0, "scale", 128), ("fp8_channel", "weight", 0x7F, "code", 2048)],
)
def test_places_count_from_the_first_row_of_all(tmp_path, scheme, part, byte, kind, place):
    """Row 700 of a weight that is read 512 rows at a time."""
    source = checkpoints.single(tmp_path / "source", {DOWN + "weight": weight(720, 2048)})
    output = tmp_path / "out"
    request = api.Request(scheme=scheme, container="lowbit")
    api.quantize(source, output, request, device="cpu")
    (output / "lowbit.json").unlink()
    poke(output, DOWN + part, 700 * place + 3, lambda _: byte)
    found = api.verify(output, device="cpu")
    assert told(found) == [("fail", kind, DOWN + part)]
    assert message(found, kind).endswith("first at [700, 3]")


@pytest.mark.parametrize("scheme", ["fp8_channel", "mxfp8", "nvfp4"])
def test_swapped_scales(planted, scheme):
    output = planted.copy(scheme, "lowbit")

    def swap(tensors):
        one, other = DOWN + "weight_scale", Q + "weight_scale"
        tensors[one], tensors[other] = tensors[other], tensors[one]

    change(output, swap)
    found = planted.verify(output)
    assert {kind for _, kind, _ in told(found)} == {"bound"}
    assert {name for _, _, name in told(found)} == {DOWN + "weight", Q + "weight"}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("partners", [(GATE, UP), (Q, K)])
def test_fused_weights_with_different_global_scales(planted, container, partners):
    """Case 7: readers take one for both."""
    output = planted.copy("nvfp4", container)

    def part(tensors):
        name = partners[1] + "weight_global_scale"
        tensors[name] = torch.nextafter(tensors[name], torch.tensor(1e9))

    change(output, part)
    found = planted.verify(output, source=False)
    assert told(found) == [("fail", "shared", min(partners) + "weight")]
    assert "global scales differ" in message(found, "shared")


@pytest.mark.parametrize("names", [("gate_proj", "up_proj"), ("w1", "w3")])
@pytest.mark.parametrize("room", ["mlp.experts", "block_sparse_moe.experts"])
def test_experts_with_different_global_scales(tmp_path, names, room):
    """Case 7 to the letter: per expert they share, and a file in which one differs is refused."""
    stems = [f"{LAYER}{room}.{expert}.{name}." for expert in range(2) for name in names]
    source = checkpoints.single(
        tmp_path / "source",
        {stem + "weight": weight(64, 64, 10.0**n, seed=n) for n, stem in enumerate(stems)},
    )
    api.quantize(source, tmp_path / "out", device="cpu")
    assert told(api.verify(tmp_path / "out", against=source, device="cpu")) == []
    (tmp_path / "out" / "lowbit.json").unlink()
    change(
        tmp_path / "out",
        lambda tensors: tensors.update(
            {
                stems[3] + "weight_global_scale": tensors[stems[1] + "weight_global_scale"],
            }
        ),
    )
    found = api.verify(tmp_path / "out", device="cpu")
    assert told(found) == [("fail", "shared", stems[2] + "weight")]


def test_fp8_scales_of_fused_weights_that_differ_are_a_warning(planted):
    output = planted.copy("fp8_tensor", "compressed-tensors")
    change(output, lambda tensors: tensors[UP + "weight_scale"].mul_(2))
    found = planted.verify(output, source=False)
    assert told(found) == [("warn", "shared", GATE + "weight")]
    assert found.passed


def test_fused_weights_in_different_schemes_are_a_warning(tmp_path):
    source = checkpoints.single(
        tmp_path / "source", {GATE + "weight": weight(64, 64), UP + "weight": weight(64, 64)}
    )
    recipe = tmp_path / "split.yaml"
    recipe.write_text(
        'rules: [{match: "*gate_proj.weight", scheme: nvfp4}, {match: "*", scheme: mxfp8}]'
    )
    request = api.Request(recipe=str(recipe), container="lowbit", allow_split_groups=True)
    api.quantize(source, tmp_path / "out", request, device="cpu")
    found = api.verify(tmp_path / "out", against=source, device="cpu")
    assert told(found) == [("warn", "shared", GATE + "weight")]


def test_an_sqnr_below_the_limit(planted):
    output = planted.made("nvfp4", "lowbit")
    assert planted.verify(output, fail_under_db=15.0).passed
    found = planted.verify(output, fail_under_db=40.0)
    assert {kind for _, kind, _ in told(found)} == {"quality"}
    assert len(found.failures) == 7
    assert found.failures[0].message.endswith("below 40 dB")


def test_a_limit_without_a_source_is_refused(planted):
    with pytest.raises(UsageError, match="needs a source"):
        planted.verify(planted.made("nvfp4", "lowbit"), source=False, fail_under_db=20.0)


def test_a_source_that_holds_nan(planted, tmp_path):
    source = checkpoints.single(tmp_path / "source", checkpoints.read(planted.source))

    def spoil(tensors):
        tensors[DOWN + "weight"][1, 2] = float("nan")

    change(source, spoil)
    found = api.verify(planted.made("nvfp4", "lowbit"), against=source, device="cpu")
    assert ("fail", "nonfinite", DOWN + "weight") in told(found)
    assert ("fail", "bound", DOWN + "weight") in told(found)


@pytest.mark.parametrize("byte", [0, 0x7E, 0xFF])
def test_codes_that_are_all_the_same_are_a_warning_where_there_is_no_source(planted, byte):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors[DOWN + "weight_packed"].fill_(byte))
    alone = planted.verify(output, source=False)
    assert ("warn", "code", DOWN + "weight_packed") in told(alone)
    assert f"is the same, byte {byte}" in message(alone, "code")
    beside = planted.verify(output)
    assert next(one.kind for one in beside.failures) == "bound"
    assert "code" not in {one.kind for one in beside.problems}


def test_a_global_scale_whose_reciprocal_is_infinite(planted):
    """compressed-tensors stores 1 / g: what is read of a subnormal number is Inf."""
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors[DOWN + "weight_global_scale"].fill_(1e-45))
    found = planted.verify(output, source=False)
    assert ("fail", "scale", DOWN + "weight_global_scale") in told(found)
    assert "a reciprocal that is Inf" in message(found, "scale")


REORDERED = [  # scheme, what is exchanged
    ("nvfp4", ("weight_packed",)),
    ("nvfp4", ("weight_packed", "weight_scale")),
    ("mxfp8", ("weight_scale",)),
    ("fp8_channel", ("weight_scale",)),
]


@pytest.mark.parametrize(("scheme", "parts"), REORDERED)
def test_rows_that_were_exchanged(planted, scheme, parts):
    output = planted.copy(scheme, "compressed-tensors")

    def edit(tensors):
        for part in parts:
            some = tensors[DOWN + part].view(torch.uint8)
            some.copy_(some.roll(1, 0))

    change(output, edit)
    assert told(planted.verify(output))[0] == ("fail", "bound", DOWN + "weight")


def test_one_scale_that_is_the_next_number_up(planted):
    output = planted.copy("nvfp4", "compressed-tensors")
    change(output, lambda tensors: tensors[DOWN + "weight_scale"].view(torch.uint8)[5, 1].add_(1))
    found = planted.verify(output)
    assert told(found) == [("fail", "bound", DOWN + "weight")]
    assert "first at row 5, column" in message(found, "bound")
