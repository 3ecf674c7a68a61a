"""What readers will make of activations is said of every plan that has no file of their amaxes."""

import pytest

from lowbitcli.api import Request, plan_quantize
from lowbitcli.plan.activations import of_readers
from tests.checkpoints import LAYER, single, weight

STATIC = "; static with --activation-scales"


@pytest.mark.parametrize(
    ("scheme", "container", "told"),
    [
        ("nvfp4", "auto", "none: readers multiply in 16 bits" + STATIC),
        ("mxfp4", "auto", "none: readers multiply in 16 bits"),
        ("fp8", "auto", "dynamic: scaled by readers, token by token" + STATIC),
        ("fp8_channel", "modelopt", "dynamic: scaled by readers, token by token"),
        ("fp8_block128", "deepseek", "dynamic: scaled by readers, 128 at a time"),
        ("mxfp8", "auto", "dynamic: scaled by readers, 32 at a time"),
        ("nvfp4", "comfyui", "ComfyUI decides" + STATIC),
        ("mxfp8", "comfyui", "ComfyUI decides"),
        ("nvfp4", "lowbit", "left to who reads it"),
    ],
)
def test_without_a_file(tmp_path, scheme, container, told):
    source = single(tmp_path / "m", {f"{LAYER}mlp.down_proj.weight": weight(64, 128)})
    plan = plan_quantize(source, None, Request(scheme=scheme, container=container))
    assert [words for _, words in of_readers(plan)] == [told]


def test_with_a_file_and_with_none_quantized(tmp_path):
    source = single(tmp_path / "m", {f"{LAYER}mlp.down_proj.weight": weight(64, 128)})
    file = tmp_path / "a.json"
    file.write_text(f'{{"{LAYER}mlp.down_proj": 3.0}}')
    plan = plan_quantize(source, None, Request(scheme="nvfp4", activation_scales=file))
    assert of_readers(plan) == [("nvfp4", "static: scaled by numbers that are stored")]
    assert of_readers(plan_quantize(source, None, Request(fake=True))) == []
