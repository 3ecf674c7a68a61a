"""Bytes and figures do not depend on how a weight is cut, on threads or on what is held; memory
stays within its cap.
"""

import shutil
import subprocess
import sys

import pytest
import torch

from lowbitcli.api import Request, dequantize, plan_quantize, quantize
from lowbitcli.containers.compressed_tensors import COMPRESSED_TENSORS
from lowbitcli.containers.lowbit import LOWBIT
from lowbitcli.errors import NonFiniteError, UsageError
from lowbitcli.pipeline import memory, worker
from lowbitcli.pipeline.memory import Budget
from lowbitcli.pipeline.slices import UNIT_ELEMENTS, slices, unit_rows
from lowbitcli.plan import need
from lowbitcli.plan.nouns import Weight
from lowbitcli.schemes import BY_NAME, SCHEMES
from lowbitcli.tables import size
from tests import checkpoints
from tests.checkpoints import LAYER, single, weight

WHOLE = Budget(1, 1 << 40, 1 << 40)
WRITERS = (LOWBIT, COMPRESSED_TENSORS)
CUTS = (Budget(1, 1, 0), Budget(3, 1, 1 << 40), Budget(4, 300 * 64, 0))


def model(wide=32):
    return {
        LAYER + "self_attn.q_proj.weight": weight(700, 2 * wide, 0.1, seed=1),
        LAYER + "self_attn.k_proj.weight": weight(300, 2 * wide, 1.0, seed=2),
        LAYER + "self_attn.v_proj.weight": weight(16, 2 * wide, 5.0, seed=3),
        LAYER + "mlp.down_proj.weight": weight(513, 3 * wide, seed=4).float(),
        LAYER + "mlp.up_proj.weight": weight(257, wide, seed=5).half(),
        "model.embed_tokens.weight": weight(400, 64),
        "model.norm.weight": weight(1, 64)[0],
    }


@pytest.fixture
def source(tmp_path):
    return single(tmp_path / "source", model())


@pytest.fixture
def cut(monkeypatch):
    """Return a function that makes runs use a budget."""

    def use(budget):
        monkeypatch.setattr(memory, "budget", lambda *_: budget)

    return use


@pytest.mark.parametrize(
    ("container", "scheme"),
    [(one.name, scheme.name) for one in WRITERS for scheme in SCHEMES if scheme.name in one.writes],
)
def test_bytes_and_figures_are_equal_for_every_cut(tmp_path, source, cut, scheme, container):
    if scheme == "int4_g128":
        source = single(tmp_path / "wide", model(128))
    request = Request(scheme=scheme, container=container)
    other = Request(scheme="mxfp8" if scheme != "mxfp8" else "nvfp4", container=container)
    found = []
    for number, budget in enumerate((WHOLE, *CUTS)):
        cut(budget)
        root = tmp_path / str(number)
        root.mkdir()
        done = quantize(source, root / "out", request, device="cpu")
        again = quantize(done.output, root / "again", other, device="cpu")
        fake = quantize(source, root / "fake", Request(scheme=scheme, fake=True), device="cpu")
        dequantize(done.output, root / "back", device="cpu")
        found.append((checkpoints.hashes(root), done.errors, again.errors, fake.errors))
    assert len(found[0][0]) >= 8 and len(found[0][1]) == 5
    for one in found[1:]:
        assert one == found[0]


def test_a_recode_is_equal_for_every_cut(tmp_path, source, cut):
    start = quantize(source, tmp_path / "start", Request(container="lowbit"), device="cpu")
    found = []
    for number, budget in enumerate((WHOLE, *CUTS)):
        cut(budget)
        request = Request(container="compressed-tensors")
        done = quantize(start.output, tmp_path / str(number), request, device="cpu")
        found.append((checkpoints.hashes(done.output), done.moved))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("scheme", ("nvfp4", "fp8_channel"))
def test_a_thread_that_does_jobs_by_itself_gives_the_same(tmp_path, cut, monkeypatch, scheme):
    """On a GPU it does, where a job is a small part of all; here the CPU may."""
    made = {f"{LAYER}mlp.{x}.weight": weight(500, 64, seed=x) for x in range(40)}
    source = single(tmp_path / "source", made | {f"{LAYER}mlp.big.weight": weight(9000, 64)})
    begun, real = [], worker._step
    monkeypatch.setattr(worker, "_step", lambda *of: begun.append(of) or real(*of))
    found = []
    for number, most in enumerate((0, 1 << 20)):
        cut(Budget(3, 100 * 64, 1 << 20))
        monkeypatch.setattr(worker, "ALONE", {"cpu": most})
        done = quantize(source, tmp_path / str(number), Request(scheme=scheme), device="cpu")
        found.append((checkpoints.hashes(done.output), done.errors, len(begun)))
        begun.clear()
    assert found[0][:2] == found[1][:2]
    of_big = found[1][2] - 40
    assert of_big > 70 and found[0][2] >= of_big + 4 * 40


