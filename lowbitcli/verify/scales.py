"""What the stored numbers must fulfil by themselves: scales, codes that are NaN, shared scales."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lowbit_kernels import rounding
from lowbit_kernels.formats import E4M3, E5M2, E8M0, F32, INT4, INT8, Format
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.containers.layouts import RECIPROCAL1
from lowbitcli.errors import CheckpointError
from lowbitcli.pipeline.read import by_value, tensor_of
from lowbitcli.plan.nouns import Part
from lowbitcli.plan.source import Source, SourceWeight
from lowbitcli.recipe import Recipe
from lowbitcli.tensors import DATA, GLOBAL_SCALE, SCALE, safe
from lowbitcli.verify.bound import codes_of, values_of
from lowbitcli.verify.nouns import FAIL, WARN, Problem, Step
from lowbitcli.verify.numbers import ends
from lowbitcli.verify.rows import Rows, UnreadableError

# These follow TransformerEngine, which leaves codes under the scale 0 of a block that underflows.
UNDERFLOWING = ("four_over_six", "2d")
FP32_MAX = torch.finfo(torch.float32).max


def scales(
    checkpoint: Checkpoint,
    target: Source,
    device: torch.device,
    tell: Callable[[str, int], None],
    rounded: Mapping[str, str],
) -> Step:
    """Is every stored scale finite and positive?

    Byte 0 of an E4M3 or E8M0 scale stands for a block whose codes are all zero. For E8M0 it also
    is the least scale there is, 2^-127, so that codes which are not zero are only warned of; and so
    they are of what was `rounded` (name -> rule) by a rule of UNDERFLOWING.
    """
    problems: list[Problem] = []
    count = 0
    for weight in _quantized(target):
        tell(weight.name, weight.nbytes - weight.reads[DATA].spec.nbytes)
        found: list[Problem] = []
        most = 1.0
        for name in (GLOBAL_SCALE, SCALE):
            part = weight.reads.get(name)
            if part is None:
                continue
            count += part.spec.numel
            try:
                wrong, largest = _scale(checkpoint, weight, name, part, device, rounded)
            except (CheckpointError, UnreadableError) as error:
                wrong, largest = [Problem("unreadable", weight.name, str(error), part.file)], 0.0
            found += wrong
            most *= largest
        problems += found or _beyond(weight, most)
    return Step("stored scales are finite and above zero", count, tuple(problems))


def _scale(
    checkpoint: Checkpoint,
    weight: SourceWeight,
    name: str,
    part: Part,
    device: torch.device,
    rounded: Mapping[str, str],
) -> tuple[list[Problem], float]:
    """Return what is wrong with a part that holds scales, and the largest of them, where nothing
    is."""
    if weight.scheme is None:
        raise ValueError("only a quantized weight has scales")
    stored = by_value(tensor_of(checkpoint.read(part.spec.name), part.spec).to(device), part)
    if part.stored is not None and part.stored.layout != RECIPROCAL1:
        stored = part.stored.layout.decode(stored)  # what pads it is no scale
    wanted = weight.scheme.scale if name == SCALE else weight.scheme.global_scale or F32
    is_reciprocal = part.stored is not None and part.stored.layout == RECIPROCAL1
    extremes = ends(stored)
    if extremes is not None and not is_reciprocal:
        return [], extremes[1]
    if wanted is E8M0 or wanted is E4M3:
        bad, zero = _bytes(wanted, stored)
        problems = _told(part, stored, bad, f"{wanted.name} scales are NaN or negative")
        if bool(zero.any()):
            gentle = wanted is E8M0 or rounded.get(weight.name) in UNDERFLOWING
            problems += _zeros(checkpoint, weight, part, zero, device, gentle=gentle)
        return problems, _largest(wanted, stored, bad)
    numbers = stored.float()
    bad = ~(torch.isfinite(numbers) & (numbers > 0))
    problems = _told(part, numbers, bad, "scales are not above zero")
    if not problems and is_reciprocal:
        beyond = ~torch.isfinite(numbers.reciprocal())
        problems = _told(part, numbers, beyond, "scales are stored as a reciprocal that is Inf")
        return problems, float(numbers.reciprocal().amax()) if numbers.numel() else 0.0
    return problems, 0.0


def _largest(wanted: Format, stored: Tensor, bad: Tensor) -> float:
    if bool(bad.any()) or not stored.numel():
        return 0.0
    return float((rounding.e8m0_value(stored) if wanted is E8M0 else stored.float()).amax())


def _beyond(weight: SourceWeight, step: float) -> list[Problem]:
    """Report a weight whose largest step, or the largest value of it, is no number of fp32."""
    if weight.scheme is None or step * weight.scheme.element.max <= FP32_MAX:
        return []
    file = weight.file
    if step > FP32_MAX:
        message = f"a scale times the global scale is {step:.9g}, beyond the range of fp32"
        return [Problem("scale", weight.name, message, file)]
    message = f"its largest code stands for {step * weight.scheme.element.max:.9g} under its "
    message += f"largest scale, {step:.9g}: beyond the range of fp32"
    return [Problem("scale", weight.name, message, file, WARN)]


def _bytes(wanted: Format, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return which scales are no scales, and which have byte 0."""
    byte = stored.view(torch.uint8)
    bad = byte == 255 if wanted is E8M0 else byte >= 0x7F
    return bad, byte == 0


