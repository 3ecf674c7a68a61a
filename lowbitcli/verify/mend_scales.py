"""What `verify --fix` makes of scales: one global scale for a group, and shapes and dtypes that
readers ask for.

    scale' = E4M3(scale g / g'), where g' is the largest g of the group

Codes stay as they are. Where g / g' is a power of two and no scale is too small, every product
scale' g' is scale g, to the bit; else scales are rounded once more, and the loss is

    sqrt(sum code^2 (scale' g' - scale g)^2 / sum code^2 (scale g)^2)

of each weight. A group in which one weight would lose more than MOST is left as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.formats import E2M1_VALUES
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.pipeline.read import bytes_of, tensor_of
from lowbitcli.plan.consumers import Seen, many
from lowbitcli.plan.rules_config import CT
from lowbitcli.recipe import Recipe
from lowbitcli.tensors import TensorSpec, safe

MOST = 0.1
RESCALED = "rescaled"  # in a manifest's recipe: weights whose scales were rounded again
# container -> (suffix of codes, of the global scale)
GLOBAL = {
    CT: (".weight_packed", ".weight_global_scale"),
    "modelopt": (".weight", ".weight_scale_2"),
}
RELABELLED = (CT, "modelopt", "native-mxfp8", "comfyui")
BANDS = 4 << 20  # bytes of codes that are looked at together


@dataclass
class Scales:
    """Tensors that are stored otherwise: their `specs`, new `raw` bytes where they change, weights
    whose scales were `rounded` again, and what to tell of it."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    raw: dict[str, bytes] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def mended(seen: Seen) -> Scales:
    """Return what becomes of scales.

    Raises:
        CheckpointError: they cannot be read.
    """
    made = Scales()
    _exponents(seen, made)
    _shapes(seen, made)
    if seen.container in GLOBAL:
        for group in _groups(seen.checkpoint, *GLOBAL[seen.container]):
            _share(seen, group, made)
    return made


def _exponents(seen: Seen, made: Scales) -> None:
    if seen.container not in RELABELLED:
        return
    for name, stored in seen.checkpoint.tensors.items():
        if stored.spec.dtype == "F8_E8M0":
            made.specs[name] = stored.spec._replace(dtype="U8")
    if made.specs:
        made.told.append(f"{len(made.specs):,} scales of F8_E8M0 are called U8: the same bytes")


def _shapes(seen: Seen, made: Scales) -> None:
    """Give scales of rows and blocks the shape of the container."""
    found: dict[str, TensorSpec] = {}
    for name, stored in seen.checkpoint.tensors.items():
        data = seen.checkpoint.tensors.get(name.removesuffix("_scale"))
        if not name.endswith(".weight_scale") or data is None or data.spec.dtype != "F8_E4M3":
            continue
        shape = _shape_due(seen, data.spec, stored.spec)
        if shape is not None and shape != stored.spec.shape:
            found[name] = stored.spec._replace(shape=shape)
    if found:
        made.specs |= found
        first = min(found)
        before = list(seen.checkpoint.tensors[first].spec.shape)
        told = f"{len(found):,} scales get the shape that is asserted, {before} becomes "
        made.told.append(told + f"{list(found[first].shape)} in {safe(first)}")