def test_cuts_do_cut(source, cut, tmp_path, monkeypatch):
    """The weights above have more than one slice under the small budgets, and one under WHOLE."""
    shape = (700, 64)
    one = Weight("w", shape, "BF16", None, BY_NAME["nvfp4"], {}, {})
    assert [len(slices(one, budget.elements)) for budget in (WHOLE, *CUTS)] == [1, 6, 6, 3]
    stack = Weight("w", (2, 200, 64), "BF16", None, BY_NAME["nvfp4"], {}, {})
    assert [(s.matrix, s.start, s.stop, s.first, s.last) for s in slices(stack, 1)] == [
        (0, 0, 128, True, False),
        (0, 128, 200, False, True),
        (1, 0, 128, True, False),
        (1, 128, 200, False, True),
    ]


@pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
def test_units_of_wide_weights_are_smaller_and_may_be_cut_there(scheme):
    for cols in (128, 32768, 65536, 1 << 20, 1 << 23):
        rows = unit_rows(Weight("w", (512, cols), "BF16", None, BY_NAME[scheme], {}, {}))
        least = max(BY_NAME[scheme].row_multiple, BY_NAME[scheme].block[0] or 1)
        assert rows % least == 0
        assert rows == 128 or rows * 2 * cols > UNIT_ELEMENTS
        assert rows * cols <= UNIT_ELEMENTS or rows == least


@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp8"))
@pytest.mark.parametrize("budget", (WHOLE, *CUTS))
def test_nan_in_any_slice_is_found_and_counted_in_all_of_them(tmp_path, cut, scheme, budget):
    tensors = model()
    bad = tensors[LAYER + "self_attn.q_proj.weight"]
    bad[650, 3], bad[130, 7], bad[131, 7] = float("nan"), float("inf"), float("nan")
    source = single(tmp_path / "bad", tensors)
    cut(budget)
    with pytest.raises(NonFiniteError, match=r"2 NaN and 1 Inf, the first at \(130, 7\)"):
        quantize(source, tmp_path / "out", Request(scheme=scheme), device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    kept = quantize(
        source, tmp_path / "out", Request(scheme=scheme, nonfinite="keep"), device="cpu"
    )
    assert len(kept.non_finite) == 1


def test_threads_are_given_back(tmp_path, source):
    before = torch.get_num_threads()
    quantize(source, tmp_path / "out", device="cpu")
    assert torch.get_num_threads() == before


PLANNED = """
import sys
import torch
from lowbitcli.pipeline.memory import resident, peak, budget
from lowbitcli.api import Request
from lowbitcli.pipeline.run import Options, run
from lowbitcli.plan.prepare import quantization
from pathlib import Path
source, out, scheme, cap = sys.argv[1:]
with quantization(source, out, Request(scheme=scheme)) as (plan, checkpoint, _):
    before = resident()
    found = run(plan, checkpoint, Path(out), torch.device("cpu"), Options(max_memory=int(cap)))
print(before, found.peak_rss)
"""


def memory_of(source, out, scheme, cap):
    """Return the bytes of a process before a run and at its most, in the run."""
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, str(source), str(out), scheme, str(cap)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before, most = map(int, done.stdout.split())
    return before, most


def zeros(path, rows, cols):
    """Write a file of one weight, full of holes, that takes no space."""
    checkpoints.write_raw(
        path,
        {
            "a.weight": {
                "dtype": "BF16",
                "shape": [rows, cols],
                "data_offsets": [0, 2 * rows * cols],
            }
        },
    )
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2 * rows * cols)
    return path


@pytest.mark.parametrize("scheme", ("mxfp8", "fp8"))
def test_memory_does_not_grow_with_the_weight(tmp_path, scheme):
    small = zeros(tmp_path / "small.safetensors", 2048, 4096)
    large = zeros(tmp_path / "large.safetensors", 16384, 4096)
    cap = memory.LEAST
    _, first = memory_of(small, tmp_path / "a.safetensors", scheme, cap)
    _, second = memory_of(large, tmp_path / "b.safetensors", scheme, cap)
    assert max(first, second) < cap
    held = 128 << 20  # the large one may be held between its two passes
    assert second < first + (held if scheme == "fp8" else 0) + (96 << 20)


