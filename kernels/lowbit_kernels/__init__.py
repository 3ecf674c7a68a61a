"""Low-bit quantization arithmetic: FP8, MXFP8, MXFP4, NVFP4 and integers, bit for bit the same on
CPU and GPU.

| module | what it holds |
|---|---|
| `formats` | the number formats as plain values |
| `ops` | `Ops`, the four functions that every scheme has |
| `rounding` | rounding to E4M3, E2M1 and E8M0, in torch and in integers for kernels |
| `amax` | largest magnitude of a matrix, row, block |
| `fp8` | FP8 per tensor, per channel |
| `fp8_block` | FP8 per 128x128 or 1x128 block |
| `mx` | MXFP8, MXFP4 |
| `importance` | how much the error of each input channel counts |
| `integer` | INT8 per channel, INT4 in groups |
| `nvfp4` | NVFP4 |
| `nvfp4_search` | the search for NVFP4 scales of least error |
| `nvfp4_te` | NVFP4 in TransformerEngine's order: four over six, 16x16 tiles |
| `hadamard` | rotation of 16 columns and back |
| `grouped` | many weights in one set of launches |
| `dequantizers` | dequantize by scaling mode; a quantized tensor as a value |
| `kv_nvfp4` | keys and values of attention in NVFP4 |
| `tensor_file` | a few tensors in a safetensors file |
| `layout` | swizzled scales, nibble order |
| `fake_quant` | values rounded and given back, with gradients that go straight through |
| `fake_plain`, `fake_blocks` | the arithmetic of that |
| `fake_checks`, `fake_kernels` | what that takes; the kernel that does it |
| `error` | how far quantized values lie from the weight |
| `error_figures` | the sums behind that, in one order on every device |
| `typed` | arguments are of the types that annotations name |

Importing the package imports neither torch nor triton: ask for the module that you need.
"""

import importlib
from types import ModuleType

MODULES = (
    "amax",
    "dequantizers",
    "error",
    "error_figures",
    "fake_blocks",
    "fake_checks",
    "fake_kernels",
    "fake_plain",
    "fake_quant",
    "formats",
    "fp8",
    "fp8_block",
    "grouped",
    "hadamard",
    "importance",
    "integer",
    "kv_nvfp4",
    "layout",
    "mx",
    "nvfp4",
    "nvfp4_search",
    "nvfp4_te",
    "ops",
    "rounding",
    "tensor_file",
    "typed",
)


def __getattr__(name: str) -> ModuleType:
    """Import a module of the package when it is first asked for."""
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the modules, imported or not."""
    return sorted(MODULES)
