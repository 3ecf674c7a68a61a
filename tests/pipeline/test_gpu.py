"""The pipeline on a GPU: the CPU's bytes for every cut, streams that do not disturb each other,
memory within its caps.
"""

import subprocess
import sys

import pytest
import torch

from lowbitcli.api import Request, dequantize, quantize
from lowbitcli.pipeline import memory
from lowbitcli.pipeline.memory import Budget
from lowbitcli.schemes import SCHEMES
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

pytestmark = pytest.mark.gpu

CUTS = (Budget(1, 1, 0), Budget(6, 1, 1 << 30), Budget(6, 1, 0), Budget(4, 1 << 24, 1 << 30))


def model():
    made = {f"{LAYER}self_attn.{x}_proj.weight": weight(700, 256, 0.1, seed=ord(x)) for x in "qkvo"}
    for number in range(12):
        made[f"{LAYER}mlp.{number:02}_proj.weight"] = weight(1100, 512, seed=number)
    made[LAYER + "mlp.down_proj.weight"] = weight(513, 256).float()
    made["model.embed_tokens.weight"] = weight(4000, 64)
    return made


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_the_cpus_bytes_for_every_cut(tmp_path, scheme, monkeypatch):
    source = single(tmp_path / "source", model())
    other = "mxfp8" if scheme != "mxfp8" else "nvfp4"
    wanted = None
    for number, (device, budget) in enumerate([("cpu", None), *(("cuda", cut) for cut in CUTS)]):
        root = tmp_path / str(number)
        root.mkdir()
        with monkeypatch.context() as patched:
            if budget is not None:
                patched.setattr(memory, "budget", lambda *_, budget=budget: budget)
            request = Request(scheme=scheme, container="lowbit")
            done = quantize(source, root / "out", request, device=device)
            again = quantize(done.output, root / "again", Request(scheme=other), device=device)
            fake = quantize(source, root / "fake", Request(scheme=scheme, fake=True), device=device)
            dequantize(done.output, root / "back", device=device)
        found = checkpoints.hashes(root), done.errors, again.errors, fake.errors
        wanted = wanted or found
        assert found == wanted, (device, budget)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_the_cpus_bytes_with_importance(tmp_path, scheme):
    source = single(tmp_path / "source", model())
    generator = torch.Generator().manual_seed(1)
    names = [name.removesuffix(".weight") for name in model() if ".layers." in name]
    h = {
        name: torch.randint(-20, 20, (model()[f"{name}.weight"].shape[1],), generator=generator)
        for name in names
    }
    stats = {name: one.to(torch.int8) for name, one in h.items()}
    file = checkpoints.write(tmp_path / "h.safetensors", stats, {"lowbit.importance": "1"})
    recipe = tmp_path / "search.yaml"
    recipe.write_text(f"rules: [{{match: '*', scheme: {scheme}, scale: mse}}]\n")
    request = Request(recipe=recipe, container="lowbit", importance=file)
    cpu, gpu = (
        quantize(source, tmp_path / device, request, device=device) for device in ("cpu", "cuda")
    )
    assert checkpoints.hashes(cpu.output) == checkpoints.hashes(gpu.output)
    assert cpu.errors == gpu.errors


def test_what_is_copied_never_visits_the_gpu(tmp_path):
    tensors = {f"model.embed_tokens.{n}": weight(4096, 1024, seed=n) for n in range(4)}
    source = single(tmp_path / "source", tensors)
    torch.cuda.empty_cache()
    done = quantize(source, tmp_path / "out", device="cuda")
    assert done.peak_gpu < 8 << 20
    assert all(
        checkpoints.same(tensor, tensors[name])
        for name, tensor in checkpoints.read(done.output).items()
    )


@pytest.mark.parametrize("cap", (256 << 20, 1 << 30))
def test_what_is_reserved_stays_below_its_cap_and_bytes_are_the_same(tmp_path, cap):
    source = single(tmp_path / "source", {LAYER + "mlp.up_proj.weight": weight(65536, 4096)})
    torch.cuda.empty_cache()
    free = quantize(source, tmp_path / "free", device="cuda")
    torch.cuda.empty_cache()
    held = quantize(source, tmp_path / "held", device="cuda", max_gpu_memory=cap)
    assert held.peak_gpu <= cap
    assert checkpoints.hashes(free.output) == checkpoints.hashes(held.output)
    assert free.errors == held.errors


def test_memory_of_the_process_stays_below_the_cap(tmp_path):
    source = single(tmp_path / "source", {LAYER + "mlp.up_proj.weight": weight(65536, 8192)})
    out = tmp_path / "out"
    code = (
        "import sys; from lowbitcli.api import quantize; "
        "print(quantize(sys.argv[1], sys.argv[2], device='cuda').peak_rss)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(source), str(out)], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) <= memory.DEFAULT