def test_the_plan_says_so(tmp_path):
    """A weight of many slices needs what threads work on and what is held, up to the cap."""
    needed = []
    for rows in (64, 1 << 14, 1 << 22):
        path = zeros(tmp_path / f"{rows}.safetensors", rows, 4096)
        needed.append(need.memory(plan_quantize(path, None, Request(scheme="nvfp4"))))
    assert needed[0] == need.BASE + need.PER_WEIGHT + 34 * 64 * 4096
    assert needed[0] < needed[1] < needed[2] == need.CAP == memory.DEFAULT
    assert needed[1] < need.BASE + 34 * (1 << 14) * 4096


def test_a_cap_of_the_gpu_is_kept_on_paper(tmp_path):
    """Slices and what is held fit, and fewer threads work where a slice of each would not."""
    plan = plan_quantize(zeros(tmp_path / "a.safetensors", 1 << 22, 4096), None, Request())
    wanted = Budget(6, 1 << 24, 0)
    found = [memory.within_gpu(plan, cap << 20, wanted) for cap in (256, 512, 1024, 65536)]
    unit = 128 * 4096
    for budget, cap in zip(found, (256, 512, 1024, 65536), strict=True):
        slices_take = budget.threads * max(budget.elements, unit) * memory.ON_GPU_COST
        assert slices_take + budget.held <= (cap << 20) - memory.GPU_APART
    assert found[-1] == Budget(6, 1 << 24, found[-1].held) and found[-1].held > 32 << 30
    assert found[0].elements < found[1].elements < found[2].elements < 1 << 24
    assert need.gpu_memory(plan, 1 << 30) == 1 << 30 < need.gpu_memory(plan)
    assert need.memory(plan, gpu=True) > need.GPU_BASE


def test_a_gpu_has_fewer_threads_before_smaller_slices(tmp_path, monkeypatch):
    plan = plan_quantize(zeros(tmp_path / "a.safetensors", 1 << 20, 4096), None, Request())
    found = []
    for resident in (300, 900, 1100, 1300, 1500):
        monkeypatch.setattr(memory, "resident", lambda of=resident: of << 20)
        own = memory.budget(plan, memory.DEFAULT, torch.device("cuda"), 64 << 30)
        found.append((own.threads, own.elements >> 20))
    assert found == [(8, 16), (8, 16), (6, 16), (4, 16), (4, 4)]


def test_a_run_says_what_was_forecast_and_what_came(lowbit, tmp_path, source):
    done = quantize(source, tmp_path / "out", device="cpu")
    assert done.forecast == (need.memory(done.plan), 0)
    assert 0.5 < done.forecast[0] / need.BASE < 1.5
    said = lowbit("quantize", source, "-o", tmp_path / "again", "--device", "cpu")
    assert f"(forecast {size(done.forecast[0])})" in said.out


@pytest.mark.parametrize("text", ("255MiB", "much"))
def test_too_small_a_cap_of_the_gpu_is_refused(lowbit, tmp_path, source, text):
    said = lowbit("quantize", source, "-o", tmp_path / "o", "--max-gpu-memory", text)
    assert said.code == 2 and "--max-gpu-memory" in said.err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [
        ("fp8", 1 << 15),
        pytest.param("fp8", 1 << 17, marks=pytest.mark.slow),
        pytest.param("nvfp4", 1 << 17, marks=pytest.mark.slow),
    ],
)
def test_2_and_8_gb_within_1_gib(tmp_path, scheme, rows):
    source = zeros(tmp_path / "large.safetensors", rows, 1 << 15)
    _, most = memory_of(source, tmp_path / "out.safetensors", scheme, memory.LEAST)
    assert most < memory.LEAST


def test_the_peak_is_this_programs_own_and_not_that_of_who_started_it():
    held = torch.ones(100 << 20, dtype=torch.uint8)
    code = "from lowbitcli.pipeline.memory import peak, resident; print(peak() - resident())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert memory.peak() >= memory.resident() > held.numel()
    assert 0 <= int(done.stdout) < 64 << 20


def test_less_than_the_least_is_refused(tmp_path, source):
    with pytest.raises(UsageError, match="too few"):
        quantize(source, tmp_path / "out", device="cpu", max_memory=memory.LEAST - 1)
    assert not (tmp_path / "out").exists()


def test_sizes_on_the_command_line(lowbit, tmp_path, source):
    for text in ("1GiB", "1 gib", "2147483648", "1.5GB", "2TB"):
        assert lowbit("quantize", source, "-o", tmp_path / "o", "--max-memory", text).code == 0
        assert lowbit("quantize", source, "-o", tmp_path / "o", "--force").code == 0
        shutil.rmtree(tmp_path / "o")
    for text in ("512MB", "much", "1iB", "-1", "1e9", ""):
        said = lowbit("quantize", source, "-o", tmp_path / "o", "--max-memory", text)
        assert said.code == 2, text
