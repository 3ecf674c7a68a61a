"""What becomes of each weight: which rule takes it, why it is kept, who shares a scale with
whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lowbitcli.containers import Container
from lowbitcli.containers.layouts import is_cropped
from lowbitcli.containers.stacks import ROWS, experts_of, is_stack
from lowbitcli.errors import RecipeError, UnsupportedError
from lowbitcli.plan.amaxes import Amaxes
from lowbitcli.plan.fused import all_grouped, keep_whole_groups, refuse_split
from lowbitcli.plan.importance import Importance
from lowbitcli.plan.nouns import Choice
from lowbitcli.plan.offers import activations_of, check_options
from lowbitcli.plan.pad import can_pad
from lowbitcli.plan.source import SourceWeight
from lowbitcli.plan.split import experts
from lowbitcli.recipe import Decision, Matcher, Recipe
from lowbitcli.schemes import BY_NAME
from lowbitcli.tensors import FLOATING, FP8, Shape, safe

# Models whose linear layers are stored [in, out] (transformers' Conv1D): blocks along the last axis
# would run along the outputs. Source: transformers 5.24, `pytorch_utils.py`.
TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
TRANSPOSED_LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")

# What to write in a recipe for a stack of which nothing is known.
SAY_HOW = (
    'a recipe can say it, as in layout: {{"{name}": in_out}}, or out_in; '
    'of gate and up in one tensor also "in_out interleaved" or "in_out halves"'
)


@dataclass(frozen=True)
class Conditions:
    """What the choice depends on besides the recipe.

    `strict` refuses a matrix that a rule takes and its scheme cannot, instead of keeping it;
    `split_groups` allows fused weights to differ; `non_finite` are weights that were found to
    hold NaN or Inf and are kept; `transposed` is whether this model stores [in, out]; `pad` fills
    an incomplete last block of columns with zeros, where the container's readers know that;
    `nibbles` is how the source's NVFP4 is read; `raw_fp8` takes FP8 without a scale for
    numbers, all of which BF16 holds; layers from number `drafts` on predict further tokens;
    `importance` weighs the columns of weights whose scales are searched; `amaxes` are those of
    activations.
    """

    container: Container
    strict: bool = False
    split_groups: bool = False
    non_finite: frozenset[str] = frozenset()
    transposed: bool = False
    fake: bool = False
    pad: bool = False
    nibbles: str = ""
    raw_fp8: bool = False
    drafts: int | None = None
    importance: Importance | None = None
    amaxes: Amaxes | None = None


def choose(
    weights: Mapping[str, SourceWeight], recipe: Recipe, conditions: Conditions
) -> dict[str, Choice]:
    """Return what becomes of every weight.

    Raises:
        RecipeError: a pattern matches nothing, a fused group is split, or a rule asks for what
            the container or the scheme does not have.
        UnsupportedError: under `strict`, a scheme cannot take a matrix that a rule gives it; or a
            weight stays as it is stored, and the container cannot hold that.
    """
    matcher = Matcher(recipe, conditions.drafts)
    decisions = {name: matcher.decide(name) for name in weights}
    matcher.dead(weights)
    choices = _choices(weights, decisions, conditions)
    groups: Mapping[str, str] = {}
    if conditions.container.fuses:
        groups = recipe.groups([name for name, one in weights.items() if len(one.shape) >= 2])
    keep_whole_groups(choices, groups, weights, conditions.non_finite)
    if not conditions.fake:
        _refuse_unstorable(choices, weights, conditions.container)
    if not conditions.split_groups:
        refuse_split(choices, groups, weights, decisions, recipe.layouts)
    return all_grouped(choices, groups) if groups else choices


def _choices(
    weights: Mapping[str, SourceWeight],
    decisions: Mapping[str, Decision],
    conditions: Conditions,
) -> dict[str, Choice]:
    """Return what becomes of each weight by itself. Matrices of one shape and dtype that a recipe
    has decided on at once, for the names without their numbers, are looked at once."""
    known: dict[tuple[int, Shape, str], Choice] = {}
    found: dict[str, Choice] = {}
    for (name, weight), decision in zip(weights.items(), decisions.values(), strict=True):
        stored = weight.scheme is not None or weight.plain is not None or weight.told
        usual = not stored and len(weight.shape) == 2 and name.endswith(".weight")
        if not usual or name in conditions.non_finite:
            found[name] = _choice(weight, decision, conditions)
            continue
        key = id(decision), weight.shape, weight.dtype
        choice = known.get(key)
        if choice is None:
            choice = known[key] = _choice(weight, decision, conditions)
        found[name] = choice
    return found


def _choice(weight: SourceWeight, decision: Decision, conditions: Conditions) -> Choice:
    rule = decision.rule
    numbers = weight.dtype in FLOATING or (conditions.raw_fp8 and weight.dtype in FP8)
    if weight.scheme is None and not numbers:
        return _refused(weight, decision, f"its dtype is {weight.dtype}")
    if len(weight.shape) < 2:
        return _refused(weight, decision, f"{len(weight.shape)}-dimensional")
    if rule is None:
        return Choice.to_keep(weight.scheme, decision.reason)
    reason, hint = _unstacked(weight, conditions)
    if reason:
        stack = weight.plain is not None or is_stack(weight.name, len(weight.shape))
        strict = conditions.strict and (stack or conditions.container.stacks != "only")
        return _refused(weight, decision, reason, strict, hint)
    if weight.plain is None and not weight.name.endswith(".weight"):
        return _refused(weight, decision, "its name does not end in .weight")
    if weight.plain is None and len(weight.shape) > 2:
        reason = f"{len(weight.shape)}-dimensional"
        return _refused(weight, decision, reason, strict=conditions.strict)
    if conditions.transposed and _is_turned(weight):
        hint = SAY_HOW.format(name=weight.name)
        return _refused(weight, decision, "stored [in, out]", conditions.strict, hint)
    if weight.name in conditions.non_finite:
        return Choice.to_keep(weight.scheme, "it holds NaN or Inf")
    scheme = BY_NAME[rule.scheme or ""]
    problem = _misfit(scheme.name, _shape(weight, conditions))
    if problem is not None and not (
        conditions.pad and can_pad(weight, scheme, conditions.container)
    ):
        return _refused(weight, decision, problem.message, conditions.strict, problem.hint)
    container = None if conditions.fake else conditions.container
    activations = activations_of(scheme, rule, container, conditions.amaxes)
    check_options(scheme, rule, decision.where, container, activations, conditions.amaxes)
    return _chosen(scheme.name, rule.scale, activations, rule.activation_scale)


@lru_cache(maxsize=256)
def _chosen(scheme: str, scale: str, activations: str, constant: float | None) -> Choice:
    """Return the one choice of these words: a model has few different ones."""
    return Choice(BY_NAME[scheme], scale, activations, input_scale=constant)


def splits(weight: SourceWeight, container: Container) -> bool:
    """Is this a stack of experts that the container's readers want one by one?"""
    return weight.plain is not None and len(weight.shape) == 3 and container.stacks == "split"


