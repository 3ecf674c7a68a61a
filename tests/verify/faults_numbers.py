"""Faults of scales, of codes, and of the order in which they lie."""

import math

import torch

from lowbit_kernels import rounding
from lowbitcli.containers.layouts import SWIZZLED128X4
from tests.checkpoints import LAYER, weight
from tests.verify.bench import LOST, Bench, Fault
from tests.verify.faults_structure import edited, poked
from tests.verify.planted import DOWN, GATE, NORM, UP, change
from tests.verify.test_order import COLS, uneven

CT = "compressed-tensors"
Q, K, V = (f"{LAYER}self_attn.{one}_proj." for one in "qkv")


def wide(edit, scheme: str = "nvfp4", container: str = CT, w: torch.Tensor | None = None):
    """Return how to change the tensors of an output of one larger weight."""

    def plant(bench: Bench):
        tensors = {DOWN + "weight": uneven() if w is None else w}
        output = bench.made(tensors, scheme, container)
        change(output, edit)
        return output

    return plant


def repacked(how):
    """Return an edit that packs codes in another way."""

    def edit(tensors):
        packed = tensors[DOWN + "weight_packed"]
        again = how(rounding.unpack(packed)).reshape(packed.shape).contiguous()
        tensors[DOWN + "weight_packed"] = again

    return edit


def scales(how):
    """Return an edit of the scales of a weight, as bytes."""

    def edit(tensors):
        scale = tensors[DOWN + "weight_scale"]
        tensors[DOWN + "weight_scale"] = how(scale.view(torch.uint8)).contiguous().view(scale.dtype)

    return edit


def swizzled(raw):
    return SWIZZLED128X4.at(raw.shape).encode(raw).reshape(raw.shape)


def linear(raw):
    return SWIZZLED128X4.at(raw.shape).decode(raw)


