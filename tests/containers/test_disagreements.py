"""What a container finds wrong: malformed declarations are one clear error, and tensors that do
not bear a declaration out are findings, at which quantize and dequantize stop."""

import json

import pytest
import torch

from lowbitcli.api import Request, dequantize, inspect, quantize, verify
from lowbitcli.errors import CheckpointError, UnsupportedError
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

DOWN, UP = LAYER + "mlp.down_proj", LAYER + "mlp.up_proj"
GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


@pytest.fixture
def made(tmp_path):
    """Return a function: scheme, container -> a checkpoint of two weights."""

    def make(scheme="nvfp4", container="compressed-tensors"):
        tensors = {DOWN + ".weight": weight(64, 64), UP + ".weight": weight(64, 64, seed=1)}
        source = single(tmp_path / "source", tensors)
        request = Request(scheme=scheme, container=container)
        return quantize(source, tmp_path / "made", request, device="cpu").output

    return make


def set_config(root, value, *path):
    """Set a place in quantization_config (no path: all of it) to `value`."""
    config = checkpoints.config_of(root)
    place = config
    for key in ("quantization_config", *path)[:-1]:
        place = place[key]
    place[("quantization_config", *path)[-1]] = value
    (root / "config.json").write_text(json.dumps(config))


def set_tensors(root, edit):
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    edit(tensors)
    checkpoints.write(file, tensors, metadata)


MALFORMED = [
    ("nvfp4",),
    (["nvfp4"],),
    (4,),
    ({"config_groups": {}},),
    ({"quant_method": None, "bits": 4},),
    ({"quant_method": ["compressed-tensors"]},),
    ({"quant_method": "gptq", "bits": 4},),
    ([], "config_groups"),
    ("x", "config_groups"),
    (0, "config_groups"),
    ("x", *GROUP),
    ({}, *GROUP),
    (None, *GROUP),
    ("x", *GROUP, "targets"),
    ([1], *GROUP, "targets"),
    ({"a": 1}, *GROUP, "targets"),
    (["re:("], *GROUP, "targets"),
    (["re:" + "a" * 600], *GROUP, "targets"),
    (["re:" + "(" * 400 + ")" * 400], *GROUP, "targets"),
    (None, *WEIGHTS),
    ("x", *WEIGHTS),
    ([], *WEIGHTS),
    ({}, *WEIGHTS),
    ([4], *WEIGHTS, "num_bits"),
    ({"a": {}}, *WEIGHTS, "type"),
    (["x"], *WEIGHTS, "strategy"),
    (10**400, *WEIGHTS, "num_bits"),
    ("lm_head", "ignore"),
    ([None], "ignore"),
    (["re:["], "ignore"),
    (False, "ignore"),
]


@pytest.mark.parametrize("change", MALFORMED, ids=lambda change: repr(change)[:60])
@pytest.mark.parametrize("run", (inspect, quantize, dequantize))
def test_a_malformed_config_is_one_clear_error(tmp_path, made, change, run):
    root = made()
    set_config(root, *change)
    options = {} if run is inspect else {"output": tmp_path / "out", "device": "cpu"}
    with pytest.raises(CheckpointError) as caught:
        run(root, **options)
    assert caught.value.exit_code == 4
    assert "config" in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    assert not (tmp_path / "out").exists()


