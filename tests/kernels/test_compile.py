"""Every kernel is compiled for Hopper and Blackwell without a GPU, and none of them spills
registers.

Runs in a process of its own with LOWBIT_TRITON=1, since the tests' own process has no triton.
`python -m tests.kernels.test_compile` prints registers, spills and shared memory of each.
"""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

KERNELS = Path(__file__).parents[2] / "kernels" / "lowbit_kernels"
INPUT = {"bf16": ("*i16", True), "fp16": ("*fp16", False), "fp32": ("*fp32", False)}


def _variants():
    """List (module, kernel, pointer and integer types, constants) to compile."""
    flat = {"size": "i32", "programs": "i32"}
    for name, (pointer, bf16) in INPUT.items():
        w = {"w_ptr": pointer}
        constants = {"BF16": bf16, "TILE": 4096, "LOOPS": 4}
        yield "amax", "_matrix_kernel", w | {"out_ptr": "*i32"} | flat, constants
        nv = {"packed_ptr": "*i64", "scale_ptr": "*u8", "global_scale_ptr": "*fp32"}
        count = {"h_ptr": "*fp32", "blocks": "i32", "programs": "i32", "across": "i32"}
        for weighted, radius, tries in (
            (False, 0, 0),
            (False, 6, 13),
            (True, 12, 25),
            (False, 0, 126),
        ):
            constants = {"BF16": bf16, "WEIGHTED": weighted, "RADIUS": radius, "COUNT": tries}
            if tries == 0 or name == "bf16":
                yield "nvfp4", "_quantize_kernel", w | nv | count, constants | {"TILE": 128}
        out = {"out_ptr": f"*{name}"}
        count = {"halves": "i32", "programs": "i32"}
        yield (
            "nvfp4",
            "_dequantize_kernel",
            nv | {"packed_ptr": "*i32"} | out | count,
            {"TILE": 128},
        )
        for eights in (True, False):
            constants = {"BF16": bf16, "EIGHTS": eights, "TILE": 128}
            data = {"data_ptr": "*i64" if eights else "*u8", "scale_ptr": "*fp32"}
            yield "fp8", "_cast_kernel", w | data | flat, constants
            yield "fp8", "_row_kernel", w | data | {"cols": "i32"}, constants
            types = {"data_ptr": "*u8", "scale_ptr": "*fp32"} | out | flat
            yield "fp8", "_dequantize_kernel", types, {"EIGHTS": eights, "TILE": 128}
        sides = {"rows": "i32", "cols": "i32", "down": "i32", "across": "i32"}
        constants = {"BF16": bf16, "EIGHTS": True, "PER_ROW": name == "fp16", "RULE": "amax"}
        data = {"data_ptr": "*i64", "scale_ptr": "*fp32"}
        yield "fp8_block", "_quantize_kernel", w | data | sides, constants
        if name == "bf16":
            for rule, row in (("amax", True), ("ue8m0", False)):
                changed = constants | {"RULE": rule, "PER_ROW": row}
                yield "fp8_block", "_quantize_kernel", w | data | sides, changed
            types = w | {"data_ptr": "*u8", "scale_ptr": "*fp32"} | sides
            yield "fp8_block", "_quantize_kernel", types, constants | {"EIGHTS": False}
        types = {"data_ptr": "*u8", "scale_ptr": "*fp32"} | out | sides
        yield "fp8_block", "_dequantize_kernel", types, {"HIGH": 1 if name == "fp16" else 128}
        types = w | {"data_ptr": "*i8", "scale_ptr": "*fp32", "cols": "i32"}
        yield "integer", "_row_kernel", types, {"BF16": bf16, "TILE": 1024}
        types = {"data_ptr": "*i8", "scale_ptr": "*fp32"} | out | {"cols": "i32", "programs": "i32"}
        yield "integer", "_dequantize_kernel", types, {"TILE": 1024}
        for element in ("E4M3", "E5M2", "E2M1"):
            word = "*i32" if element == "E2M1" else "*i64"
            data = {"data_ptr": word, "scale_ptr": "*u8"}
            types = data | out | {"quarters": "i32"}
            yield "mx", "_dequantize_kernel", types, {"ELEMENT": element, "TILE": 128}
            if name == "fp16" or (name == "fp32" and element == "E5M2"):
                continue
            constants = {"BF16": bf16, "ELEMENT": element, "TILE": 128}
            types = w | data | {"blocks": "i32"}
            yield "mx", "_search_kernel", types, constants
            for rule in ("amax", "floor", "ceil", "even") if name == "bf16" else ("amax",):
                constants = {"BF16": bf16, "ELEMENT": element, "RULE": rule, "TILE": 32}
                yield "mx", "_quantize_kernel", types, constants


def _compile_all(arch: int) -> list[dict]:
    """Compile every variant for sm_<arch>; needs LOWBIT_TRITON=1."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows = []
    for module, name, types, constants in _variants():
        kernel = getattr(importlib.import_module(f"lowbit_kernels.{module}"), name)
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {n: types.get(n, "constexpr") for n in names},
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={
                (names.index(n),): [["tt.divisibility", 16]]
                for n, t in types.items()
                if t[0] == "*"
            },
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={
                "num_warps": 16 if module == "fp8_block" and "RULE" in constants else 4,
                "enable_fp_fusion": False,
            },
        )
        rows.append(
            {
                "kernel": f"{module}.{name}",
                "constants": constants,
                "types": types,
                "shared": compiled.metadata.shared,
                "usage": _usage(compiled.asm["cubin"]),
            }
        )
    return rows


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
    done = subprocess.run(
        [sys.executable, __file__, str(arch)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert len(rows) == len(list(_variants()))
    for row in rows:
        assert row["usage"]["STACK"] == row["usage"]["LOCAL"] == 0, row


def test_no_kernel_is_left_out():
    listed = {(module, name) for module, name, _, _ in _variants()}
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
        for arch, row in itertools.chain.from_iterable(
            ((arch, row) for row in _compile_all(arch)) for arch in (90, 100)
        ):
            print(f"sm_{arch} {row['kernel']:26} {row['usage']} shared {row['shared']}", end=" ")
            print(row["types"].get("w_ptr", row["types"].get("out_ptr")), row["constants"])
