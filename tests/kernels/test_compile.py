"""Every kernel is compiled for Hopper and Blackwell without a GPU, and none of them spills
registers.

Runs in a process of its own with LOWBIT_TRITON=1, since the tests' own process has no triton.
`python -m tests.kernels.test_compile` prints registers, spills and shared memory of each.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.variants import variants

pytest.importorskip("triton", reason="triton is not installed")

KERNELS = Path(__file__).parents[2] / "kernels" / "lowbit_kernels"


def _compile_all(arch: int) -> list[dict]:
    """Compile every variant for sm_<arch>; needs LOWBIT_TRITON=1."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows = []
    for module, name, types, constants, warps in variants(arch):
        kernel = getattr(importlib.import_module(f"lowbit_kernels.{module}"), name)
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {n: types.get(n, "constexpr") for n in names},
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={
                (names.index(n),): [["tt.divisibility", 16]]
                for n, t in types.items()
                if t[0] == "*" or (n in ("size", "cols") and constants.get("ALIGNED"))
            },
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps, "enable_fp_fusion": False},
        )
        rows.append(
            {
                "kernel": f"{module}.{name}",
                "constants": constants,
                "types": types,
                "shared": compiled.metadata.shared,
                "usage": _usage(compiled.asm["cubin"]),
                "held": _held(compiled.asm["ttgir"]),
            }
        )
    return rows


def _table(found: dict[int, list[dict]]) -> list[str]:
    """Return lines of Markdown: the most registers of each kernel, and what it spills."""
    lines = [f"| kernel | {' | '.join(f'sm_{arch}' for arch in found)} |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for kernel in sorted({row["kernel"] for rows in found.values() for row in rows}):
        cells = []
        for rows in found.values():
            usages = [row["usage"] for row in rows if row["kernel"] == kernel]
            most = max((usage["REG"] for usage in usages), default="")
            spilled = max((usage["STACK"] + usage["LOCAL"] for usage in usages), default=0)
            cells.append(f"{most} ({spilled} bytes of stack)" if spilled else str(most))
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    counts = ", ".join(f"{len(rows)} for sm_{arch}" for arch, rows in found.items())
    return [*lines, "", f"Variants compiled: {counts}."]


def _held(code: str) -> list[str]:
    """Return how many elements a thread holds together where `fp4_pairs` takes signs of words."""
    layouts = dict(re.findall(r"^(#\w+) = .*?sizePerThread = \[([\d, ]+)\]", code, re.M))
    return [
        layouts[name]
        for name in re.findall(r"elementwise_inline_asm.*?set\.lt.*?: tensor<[^,]*, (#\w+)>", code)
    ]


def _usage(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and local bytes as cuobjdump reads them out of a cubin."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


@pytest.mark.parametrize("arch", [90, 100])
def test_every_kernel_compiles_and_keeps_to_registers(arch):
    env = dict(os.environ, LOWBIT_TRITON="1", OMP_NUM_THREADS="1")
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.test_compile", str(arch)]
    done = subprocess.run(
        command, env=env, cwd=KERNELS.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert len(rows) == len(list(variants(arch))) > 25
    for row in rows:
        assert row["usage"]["STACK"] == row["usage"]["LOCAL"] == 0, row
    # What `fp4_pairs` takes for granted: the four words of a row are in one thread.
    held = [size for row in rows for size in row["held"]]
    assert set(held) == {"1, 4"} and len(held) >= 4


def test_no_kernel_is_left_out():
    listed = {(variant.module, variant.kernel) for variant in variants(90)}
    defined = {
        (path.stem, node.name)
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any(isinstance(d, ast.Name) and d.id == "jit" for d in node.decorator_list)
    }
    assert defined == listed


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(_compile_all(int(sys.argv[1]))))
    else:
        found = {}
        for arch in (80, 90, 100, 120):
            compiled = _compile_all(arch)
            for row in compiled:
                usage = " ".join(f"{key.lower()} {n:3}" for key, n in row["usage"].items())
                types = row["types"]
                source = types.get("w_ptr", types.get("out_ptr", "table"))
                print(f"sm_{arch:<3} {row['kernel']:32} {source:6} {usage}", row["constants"])
            found[arch] = compiled
        print("\n".join(_table(found)))