def _shape_due(seen: Seen, data: TensorSpec, scale: TensorSpec) -> tuple[int, ...] | None:
    if scale.dtype not in ("F32", "BF16", "F16") or len(data.shape) != 2:
        return None
    rows, cols = data.shape
    blocks = (-(-rows // 128), -(-cols // 128))
    if seen.container == CT and scale.shape == (rows,):
        return (rows, 1)
    if seen.container == "modelopt":
        algorithm = str(seen.said.get("quant_algo")).upper()
        if "PER_CHANNEL" in algorithm and scale.shape == (rows, 1):
            return (rows,)
        if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES") and scale.shape == blocks:
            return (blocks[0], 1, blocks[1], 1)
    return None


def _groups(checkpoint: Checkpoint, codes: str, shared: str) -> Iterator[list[str]]:
    """Yield the modules of each group that have a global scale, where there are several."""
    stems = [x.removesuffix(shared) for x in checkpoint.tensors if x.endswith(shared)]
    stems = [x for x in stems if x + codes in checkpoint.tensors]
    stems = [x for x in stems if f"{x}.weight_scale" in checkpoint.tensors]
    groups: dict[str, list[str]] = {}
    for name, key in Recipe().groups([f"{stem}.weight" for stem in stems]).items():
        groups.setdefault(key, []).append(name.removesuffix(".weight"))
    yield from (sorted(group) for group in groups.values() if len(group) > 1)


def _share(seen: Seen, group: list[str], made: Scales) -> None:
    """Give a group one global scale, that of which all are multiples of at most one."""
    checkpoint = seen.checkpoint
    codes, shared = GLOBAL[seen.container]
    stored = {stem: _tensor(checkpoint, stem + shared).reshape(-1)[0] for stem in group}
    values = {stem: float(value) for stem, value in stored.items()}
    if len(set(values.values())) < 2 or not all(0 < x < float("inf") for x in values.values()):
        return
    divides = seen.container == CT
    used = min(values.values()) if divides else max(values.values())
    new: dict[str, tuple[Tensor, float]] = {}
    for stem, value in values.items():
        ratio = used / value if divides else value / used
        scale = _tensor(checkpoint, f"{stem}.weight_scale")
        moved = _moved(scale.float(), ratio)
        new[stem] = moved, _loss(checkpoint, stem + codes, scale.float() * ratio, moved.float())
    lost = {stem: loss for stem, (_, loss) in new.items()}
    if max(lost.values()) > MOST:
        told = f"global scales of {many(group)} differ too much: {max(lost.values()):.3g} of a "
        made.left.append(told + "weight would be lost; quantize the source again")
        return
    raw = torch.tensor([used], dtype=torch.float32)
    for stem, (moved, loss) in new.items():
        if values[stem] == used:
            continue
        made.raw[f"{stem}.weight_scale"] = _raw(moved)
        made.raw[stem + shared] = _raw(raw)
        if loss:
            made.rounded.add(f"{stem}.weight")
    words = ", ".join(
        f"{safe(stem)} {'exactly' if not loss else f'to {loss:.3g}'}"
        for stem, loss in lost.items()
        if values[stem] != used
    )
    made.told.append(f"one global scale for {many(group, 4)}: scales of blocks are moved, {words}")


def _moved(scale: Tensor, ratio: float) -> Tensor:
    """Return scales times a ratio of at most one, rounded to E4M3; what is above zero stays so."""
    byte = rounding.to_e4m3((scale.double() * ratio).float()).view(torch.uint8)
    byte = torch.where((scale > 0) & (byte == 0), 1, byte)
    return byte.view(torch.float8_e4m3fn)


def _loss(checkpoint: Checkpoint, codes: str, exact: Tensor, moved: Tensor) -> float:
    """Return the relative error that moved scales make of a weight's values."""
    spec = checkpoint.tensors[codes].spec
    rows, half = spec.shape
    values = torch.tensor(E2M1_VALUES)
    wrong = right = 0.0
    high = max(1, BANDS // max(1, half))
    for start in range(0, rows, high):
        stop = min(rows, start + high)
        raw = checkpoint.read(codes, start * half, stop * half)
        packed = torch.frombuffer(raw, dtype=torch.uint8).reshape(stop - start, half)
        energy = values[rounding.unpack(packed).int()].square().unflatten(1, (-1, 16)).sum(-1)
        before, after = exact[start:stop].double(), moved[start:stop].double()
        wrong += float((energy * (after - before).square()).sum())
        right += float((energy * before.square()).sum())
    return (wrong / right) ** 0.5 if right else 0.0


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    return tensor_of(checkpoint.read(name), checkpoint.tensors[name].spec)


def _raw(tensor: Tensor) -> bytes:
    return bytes(bytes_of(tensor)[0])


__all__ = ["Scales", "mended"]
