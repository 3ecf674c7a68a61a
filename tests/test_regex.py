"""Expressions of a hostile config are refused in no time; those of real configs pass."""

import time

import pytest

from lowbitcli.containers import ct_config
from lowbitcli.errors import CheckpointError
from lowbitcli.regex import MAX_NAME, compile_bounded

REAL = (
    r".*embed_tokens$",
    r".*self_attn.*",
    r".*mlp.gate$",
    r"visual.*",
    r".*shared_expert_gate$",
    r".*lm_head",
    r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj$",
)
HOSTILE = (
    r"(a+)+$",
    r"(a|a)*$",
    r"(.*)*x",
    r".*.*.*.*.*.*x",
    r"(?:a?){200}b",
    r"(a)\1",
    "(" * 5000,
    "a" * 513,
    r"(?i)a",
    "[",
)


@pytest.mark.parametrize("text", REAL)
def test_patterns_of_real_configs_pass(text):
    assert compile_bounded(text).pattern == text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_a_hostile_pattern_is_one_error(text, key):
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    targets = [f"re:{text}"] if key == "targets" else ["Linear"]
    config = {"config_groups": {"g": {"weights": weights, "targets": targets}}}
    config["ignore"] = [f"re:{text}"] if key == "ignore" else []
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="quantization_config: the pattern") as caught:
        ct_config.read(config)
    assert time.monotonic() - start < 5
    assert len(caught.value.message) < 400


def test_a_pattern_takes_no_name_beyond_its_bound():
    found = ct_config.read({"ignore": ["re:a.*b"]})
    assert found.ignored_patterns[0].match("a" * MAX_NAME + "b")
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "targets": ["re:a.*b$"],
    }
    found = ct_config.read({"config_groups": {"g": group}})
    assert found.scheme_of("a" * (MAX_NAME - 1) + "b") is not None
    assert found.scheme_of("a" * MAX_NAME + "b") is None