def _has_no_place(weight: SourceWeight, container: Container) -> bool:
    """Is this a stack, or a matrix that was [in, out], which a container can only refuse?"""
    if weight.plain is None:
        return False
    if is_cropped(weight.plain):
        return not container.pads
    if len(weight.shape) == 2:
        return container.stacks != "also"
    return container.stacks == "no" or (splits(weight, container) and not experts(weight))


def _is_turned(weight: SourceWeight) -> bool:
    """Is this a layer of a model that stores [in, out], and no recipe says how it lies?"""
    return not weight.told and weight.name.split(".")[-2] in TRANSPOSED_LAYERS


def _shape(weight: SourceWeight, conditions: Conditions) -> Shape:
    """Return the shape that a scheme is asked about."""
    if splits(weight, conditions.container) and not conditions.fake:
        return experts(weight)[0].shape
    return weight.shape


def _unstacked(weight: SourceWeight, conditions: Conditions) -> tuple[str, str]:
    """Return why a stack of experts, or a weight that is none, is not for this container, and
    what to do about it."""
    name, stacks = conditions.container.name, conditions.container.stacks
    if weight.plain is None and stacks == "only" and weight.name.endswith(".weight"):
        return f"{name} quantizes stacks of experts and nothing else", ""
    if weight.plain is None and is_stack(weight.name, len(weight.shape)):
        reason = "a stack of experts, and nothing says which of its axes is multiplied"
        return reason, SAY_HOW.format(name=weight.name)
    if weight.plain is None or conditions.fake:
        return "", ""
    if is_cropped(weight.plain):
        reason = f"its last block of columns is padded, which readers of {name} do not expect"
        return ("" if conditions.container.pads else reason), ""
    if len(weight.shape) == 2 and stacks != "also":
        return f"stored [in, out], which readers of {name} do not expect", ""
    if len(weight.shape) == 3 and stacks == "no":
        return f"a stack of experts, which {name} holds one by one", ""
    if splits(weight, conditions.container) and not experts(weight):
        return _inseparable(weight, name), SAY_HOW.format(name=weight.name)
    return "", ""