def _told(part: Part, stored: Tensor, bad: Tensor, what: str) -> list[Problem]:
    count = int(bad.sum())
    if not count:
        return []
    first = tuple(torch.nonzero(bad)[0].tolist())
    value = stored[first].cpu()
    byte = f" (byte {int(value.view(torch.uint8))})" if value.element_size() == 1 else ""
    message = f"{count} of {bad.numel()} {what}, the first at {list(first)}: {float(value)}{byte}"
    return [Problem("scale", part.spec.name, message, part.file)]


def _zeros(
    checkpoint: Checkpoint,
    weight: SourceWeight,
    part: Part,
    zero: Tensor,
    device: torch.device,
    *,
    gentle: bool,
) -> list[Problem]:
    """Report scales of byte 0 over blocks whose codes are not all zero."""
    scheme = weight.scheme
    if scheme is None:
        raise ValueError("only a quantized weight has scales")
    rows = Rows(checkpoint, weight, device, tested=True)
    values = values_of(scheme.element).to(device)
    count, first = 0, None
    flat = zero.reshape(-1, *zero.shape[-2:]).to(device)
    for matrix, start, stop in rows.bands():
        here = flat[matrix, start:stop]
        if not bool(here.any()):
            continue
        codes = codes_of(scheme.element, rows.parts(matrix, start, stop)[DATA])
        filled = (values[codes] != 0).unflatten(1, (here.shape[1], -1)).any(-1)
        wrong = here & filled
        count += int(wrong.sum())
        if first is None and bool(wrong.any()):
            row, block = torch.nonzero(wrong)[0].tolist()
            first = [start + row, block]
    if not count:
        return []
    meaning = "the least scale there is" if scheme.scale is E8M0 else "a step of zero"
    message = f"{count} scales of byte 0, {meaning}, over codes that are not zero, first at {first}"
    severity = WARN if gentle else FAIL
    return [Problem("scale", part.spec.name, message, part.file, severity)]


def nan_codes(
    checkpoint: Checkpoint, target: Source, device: torch.device, tell: Callable[[str, int], None]
) -> Step:
    """Does any stored element stand for NaN or Inf, or have a code that is not used?"""
    what = "every stored code stands for a number"
    weights = [weight for weight in _quantized(target) if _has_nan(weight)]
    if not weights:
        return Step(what, skipped="every code of the formats that are stored does")
    problems = []
    for weight in weights:
        tell(weight.name, weight.reads[DATA].spec.nbytes)
        try:
            problems += _nan_codes(checkpoint, weight, device)
        except UnreadableError as error:
            problems.append(Problem("unreadable", weight.name, str(error), weight.file))
    return Step(what, sum(weight.numel for weight in weights), tuple(problems))


def _has_nan(weight: SourceWeight) -> bool:
    return weight.scheme is not None and not values_of(weight.scheme.element).isfinite().all()


