"""A checkpoint of 100,000 tensors is planned whole, in bounded memory. How long it takes is
printed and not judged: on a shared machine that says more of the neighbours.

The files are holes: only their headers are real.
"""

import json
import subprocess
import sys

from tests import checkpoints

LAYERS, EXPERTS = 60, 550  # a mixture of experts: 60 * (550 * 3 + 8) tensors, about 100,000
SHARDS = 20
MEGABYTES = 500  # measured: 449 to 458; seconds beside those of json in the same run

CODE = """
import gc, json, sys, time
from lowbitcli.plan.prepare import Request, plan_quantize
start = time.process_time()
plan = plan_quantize(sys.argv[1], None, Request())
planning = time.process_time() - start
# Not ru_maxrss, which starts from the peak of the process that started this one.
peak = next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if "VmHWM" in line)
gc.disable()
start = time.process_time()
made = {str(number): {"at": [number, number + 1]} for number in range(400_000)}
again = json.loads(json.dumps(made))
yardstick = time.process_time() - start
print(json.dumps([len(plan.weights), len(plan.jobs), yardstick, planning, peak]))
"""


def names():
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for expert in range(EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj"):
                yield f"{stem}mlp.experts.{expert}.{part}.weight", [128, 128]
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{stem}self_attn.{part}.weight", [128, 128]
        yield f"{stem}mlp.gate.weight", [64, 128]
        for part in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"):
            yield f"{stem}{part}.weight", [128]


def build(root):
    root.mkdir()
    listed = list(names())
    places = {}
    each = -(-len(listed) // SHARDS)
    for number in range(SHARDS):
        header, stop = {}, 0
        file = checkpoints.shard_name(number + 1, SHARDS)
        for name, shape in listed[number * each : (number + 1) * each]:
            start, stop = stop, stop + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
            places[name] = file
        path = checkpoints.write_raw(root / file, header)
        with path.open("r+b") as opened:
            opened.truncate(path.stat().st_size + stop)
    (root / checkpoints.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (root / "config.json").write_text(json.dumps(checkpoints.CONFIG))
    return len(listed)


def test_100000_tensors(tmp_path):
    count = build(tmp_path / "large")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "large")], capture_output=True, text=True
    )
    assert done.stderr == ""
    weights, jobs, yardstick, planning, peak = json.loads(done.stdout)
    times = planning / yardstick
    print(f"\n{weights:,} tensors: {planning:.2f} s of CPU, {times:.1f} yardsticks, {peak} MB")
    assert weights == count > 99_000
    assert jobs == LAYERS * (EXPERTS * 2 + 2 + 1 + 3)
    assert peak < MEGABYTES