def _inseparable(weight: SourceWeight, container: str) -> str:
    """Return why a stack cannot be taken apart."""
    if weight.scheme is not None and experts_of(weight.name, weight.shape, weight.rows):
        return "a stack of experts whose blocks reach over gate and up"
    if experts_of(weight.name, weight.shape, ROWS[0]):
        return "a stack of gate and up, and nothing says whether their rows alternate"
    return f"a stack of experts that {container} has no names for one by one"


@lru_cache(maxsize=4096)  # a model has few different shapes
def _misfit(scheme: str, shape: Shape) -> UnsupportedError | None:
    """Return why a scheme cannot take a shape."""
    try:
        BY_NAME[scheme].check(shape)
    except UnsupportedError as error:
        return error.with_traceback(None)
    return None


def _refused(
    weight: SourceWeight, decision: Decision, reason: str, strict: bool = False, hint: str = ""
) -> Choice:
    """Keep a weight that cannot be quantized, unless the recipe names it exactly or is strict."""
    if decision.rule is not None and decision.exact:
        message = f"the rule names {safe(weight.name)}, which cannot be quantized: {reason}"
        raise RecipeError(message, where=decision.where, hint=hint)
    if strict and decision.rule is not None:
        hint = hint or "without --strict it is kept as it is"
        raise UnsupportedError(f"{safe(weight.name)}: {reason}", hint=hint)
    kept = reason if decision.rule is not None or not decision.reason else decision.reason
    return Choice.to_keep(weight.scheme, kept)


def _refuse_unstorable(
    choices: Mapping[str, Choice], weights: Mapping[str, SourceWeight], container: Container
) -> None:
    """Raise UnsupportedError for a weight that stays quantized in a way the container has not."""
    storable: set[int] = set()  # a model has few different choices
    for (name, choice), weight in zip(choices.items(), weights.values(), strict=True):
        if choice.target is None or (weight.plain is None and id(choice) in storable):
            continue
        if weight.plain is not None and _has_no_place(weight, container):
            raise UnsupportedError(
                f"{safe(name)} stays {choice.target.name}, and {container.name} has no place for "
                "a weight that lies like this one",
                hint="dequantize the checkpoint first, or choose another container",
            )
        offered = container.activations.get(choice.target.name)
        if offered == ("static",) and choice.activations != "static":
            raise UnsupportedError(
                f"{safe(name)} stays {choice.target.name}, and {container.name} has no "
                f"{choice.target.name} without scales of activations, which are not carried over",
                hint="dequantize the checkpoint first, or choose another container",
            )
        if choice.target.name not in container.writes:
            raise UnsupportedError(
                f"{safe(name)} stays {choice.target.name}, "
                f"and the container {container.name} has no {choice.target.name}",
                hint="dequantize the checkpoint first, or choose another container; what is kept "
                "by its kind a recipe can quantize, as in quantize: [mtp]",
            )
        storable.add(id(choice))