def _nan_codes(checkpoint: Checkpoint, weight: SourceWeight, device: torch.device) -> list[Problem]:
    if weight.scheme is None:
        raise ValueError("only a quantized weight has codes")
    rows = Rows(checkpoint, weight, device, tested=True)
    usable = values_of(weight.scheme.element).isfinite().to(device)
    count, first = 0, None
    for matrix, start, stop in rows.bands():
        data = rows.parts(matrix, start, stop)[DATA]
        if _all_are_numbers(weight.scheme.element, data):
            continue
        bad = ~usable[codes_of(weight.scheme.element, data)]
        found = int(bad.sum())
        if found and first is None:
            row, col = torch.nonzero(bad)[0].tolist()
            first = [start + row, col]
        count += found
    if not count:
        return []
    message = f"{count} of {weight.numel} codes are no numbers, the first at {first}"
    if weight.scheme.element in (INT4, INT8):
        # Other writers use the least code of two's complement, and readers take it for a number.
        message = f"{count} of {weight.numel} codes are the least one, which lowbit never writes, "
        message += f"the first at {first}"
        return [Problem("code", weight.name, message, weight.file, WARN)]
    return [Problem("code", weight.name, message, weight.file)]


def _all_are_numbers(element: Format, data: Tensor) -> bool:
    """Are all codes those of numbers, as the least and the largest byte tell, where they do?"""
    if not data.numel() or element not in (E4M3, E5M2, INT8):
        return False
    if element is INT8:
        return int(data.view(torch.int8).amin()) >= -element.max
    return int((data.view(torch.uint8) & 0x7F).amax()) <= (0x7E if element is E4M3 else 0x7B)


def shared(checkpoint: Checkpoint, target: Source) -> Step:
    """Do weights that are served as one matrix have one scale, bit for bit, as stored?

    Readers take the largest global scale of NVFP4 for all of them and leave the block scales as
    they are, so that the others come out too large: that is wrong. A differing scale of
    fp8_tensor makes them requantize: that is worse, and only warned of.
    """
    what = "weights that are served as one share their scale (groups)"
    if not target.container.fuses:
        return Step(what, skipped=f"readers of {target.container.name} take each weight alone")
    weights = {weight.name: weight for weight in _quantized(target)}
    matrices = [name for name, weight in target.weights.items() if len(weight.shape) >= 2]
    groups: dict[str, list[str]] = {}
    for name, key in Recipe().groups(matrices).items():
        groups.setdefault(key, []).append(name)
    problems, count = [], 0
    for names in groups.values():
        members = [weights[name] for name in sorted(names) if name in weights]
        kinds = {target.weights[name].scheme for name in names}
        if len(names) > 1 and len(kinds) > 1 and members:
            told = ", ".join(safe(name) for name in sorted(names))
            message = f"served as one matrix, but stored in different schemes: {told}"
            problems.append(Problem("shared", members[0].name, message, members[0].file, WARN))
        elif len(members) > 1 and members[0].scheme is not None and members[0].scheme.shares:
            count += 1
            problems += _shared(checkpoint, members)
    return Step(what, count, tuple(problems))


def _shared(checkpoint: Checkpoint, members: Iterable[SourceWeight]) -> list[Problem]:
    stored: dict[str, tuple[float, bytes]] = {}
    first: SourceWeight | None = None
    for weight in members:
        first = first or weight
        part = weight.reads.get(GLOBAL_SCALE) or weight.reads[SCALE]
        try:
            raw = checkpoint.read(part.spec.name)
        except CheckpointError as error:
            return [Problem("unreadable", part.spec.name, error.message, part.file)]
        number = tensor_of(raw, part.spec).float().reshape(-1)
        stored[weight.name] = (float(number[0]), bytes(raw))
    if first is None or len({raw for _, raw in stored.values()}) < 2:
        return []
    told = ", ".join(f"{safe(name)} {number!r}" for name, (number, _) in stored.items())
    is_global = GLOBAL_SCALE in first.reads
    kind = "global scales" if is_global else "scales"
    message = f"served as one matrix, but their stored {kind} differ: {told}"
    return [Problem("shared", first.name, message, first.file, FAIL if is_global else WARN)]


def _quantized(target: Source) -> list[SourceWeight]:
    return [weight for weight in target.weights.values() if weight.scheme is not None]
