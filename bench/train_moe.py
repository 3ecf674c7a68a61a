"""Train a small Mixtral to measure on, as quantizing random weights says nothing of what is lost.

    python -m bench.corpus CORPUS
    python -m bench.train_moe CORPUS OUT --minutes 4 [--dense]

| | layers | hidden | heads | experts | parameters |
|---|---|---|---|---|---|
| Mixtral | 5 | 384 | 6, 2 of keys and values | 8 of 384, 2 for a token | 22.8 M |
| `--dense`, a Llama | 5 | 384 | 6, 2 | one of 768 | 9.5 M |

AdamW, a cosine over the given time, BF16 arithmetic where there is CUDA. Prints the loss on the
held-out tokens, in nats for each, before, while and after.
"""

import argparse
import json
import lzma
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.small_model import BALANCE, Model, Shape

SHARD = 15_000_000  # bytes


def save(model: Model, out: Path, tokenizer: Path | None) -> None:
    """Write the checkpoint, in files of at most `SHARD` bytes."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    for name, w in model.tensors().items():
        if sum(x.nbytes for x in shards[-1].values()) + w.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = w
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(model.shape.config, indent=2))
    if tokenizer is not None:
        shutil.copy(tokenizer, out / "tokenizer.json")
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
        (out / "tokenizer_config.json").write_text(json.dumps(said))


def batches(tokens: Tensor, size: int, length: int, device: torch.device) -> Iterator[Tensor]:
    """Yield `[size, length + 1]` tokens from random places, for ever."""
    generator = torch.Generator().manual_seed(0)
    reach = torch.arange(length + 1, device=device)
    tokens = tokens.to(device)
    while True:
        start = torch.randint(len(tokens) - length, (size,), generator=generator)
        yield tokens[start.to(device)[:, None] + reach].long()


def loss_of(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the next token and what experts' unevenness adds to it."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits, uneven = model(ids[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    return loss, BALANCE * uneven


@torch.no_grad()
def held_out(model: Model, tokens: Tensor, device: torch.device, most: int) -> float:
    """Return the mean loss over the first held-out tokens."""
    length = model.shape.length
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)[:most]
    losses = [loss_of(model, one.to(device).long())[0] for one in rows.split(8)]
    return float(torch.stack(losses).mean())


def train(
    model: Model, tokens: Tensor, held: Tensor, device: torch.device, given: argparse.Namespace
) -> None:
    """Train for the given minutes."""
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] > 2]
    others = [p for p in model.parameters() if not (p.dim() == 2 and p.shape[0] > 2)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, given.lr, (0.9, 0.95), fused=device.type == "cuda")
    source = batches(tokens, given.batch, model.shape.length, device)
    began, shown, step, part = time.monotonic(), 0.0, 0, 0.0
    while part < 1 and step != given.steps:
        part = (time.monotonic() - began) / (60 * given.minutes)
        warm = min(1.0, (step + 1) / given.warm)
        rate = given.lr * warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * min(part, 1))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, more = loss_of(model, next(source))
        (loss + more).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            loss.item()  # so that the clock tells of work done
        if part >= shown:
            shown += 0.1
            seen = step * given.batch * model.shape.length
            print(
                f"{part:4.0%} step {step} {seen / 1e6:.1f} M tokens, loss {loss.item():.3f}, "
                f"uneven {more.item() / BALANCE:.2f}, held out "
                f"{held_out(model, held, device, 64):.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="what bench.corpus made")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--dense", action="store_true", help="a Llama in the place of a Mixtral")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--batch", type=int, default=64, help="sequences of 512 tokens in a step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warm", type=int, default=200, help="steps until the full rate")
    parser.add_argument("--steps", type=int, default=-1, help="at most, for trying it out")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    packed = lzma.decompress((given.corpus / "train.u16.xz").read_bytes())
    tokens = torch.from_numpy(np.frombuffer(packed, np.uint16).astype(np.int32))
    held = torch.from_numpy(np.fromfile(given.corpus / "heldout.u16", np.uint16).astype(np.int32))
    shape = Shape(layers=given.layers)
    if given.dense:
        shape = Shape(layers=given.layers, experts=0, inner=768)
    model = Model(shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(tokens) / 1e6:.1f} M tokens, {device}")
    print(f"held-out loss at the start: {held_out(model, held, device, 1024):.4f}", flush=True)
    train(model, tokens, held, device, given)
    print(f"held-out loss at the end: {held_out(model, held, device, 1024):.4f}")
    save(model, given.out, given.corpus / "tokenizer.json")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    print(f"of the weights in BF16, as they are saved: {held_out(model, held, device, 1024):.4f}")


if __name__ == "__main__":
    main()