def fp8_bytes(tensors):
    w = uneven().float()
    codes = (w / w.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
    tensors[DOWN + "weight_packed"] = codes.view(torch.uint8)[:, : COLS // 2].contiguous()


def padding(tensors):
    tensors[DOWN + "weight"][-1, -1] = 0x38


def small(tensors):
    """Make scales smaller by one factor, so that all values are."""
    tensors[DOWN + "weight_global_scale"].mul_(4)


INPUT = "input_global_scale"
SPLIT = 'rules: [{match: "*gate_proj.weight", scheme: nvfp4}, {match: "*", scheme: mxfp8}]'


def split_group(bench: Bench):
    pair = {GATE + "weight": weight(64, 64), UP + "weight": weight(64, 64)}
    return bench.made(pair, container="lowbit", recipe=SPLIT, allow_split_groups=True)


NUMBERS = [
    Fault(
        "scales._told:scale",
        "a scale of E4M3 that is NaN",
        "1 of 256 E4M3 scales are NaN or negative, the first at [2, 1]: nan (byte 127)",
        poked(DOWN + "weight_scale", 9, 0x7F),
    ),
    Fault(
        "scales._told:scale",
        "a scale of E8M0 that is NaN",
        "E8M0 scales are NaN or negative, the first at [0, 0]: 255.0 (byte 255)",
        poked(DOWN + "weight_scale", 0, 255, "mxfp8"),
    ),
    Fault(
        "scales._told:scale",
        "a global scale of zero",
        "1 of 1 scales are not above zero, the first at [0]: 0.0",
        edited(lambda tensors: tensors[DOWN + "weight_global_scale"].zero_(), container=CT),
    ),
    Fault(
        "scales._told:scale",
        "a global scale whose reciprocal is infinite",
        "1 of 1 scales are stored as a reciprocal that is Inf",
        edited(lambda tensors: tensors[DOWN + "weight_global_scale"].fill_(1e-45), container=CT),
    ),
    Fault(
        "scales._beyond:scale",
        "a global scale with which block scales are beyond fp32",
        "a scale times the global scale is ",
        edited(lambda tensors: tensors[DOWN + "weight_global_scale"].fill_(3e38)),
    ),
    Fault(
        "scales._beyond:scale#2",
        "a scale with which the largest code is beyond fp32",
        "under its largest scale, 9.99999962e+35: beyond the range of fp32",
        edited(lambda tensors: tensors[DOWN + "weight_scale"].fill_(1e36), "fp8_channel"),
        severity="warn",
    ),
    Fault(
        "not_numbers.nan_in_kept:nonfinite",
        "NaN in a tensor that is not quantized",
        "1 of 64 elements are NaN",
        edited(lambda tensors: tensors[NORM][3:4].fill_(math.nan)),
        severity="warn",
    ),
    Fault(
        "not_numbers.nan_in_kept:unreadable",
        "a file that is lost while NaN is looked for",
        LOST,
        edited(None),
        fails="_nan",
    ),
    Fault(
        "scales._zeros:scale",
        "a scale of zero over codes that are not",
        "1 scales of byte 0, a step of zero, over codes that are not zero, first at [2, 1]",
        poked(DOWN + "weight_scale", 9, 0),
    ),
    Fault(
        "scales._zeros:scale",
        "the least exponent over codes that are not zero",
        "1 scales of byte 0, the least scale there is, over codes that are not zero",
        poked(DOWN + "weight_scale", 0, 0, "mxfp8"),
        severity="warn",
    ),
    Fault(
        "scales.scales:unreadable",
        "a file that is lost while its scales are looked at",
        LOST,
        edited(None),
        fails="scales",
    ),
    Fault(
        "scales._nan_codes:code#2",
        "a code that is NaN",
        "1 of 4096 codes are no numbers, the first at [3, 1]",
        poked(DOWN + "weight", 64 * 3 + 1, 0x7F, "fp8_channel"),
    ),
    Fault(
        "scales._nan_codes:code",
        "the least code of two's complement",
        "1 of 4096 codes are the least one, which lowbit never writes, the first at [3, 1]",
        poked(DOWN + "weight", 64 * 3 + 1, 0x80, "int8_channel"),
        severity="warn",
    ),
    Fault(
        "scales.nan_codes:unreadable",
        "a file that is lost while codes are looked at",
        LOST,
        edited(None, "fp8_channel"),
        fails="nan_codes",
    ),
    Fault(
        "scales.shared:shared",
        "gate and up in different schemes",
        "served as one matrix, but stored in different schemes",
        split_group,
        severity="warn",
    ),
    Fault(
        "scales._shared:shared",
        "global scales of gate and up that differ by an ulp",
        "served as one matrix, but their stored global scales differ",
        edited(
            lambda tensors: tensors.update(
                {
                    UP + "weight_global_scale": torch.nextafter(
                        tensors[UP + "weight_global_scale"], torch.tensor(1e9)
                    )
                }
            ),
            container=CT,
        ),
    ),
    Fault(
        "scales._shared:shared",
        "scales of fp8_tensor that differ in a group",
        "served as one matrix, but their stored scales differ",
        edited(lambda tensors: tensors[UP + "weight_scale"].mul_(2), "fp8_tensor", CT),
        severity="warn",
    ),
    Fault(
        "scales._shared:unreadable",
        "a file that is lost while shared scales are compared",
        LOST,
        edited(None),
        fails="shared",
    ),
    Fault(
        "plausible._of_weight:layout",
        "codes of NVFP4 transposed",
        "its codes lie transposed: as declared",
        wide(repacked(lambda codes: rounding.pack(codes.t().contiguous()))),
    ),
    Fault(
        "plausible._of_weight:layout",
        "codes packed along rows",
        "its codes are packed along rows, not columns",
        wide(repacked(lambda codes: codes[0::2] | (codes[1::2] << 4))),
    ),
    Fault(
        "plausible._of_weight:layout",
        "codes packed in halves of a row",
        "its codes are packed in halves of a row, not side by side: as declared",
        wide(repacked(lambda codes: codes[:, : COLS // 2] | (codes[:, COLS // 2 :] << 4))),
    ),
    Fault(
        "plausible._of_weight:layout",
        "an NVFP4 file that holds FP8 bytes",
        "its bytes look like FP8, not like two codes: the halves of a byte are distributed",
        wide(fp8_bytes),
    ),
    Fault(
        "plausible._of_weight:layout",
        "scales that are swizzled and should not be",
        "its scales look swizzled, which this container's are not: rows and columns tell",
        wide(scales(swizzled)),
    ),
    Fault(
        "plausible._of_weight:layout",
        "scales that are not swizzled and should be",
        "its scales look linear, which this container's are not: rows and columns tell",
        wide(scales(linear), container="comfyui"),
    ),
    Fault(
        "plausible._of_weight:layout",
        "padded scales that are not swizzled and should be",
        "its scales look linear, which this container's are not: so they are padded with zeros, "
        "and swizzled they are not",
        wide(scales(linear), container="comfyui", w=weight(200, 1040)),
    ),
    Fault(
        "plausible._of_weight:layout",
        "padding that is not zero",
        "what pads it is not zero: 1 bytes",
        wide(padding, container="comfyui", w=weight(200, 1040)),
    ),
    Fault(
        "plausible._alike:code",
        "codes that are all the same",
        "every code that was looked at is the same, byte 126: is it a weight?",
        edited(lambda tensors: tensors[DOWN + "weight_packed"].fill_(126), container=CT),
        severity="warn",
    ),
    Fault(
        "plausible.plausible:unreadable",
        "a file that is lost while its order is looked at",
        LOST,
        edited(None),
        fails="plausible",
    ),
    Fault(
        "plausible.shapes:layout",
        "half as many scales",
        "half as many scales as there are blocks of 16: blocks of 32 columns?",
        wide(scales(lambda raw: raw[:, ::2])),
    ),
    Fault(
        "plausible.shapes:layout",
        "twice as many scales",
        "twice as many scales as there are blocks of 16: blocks of 8?",
        wide(scales(lambda raw: raw.repeat(1, 2))),
    ),
    Fault(
        "plausible.shapes:layout",
        "scales transposed",
        "the scales are stored transposed",
        wide(scales(lambda raw: raw.t())),
    ),
    Fault(
        "plausible.shapes:layout",
        "scales in whole tiles",
        "the scales are padded to tiles of 128 x 4, as those are that are swizzled",
        wide(scales(lambda raw: SWIZZLED128X4.at(raw.shape).encode(raw)), w=weight(200, 512)),
    ),
    Fault(
        "compare.quantized:layout",
        "codes of FP8 transposed",
        "against the source: its codes lie transposed",
        edited(
            lambda x: x.update({DOWN + "weight": x[DOWN + "weight"].t().contiguous()}),
            "fp8_tensor",
            CT,
        ),
        against=True,
    ),
    Fault(
        "compare.quantized:layout",
        "scales in another order than the declared one",
        "against the source: its scales are swizzled, not as declared",
        wide(scales(swizzled)),
        against=True,
    ),
    Fault(
        "compare.quantized:layout",
        "all values wrong by one factor",
        "against the source: all values are 0.25",
        wide(small),
        against=True,
    ),
]