UNREAD = [
    ({"num_bits": 3, "type": "int", "strategy": "group", "group_size": 128}, "3 bits, type int"),
    ({"num_bits": 4, "type": "int", "strategy": "tensor"}, "type int, strategy tensor"),
    ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}, "group size 64"),
    ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32}, "size 32"),
    ({"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}, "6 bits"),
    ({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": False}, "8 bits"),
    ({"num_bits": 8, "type": "float", "strategy": "token"}, "strategy token"),
    ({"num_bits": 8, "type": "float", "strategy": "x\x1b[31m"}, "strategy x\\x1b[31m"),
]


@pytest.mark.parametrize(("weights", "says"), UNREAD, ids=lambda value: str(value)[:60])
def test_a_scheme_that_is_not_known_is_unsupported(made, weights, says):
    root = made()
    set_config(root, weights, *WEIGHTS)
    with pytest.raises(UnsupportedError) as caught:
        inspect(root)
    assert says in caught.value.message
    assert "group_0" in caught.value.message
    assert "nvfp4" in caught.value.hint


MORE = {
    "rotations": ("transform_config", {"config_groups": {"u": {"type": "hadamard", "apply": []}}}),
    "sparsity": ("sparsity_config", {"format": "sparse-24-bitmask"}),
}


@pytest.mark.parametrize("what", MORE)
def test_rotated_and_sparse_weights_are_refused_by_name(made, what):
    root = made()
    key, said = MORE[what]
    set_config(root, said, key)
    with pytest.raises(UnsupportedError, match=f"{key} declares {what}"):
        inspect(root)


@pytest.mark.parametrize("said", [None, {}, {"format": "dense"}])
def test_no_rotation_and_no_sparsity_are_no_fault(made, said):
    root = made()
    set_config(root, said, "sparsity_config")
    set_config(root, {} if said else said, "transform_config")
    assert inspect(root).findings == ()


def test_two_groups_for_every_linear_are_refused(made):
    root = made()
    group = checkpoints.quantization_of(root)["config_groups"]["group_0"]
    other = {**group, "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    set_config(root, {"a": group, "b": other}, "config_groups")
    with pytest.raises(CheckpointError, match="two groups"):
        inspect(root)


def without(*suffixes):
    def edit(tensors):
        for suffix in suffixes:
            del tensors[DOWN + suffix]

    return edit


def replaced(suffix, change):
    def edit(tensors):
        tensors[DOWN + suffix] = change(tensors[DOWN + suffix])

    return edit


def added(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


ONE = torch.ones(1)
FINDINGS = {
    "missing scale": ("nvfp4", without(".weight_scale"), "missing", ".weight_scale"),
    "missing global scale": (
        "nvfp4",
        without(".weight_global_scale"),
        "missing",
        ".weight_global_scale",
    ),
    "missing data": ("nvfp4", without(".weight_packed"), "orphan", ".weight_scale"),
    "orphan scale": ("mxfp8", without(".weight"), "orphan", ".weight_scale"),
    "fp8 without scale": ("fp8", without(".weight_scale"), "missing", ".weight_scale"),
    "dtype of data": (
        "nvfp4",
        replaced(".weight_packed", lambda t: t.view(torch.int8)),
        "mismatch",
        "U8 is needed, I8 is stored",
    ),
    "dtype of scales": (
        "mxfp8",
        replaced(".weight_scale", lambda t: t.float()),
        "mismatch",
        "U8 is needed, F32 is stored",
    ),
    "shape of scales": (
        "nvfp4",
        replaced(".weight_scale", lambda t: t[:, :2].contiguous()),
        "mismatch",
        "[64, 4] is needed, [64, 2] is stored",
    ),
    "scales of one dimension": (
        "FP8_DYNAMIC",
        replaced(".weight_scale", lambda t: t.reshape(-1)),
        "mismatch",
        "[64, 1] is needed, [64] is stored",
    ),
    "shape of data": (
        "nvfp4",
        replaced(".weight_packed", lambda t: t[:, :20].contiguous()),
        "mismatch",
        "40 columns",
    ),
    "one dimension": ("fp8", replaced(".weight", lambda t: t.reshape(-1)), "mismatch", "matrices"),
    "empty": ("fp8", replaced(".weight", lambda t: t[:0]), "mismatch", "no elements"),
    "weight not quantized": (
        "fp8",
        replaced(".weight", lambda t: t.bfloat16()),
        "mismatch",
        "F8_E4M3 is needed, BF16 is stored",
    ),
    "zero point": ("fp8", added(DOWN + ".weight_zero_point", ONE), "unknown", "asymmetric"),
    "activation order": ("fp8", added(DOWN + ".weight_g_idx", ONE), "unknown", "reordered"),
    "smoothed inputs": ("fp8", added(DOWN + ".pre_quant_scale", ONE), "unknown", "inputs"),
    "scale of nothing": ("fp8", added("x.weight_scale", ONE), "orphan", "weight is not there"),
}


def refused(tmp_path, root, *said):
    """Hold that inspect reports, and quantize and dequantize stop, before anything is written."""
    found = inspect(root).findings
    told = [f"{one.kind} {one.tensor}: {one.message}" for one in found]
    for one in said:
        assert any(one in line for line in told), told
    for run in (quantize, dequantize):
        with pytest.raises(CheckpointError, match="disagrees with itself") as caught:
            run(root, tmp_path / "out", device="cpu")
        assert found[0].tensor in caught.value.message
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FINDINGS)
def test_tensors_that_do_not_bear_the_config_out(tmp_path, made, name):
    scheme, edit, kind, says = FINDINGS[name]
    root = made(scheme)
    set_tensors(root, edit)
    refused(tmp_path, root, f"{kind} ", says)
    kinds = {one.kind for one in inspect(root).findings if says in f"{one.tensor} {one.message}"}
    assert kinds == {kind}


def test_ignored_but_quantized(tmp_path, made):
    root = made()
    set_config(root, ["re:.*down_proj$"], "ignore")
    refused(tmp_path, root, f"mismatch {DOWN}.weight_packed: stored as if quantized")


def test_quantized_but_in_no_group(tmp_path, made):
    root = made()
    set_config(root, [UP], *GROUP, "targets")
    refused(tmp_path, root, f"mismatch {DOWN}.weight_packed: stored as if quantized")


def test_declared_by_name_but_not_quantized(tmp_path, made):
    root = made()
    set_config(root, [UP, DOWN, LAYER + "mlp.gate_proj", "lm_head"], *GROUP, "targets")
    set_config(root, ["lm_head"], "ignore")
    set_tensors(root, added(LAYER + "mlp.gate_proj.weight", weight(64, 64)))
    refused(tmp_path, root, f"mismatch {LAYER}mlp.gate_proj.weight: the config names it")
    assert len(inspect(root).findings) == 1


def test_declared_by_name_but_not_there(tmp_path, made):
    root = made()
    set_config(root, [UP, DOWN, "model.gone"], *GROUP, "targets")
    refused(tmp_path, root, "missing model.gone.weight")


def test_exact_names_come_before_patterns_and_those_before_classes(made):
    root = made("FP8_DYNAMIC")
    group = checkpoints.quantization_of(root)["config_groups"]["group_0"]
    wrong = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    groups = {
        "class": {**group, "weights": wrong, "targets": ["Linear"]},
        "pattern": {**group, "targets": ["re:.*_proj$"]},
    }
    set_config(root, groups, "config_groups")
    assert inspect(root).findings == ()
    groups["exact"] = {**group, "weights": wrong, "targets": [DOWN]}
    set_config(root, groups, "config_groups")
    assert {one.tensor for one in inspect(root).findings} == {DOWN + ".weight_scale"}


SPOILED = {
    "shape": [64, 32],
    "dtype": "F8_E4M3",
    "element": "E4M3",
    "scale_format": "E8M0",
    "block": [1, 32],
    "tensors": {"data": UP + ".weight"},
}


@pytest.mark.parametrize("key", SPOILED)
@pytest.mark.parametrize("value", ("other", "gone"))
def test_a_lowbit_file_that_describes_itself_wrongly(tmp_path, made, key, value):
    root = made(container="lowbit")
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    described = json.loads(metadata["lowbit.weights"])
    entry = described[DOWN + ".weight"]
    entry[key] = SPOILED[key]
    if value == "gone":
        del entry[key]
    metadata["lowbit.weights"] = json.dumps(described)
    checkpoints.write(file, tensors, metadata)
    refused(tmp_path, root, f"mismatch {DOWN}.weight: ")


def test_a_lowbit_file_of_an_unknown_scheme(tmp_path, made):
    root = made(container="lowbit")
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    metadata["lowbit.weights"] = metadata["lowbit.weights"].replace("nvfp4", "nvfp3")
    checkpoints.write(file, tensors, metadata)
    refused(tmp_path, root, f"unknown {DOWN}.weight: its scheme 'nvfp3'")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("lowbit.format", "{"),
        ("lowbit.format", "[]"),
        ("lowbit.format", '{"version": 2}'),
        ("lowbit.weights", "nothing"),
        ("lowbit.weights", "[]"),
        ("lowbit.weights", '{"a": 1}'),
        ("lowbit.weights", "[" * 100_000),
    ],
)
def test_a_lowbit_file_whose_metadata_is_malformed(made, key, text):
    root = made(container="lowbit")
    file = root / "model.safetensors"
    tensors, metadata = checkpoints.read(file), checkpoints.metadata_of(file)
    checkpoints.write(file, tensors, {**metadata, key: text})
    with pytest.raises(CheckpointError) as caught:
        inspect(root)
    assert key in caught.value.message


@pytest.mark.parametrize("container", ("lowbit", "compressed-tensors"))
@pytest.mark.parametrize("scheme", ("fp8", "fp8-dynamic", "mxfp8", "nvfp4"))
def test_parts_that_nothing_explains_are_not_guessed(tmp_path, made, scheme, container):
    """The header metadata was lost, or the config lies elsewhere."""
    root = made(scheme, container)
    file = checkpoints.write(
        tmp_path / "alone.safetensors", checkpoints.read(root), {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match="nothing says of which kind"):
        dequantize(file, tmp_path / "out.safetensors", device="cpu")
    assert {one.kind for one in inspect(file).findings} == {"unknown"}


def test_the_command(made, lowbit):
    root = made()
    set_tensors(root, without(".weight_scale"))
    said = lowbit("dequantize", root)
    assert said.code == 4
    assert f"{DOWN}.weight_packed: nvfp4 needs the tensor {DOWN}.weight_scale" in said.err
    said = lowbit("inspect", root)
    assert said.code == 4
    assert DOWN + ".weight_scale" in said.out


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", LAYER + "mlp.gate.weight"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_what_was_8_bits_without_a_scale_is_plain(tmp_path, name, dtype):
    kept = weight(64, 64).to(dtype)
    kept = kept[0].clone() if "norm" in name else kept
    source = single(tmp_path / "source", {name: kept, DOWN + ".weight": weight(64, 64)})
    output = quantize(source, tmp_path / "out", Request(scheme="nvfp4"), device="cpu").output
    assert name.removesuffix(".weight") in checkpoints.quantization_of(output)["ignore"]
    assert verify(output, against=source, device="cpu").passed
    back = dequantize(output, tmp_path / "back", device="cpu").output
    assert torch.equal(checkpoints.read(back / "model.safetensors")[name].float(), kept.float())


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "weight_global_scale"])
def test_an_ignored_module_with_a_scale_disagrees(made, scale):
    output = made()
    set_config(output, ["lm_head"], "ignore")
    stored = {"lm_head.weight": weight(64, 64).to(torch.float8_e4m3fn)}
    stored[f"lm_head.{scale}"] = torch.ones(1)
    set_tensors(output, lambda tensors: tensors.update(stored))
    assert "lm_head" in str(inspect(output).findings)


def test_8_bits_without_a_scale_disagree_where_nothing_ignores_them(made):
    output = made()
    stored = {"lm_head.weight": weight(64, 64).to(torch.float8_e4m3fn)}
    set_tensors(output, lambda tensors: tensors.update(stored))
    set_config(output, [], "ignore")
    found = inspect(output).findings
    assert {(f.kind, f.tensor.rpartition(".")[0]) for f in found} == {("missing", "lm_head")}
    set_config(output, [DOWN, UP], *GROUP, "targets")
    (finding,) = inspect(output).findings
    assert (finding.kind, finding.tensor) == ("mismatch", "lm_head.weight")
