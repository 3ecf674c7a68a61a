"""A checkpoint that is the same on every machine: made from integers, with no library's floating-
point random numbers.

    python -m tests.seeded OUT [SEED]      write it
    python -m tests.seeded --digests       print scheme, device and digest of what quantizing it
    gives

Values are sums of four uniform integers, scaled by powers of two, so that every one of them is
exact in fp32 before it is rounded to bf16 or fp16; a few blocks are zero, tiny, huge or lie on
ties.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from lowbitcli import api
from lowbitcli.checkpoint import manifest
from lowbitcli.checkpoint.reader import Checkpoint

# scheme, and after a colon the rule by which scales are chosen, where it is not the default
SCHEMES = (
    "fp8",
    "fp8-dynamic",
    "fp8-block",
    "fp8-block:ue8m0",
    "mxfp8",
    "mxfp8:floor",
    "mxfp4",
    "mxfp4:floor",
    "mxfp4:even",
    "mxfp4:ceil",
    "mxfp4:mse",
    "nvfp4",
    "nvfp4:mse",
    "nvfp4:mse_all",
    "nvfp4:four_over_six",
    "nvfp4:2d",
    "int8",
    "fp8-e5m2",
    "int4",
)
# Schemes that were written in one container only when their digests were kept.
CONTAINERS = {"fp8-e5m2": "lowbit", "int4": "lowbit"}


def weight(generator: np.random.Generator, rows: int, cols: int, exponent: int) -> torch.Tensor:
    """Return fp32 `[rows, cols]`, bell-shaped, with a standard deviation near 2^exponent."""
    drawn = generator.integers(-(2**15), 2**15, size=(4, rows, cols), dtype=np.int64).sum(0)
    return torch.from_numpy(drawn.astype(np.float32)) * 2.0 ** (exponent - 15)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a two-layer model in three dtypes, with the blocks that are hard."""
    generator = np.random.Generator(np.random.PCG64(seed))
    made: dict[str, torch.Tensor] = {}
    for layer, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        stem = f"model.layers.{layer}."
        for name, rows, cols, exponent in (
            ("self_attn.q_proj", 256, 256, -5),
            ("self_attn.k_proj", 128, 256, -2),
            ("self_attn.v_proj", 128, 256, -8),
            ("self_attn.o_proj", 256, 256, -6),
            ("mlp.gate_proj", 384, 256, -4),
            ("mlp.up_proj", 384, 256, -5),
            ("mlp.down_proj", 256, 384, -4),
        ):
            w = weight(generator, rows, cols, exponent)
            w[0, :32] = 0
            w[1, :32] *= 2.0**-12
            w[2, 5] = 8.0
            w[3, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) / 16
            made[f"{stem}{name}.weight"] = w.to(dtype)
        made[f"{stem}input_layernorm.weight"] = torch.ones(256, dtype=dtype)
    made["model.embed_tokens.weight"] = weight(generator, 64, 256, -3).bfloat16()
    made["lm_head.weight"] = weight(generator, 64, 256, -3).bfloat16()
    return made


def write(folder: Path, seed: int = 7) -> None:
    """Write the checkpoint as a Llama-like directory of one file."""
    folder.mkdir(parents=True)
    save_file(tensors(seed), folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def digests(source: Path, scheme: str, device: str, output: Path) -> dict[str, str]:
    """Quantize `source` and return file -> sha256 over its tensors, as the manifest gives it."""
    request = api.Request(scheme=scheme, container=CONTAINERS.get(scheme, "auto"))
    name, _, rule = scheme.partition(":")
    if rule:
        recipe = output.with_suffix(".yaml")
        recipe.write_text(f'rules: [{{match: "*", scheme: {name}, scale: {rule}}}]\n')
        request = api.Request(recipe=recipe)
    api.quantize(source, output, request, device=device)
    with Checkpoint.open(output) as checkpoint:
        proof = manifest.of(checkpoint)
        if proof is None:
            raise SystemExit(f"{output} has no manifest")
        return {name: file.digest for name, file in proof.files.items()}


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["--digests"]:
        write(Path(arguments[0]), *(int(text) for text in arguments[1:2]))
        return
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        write(source)
        for scheme in SCHEMES:
            for device in devices:
                made = digests(source, scheme, device, Path(folder, f"{scheme}-{device}"))
                print(json.dumps({"scheme": scheme, "device": device, **made}))


if __name__ == "__main__":
    main(sys.argv[1:])
