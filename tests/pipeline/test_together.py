"""Small jobs done together give the bytes and figures of one by one, and say the same of what is
refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbitcli.api import Request, quantize
from lowbitcli.containers.comfyui import COMFYUI
from lowbitcli.containers.compressed_tensors import COMPRESSED_TENSORS
from lowbitcli.containers.lowbit import LOWBIT
from lowbitcli.containers.torchao import TORCHAO
from lowbitcli.errors import LowbitError, NonFiniteError, UnsupportedError
from lowbitcli.pipeline import alike, memory, together
from lowbitcli.pipeline.memory import Budget
from lowbitcli.pipeline.together import Together
from lowbitcli.schemes import SCHEMES
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

ROOT = Path(__file__).parents[2]
WRITERS = (LOWBIT, COMPRESSED_TENSORS, COMFYUI, TORCHAO)
ALL, FEW, TWO = Budget(1, 1 << 30, 1 << 30), Budget(3, 20000, 0), Budget(2, 1 << 17, 1 << 30)


def model():
    """Experts of one shape with whole and with ragged bands, a fused group, other dtypes, and what
    is copied in between."""
    made = {f"{LAYER}self_attn.{x}_proj.weight": weight(40, 128, 0.1 * i, seed=i) for i, x in
            enumerate("qkv", 1)}  # fmt: skip
    for number in range(5):
        experts = f"{LAYER}mlp.experts.{number}."
        made[experts + "gate_proj.weight"] = weight(48, 128, seed=number)
        made[experts + "up_proj.weight"] = weight(48, 128, 3.0, seed=10 + number)
        made[experts + "down_proj.weight"] = weight(128, 128, seed=20 + number)
        made[f"{LAYER}norm.{number}.weight"] = weight(1, 128, seed=number)[0]
    made[LAYER + "mlp.one_proj.weight"] = weight(130, 128, seed=3).float()
    made[LAYER + "mlp.two_proj.weight"] = weight(130, 128, seed=4).float()
    made[LAYER + "mlp.half_proj.weight"] = weight(130, 128, seed=5).half()
    made["model.nothing"] = torch.zeros(0, 4)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = {**checkpoints.CONFIG, "model_type": "qwen3_moe"}
    return single(tmp_path_factory.mktemp("together") / "source", model(), config)


@pytest.fixture
def use(monkeypatch):
    """Return a function that makes runs use a budget, with or without doing jobs together."""

    def chosen(budget, is_on=True):
        monkeypatch.setattr(memory, "budget", lambda *_: budget)
        monkeypatch.setattr(together, "DEVICES", frozenset({"cpu"} if is_on else ()))

    return chosen


@pytest.fixture
def stacks(monkeypatch):
    """Return the sizes of the stacks that are quantized, as they are."""
    found, real = [], alike.quantize

    def quantize_and_tell(weight, stack, amax):
        found.append(len(stack))
        return real(weight, stack, amax)

    monkeypatch.setattr(alike, "quantize", quantize_and_tell)
    return found


@pytest.mark.parametrize(
    ("container", "scheme"),
    [(one.name, scheme.name) for one in WRITERS for scheme in SCHEMES if scheme.name in one.writes],
)
def test_bytes_and_figures_are_those_of_one_by_one(
    tmp_path, source, use, stacks, container, scheme
):
    request = Request(scheme=scheme, container=container)
    found = []
    for number, (budget, is_on) in enumerate([(ALL, False), (ALL, True), (FEW, True), (TWO, True)]):
        use(budget, is_on)
        done = quantize(source, tmp_path / str(number), request, device="cpu")
        found.append((checkpoints.hashes(done.output), done.errors))
        assert bool(stacks) == is_on
    assert len(found[0][1]) == 21
    assert all(one == found[0] for one in found[1:])
    assert max(stacks) >= 5


@pytest.mark.parametrize("rule", ("mse", "four_over_six"))
def test_rules_too(tmp_path, source, use, stacks, rule):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'container: lowbit\nrules: [{{match: "*", scheme: nvfp4, scale: {rule}}}]\n')
    found = []
    for is_on in (False, True):
        use(ALL, is_on)
        done = quantize(source, tmp_path / str(is_on), Request(recipe=recipe), device="cpu")
        found.append((checkpoints.hashes(done.output), done.errors))
    assert found[0] == found[1] and max(stacks) >= 5


def test_a_batch_is_read_and_written_by_few_calls(tmp_path, source, use, monkeypatch):
    counts = {}
    for is_on in (False, True):
        calls = {"preadv": 0, "pwrite": 0}
        with monkeypatch.context() as patched:
            for name in calls:
                real = getattr(os, name)

                def counted(*given, name=name, real=real, calls=calls):
                    calls[name] += 1
                    return real(*given)

                patched.setattr(os, name, counted)
            use(ALL, is_on)
            quantize(source, tmp_path / str(is_on), Request(container="lowbit"), device="cpu")
        counts[is_on] = calls
    assert counts[False]["preadv"] > 26 and counts[False]["pwrite"] > 66
    assert counts[True]["preadv"] < 10 and counts[True]["pwrite"] < 12


def test_what_is_refused_is_said_as_one_by_one(tmp_path, use):
    bad = model()
    bad[LAYER + "mlp.experts.3.up_proj.weight"][7, 9] = float("nan")
    bad[LAYER + "mlp.experts.1.up_proj.weight"][2, 1] = float("inf")
    top = {f"{LAYER}mlp.{x}_proj.weight": torch.full((32, 32), 3.39e38) for x in ("up", "down")}
    for number, (tensors, kind, says) in enumerate(
        (
            (bad, NonFiniteError, "experts.1.up_proj.weight holds 0 NaN and 1 Inf"),
            (top, UnsupportedError, "mlp.down_proj.weight has values that mxfp8 rounds up"),
        )
    ):
        source = single(tmp_path / f"source{number}", tensors)
        said = []
        for is_on in (False, True):
            use(ALL, is_on)
            with pytest.raises(LowbitError) as caught:
                quantize(source, tmp_path / "out", Request(scheme="mxfp8"), device="cpu")
            assert isinstance(caught.value, kind)
            said.append((caught.value.message, caught.value.hint))
            assert not (tmp_path / "out").exists()
        assert said[0] == said[1] and says in said[0][0]


def test_a_device_that_is_not_named_does_them_one_by_one(tmp_path, source, use, monkeypatch):
    """The one switch."""
    assert sorted(together.DEVICES) == ["cpu", "cuda"]

    def refuse(self):
        raise AssertionError("done together")

    monkeypatch.setattr(Together, "work", refuse)
    use(ALL, False)
    quantize(source, tmp_path / "out", device="cpu")
    use(ALL, True)
    with pytest.raises(AssertionError, match="done together"):
        quantize(source, tmp_path / "other", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ("nvfp4", "fp8_channel"))
def test_kernels_in_the_interpreter_give_the_same(tmp_path, source, use, scheme):
    use(ALL, False)
    wanted = quantize(
        source, tmp_path / "one", Request(scheme=scheme, container="lowbit"), device="cpu"
    )
    code = (
        "import sys; from lowbitcli.api import Request, quantize; "
        "done = quantize(sys.argv[1], sys.argv[2], "
        "Request(scheme=sys.argv[3], container='lowbit'), device='cpu'); "
        "print({name: vars(sums) for name, sums in done.errors.items()})"
    )
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    said = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "out", scheme],
        capture_output=True,
        text=True,
        env=env,
    )
    assert said.returncode == 0, said.stderr
    assert checkpoints.hashes(tmp_path / "out") == checkpoints.hashes(wanted.output)
    assert said.stdout.strip() == str({name: vars(x) for name, x in wanted.errors.items()})
