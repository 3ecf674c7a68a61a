"""A `Recipe`: which weights get which scheme; the first rule that matches wins.

A recipe file is a mapping with the keys of `Recipe`, and `extends`, another recipe by name or file.
`ignore` and `exclude` mean `keep`, `quantize: [heads]` means `defaults: {heads: quantize}`,
`layout` says how weights lie in the source (see `layout`), `thresholds` what they may lose (see
`limits`), `consumer` who is to load the output (see `consumer`), `measured` by what it was chosen.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from lowbitcli.containers import CONTAINERS
from lowbitcli.containers.inputs import LARGEST
from lowbitcli.errors import RecipeError
from lowbitcli.recipe.consumer import Consumer, consumers
from lowbitcli.recipe.defaults import FuseGroup, KeptKind, load_defaults
from lowbitcli.recipe.document import Mapping, did_you_mean, place, place_of
from lowbitcli.recipe.fuse import group, missing
from lowbitcli.recipe.layout import Layouts, Lie, lies
from lowbitcli.recipe.limits import Threshold
from lowbitcli.recipe.measured import Measured
from lowbitcli.recipe.patterns import Patterns
from lowbitcli.schemes import BY_NAME, SCHEMES, Scheme

AUTO = "auto"
LEAST, MOST = 1e-30, 1e30  # of constants: fp32 holds them, and their reciprocals
ACTIVATIONS = ("none", "dynamic", "static")
# What a recipe may write for a scheme with one of its scale rules: mxfp4_even, nvfp4_mse.
SUGAR = {f"{one.name}_{rule}": (one.name, rule) for one in SCHEMES for rule in one.rules}
Constant = Annotated[StrictFloat, Field(ge=LEAST, le=MOST)]


def _known(word: Any, known: tuple[str, ...], what: str) -> Any:
    if isinstance(word, str) and word not in known:
        raise RecipeError(
            f"{what} {str(word)!r} is unknown", where=place_of(word), hint=did_you_mean(word, known)
        )
    return word


def _scheme_name(value: Any) -> Any:
    if isinstance(value, str) and value not in BY_NAME:
        known = (*BY_NAME, *SUGAR)
        hint = did_you_mean(value, known, f"known: {', '.join(s.name for s in SCHEMES)}")
        if value.lower() in ("keep", "none"):
            hint = "`keep: true` in place of `scheme`, in a rule, leaves what it matches alone"
        raise RecipeError(f"scheme {str(value)!r} is unknown", where=place_of(value), hint=hint)
    return BY_NAME[value].name if isinstance(value, str) else value


def _container_name(value: Any) -> Any:
    return _known(value, (AUTO, *(one.name for one in CONTAINERS)), "container")


class Rule(BaseModel):
    """What happens to weights that `match` takes and `exclude` does not: a scheme, or `keep`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: Patterns = Field(min_length=1)
    scheme: Annotated[str, BeforeValidator(_scheme_name)] | None = None
    keep: StrictBool = False
    scale: str = ""
    activations: Literal["none", "dynamic", "static"] = "none"
    activation_scale: Constant | None = None
    exclude: Patterns = ()
    said: SkipJsonSchema[bool] = Field(False, exclude=True)  # what activations are
    where: SkipJsonSchema[str] = Field("", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        data = _without_synonyms(value, {"ignore": "exclude"})
        _refuse_unknown(value, cls)
        scheme, keep = data.get("scheme"), data.get("keep") is True
        said = data.get("activations") is not None
        if (scheme is None) != keep:
            message = (
                "a rule has a scheme or keep: true, not both"
                if keep
                else "a rule needs a scheme, or keep: true"
            )
            raise RecipeError(message, where=place_of(value))
        if isinstance(scheme, str):
            scheme = _without_sugar(data, scheme)
            chosen = BY_NAME[_scheme_name(scheme)]
            data["scale"] = data.get("scale") or chosen.rules[0]
            _known(data["scale"], chosen.rules, f"scale rule of {chosen.name}")
            if data.get("activations") is None and data.get("activation_scale") is not None:
                data["activations"] = "static"
            if data.get("activations") is None:
                weights_only = chosen.element.bits < 8 or scheme.upper().endswith("A16")
                data["activations"] = "none" if weights_only else "dynamic"
            _known(data["activations"], ACTIVATIONS, "activations option")
            _check_static(data, chosen, value)
        elif data.keys() & {"scale", "activations", "activation_scale"}:
            message = "a rule that keeps has no scale and no activations"
            raise RecipeError(message, where=place_of(value))
        return {**data, "said": said, "where": place_of(value)}


def _without_sugar(data: dict[str, Any], scheme: str) -> str:
    """Return the scheme that a word such as mxfp4_even is for, and note its scale rule."""
    if scheme not in SUGAR:
        return scheme
    data["scheme"], rule = SUGAR[scheme]
    said = data.setdefault("scale", rule)
    if said != rule:
        message = f"scheme {str(scheme)!r} says scale: {rule}, and the rule scale: {said!s}"
        raise RecipeError(message, where=place_of(said), hint="leave one of them out")
    return data["scheme"]


def _check_static(data: dict[str, Any], chosen: Scheme, value: dict[str, Any]) -> None:
    """Raise RecipeError where activations cannot be static, or a constant is no use."""
    static = data["activations"] == "static"
    if data.get("activation_scale") is not None and not static:
        message = f"an activation_scale is for activations: static, not {data['activations']}"
        raise RecipeError(message, where=place(value, ["activations"]))
    if static and chosen.name not in LARGEST:
        raise RecipeError(
            f"{chosen.name} has no static activations",
            where=place(value, ["activations" if "activations" in value else "scheme"]),
            hint=f"they are for {' and '.join(LARGEST)}",
        )


class Recipe(BaseModel):
    """Which weights get which scheme, and what else a run depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    description: str = ""
    container: Annotated[str, BeforeValidator(_container_name)] = AUTO
    consumer: Annotated[tuple[Consumer, ...], BeforeValidator(consumers)] = ()
    rules: tuple[Rule, ...] = ()
    keep: Patterns = ()
    defaults: dict[str, Literal["keep", "quantize"]] = Field(default_factory=dict)
    fuse: tuple[FuseGroup, ...] = ()
    layout: Annotated[tuple[Lie, ...], BeforeValidator(lies)] = ()
    thresholds: tuple[Threshold, ...] = ()
    kv_scale: Constant | None = None
    fake: StrictBool = False
    nonfinite: Literal["error", "keep"] = "error"
    measured: Measured | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        data = _without_synonyms(value, {"ignore": "keep", "exclude": "keep"})
        _refuse_unknown(value, cls)
        known = tuple(kind.name for kind in load_defaults().kinds)
        chosen = data.get("defaults")
        where = place(value, ["quantize"])
        listed = dict.fromkeys(_listed(data, "quantize", where), "quantize")
        said = chosen if isinstance(chosen, dict) else {}
        for name in [*said, *listed]:
            _known(name, known, "kept kind")
        data.pop("quantize", None)
        _refuse_both(said, listed)
        if listed and (chosen is None or isinstance(chosen, dict)):
            data["defaults"] = {**said, **listed}
        if data.get("fake") is True:
            _refuse_constants(value)
        return data

    @property
    def kinds(self) -> tuple[KeptKind, ...]:
        """The kinds of tensors that this recipe keeps."""
        kinds = load_defaults().kinds
        said = self.defaults
        return tuple(kind for kind in kinds if said.get(kind.name, kind.default) == "keep")

    @property
    def digest(self) -> str:
        """A sha256 of all that decides what is written: not of names, comments, order of keys."""
        data = self.model_dump(mode="json", exclude=_NOT_WRITTEN)
        if not self.layout:
            data.pop("layout")
        for some in (data, *data["rules"]):  # what is not there decides nothing
            for key in ("kv_scale", "activation_scale"):
                if some.get(key) is None:
                    some.pop(key, None)
        data["kinds"] = [kind.model_dump(mode="json") for kind in self.kinds]
        data["fused"] = [one.model_dump(mode="json") for one in load_defaults().fuse]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def layouts(self) -> Layouts:
        """What this recipe says of how weights lie in the source."""
        return Layouts(self.layout)

    def groups(self, names: Any) -> dict[str, str]:
        """Return the key of its group for each of the names that is a member of a fused matrix."""
        return group(names, (*load_defaults().fuse, *self.fuse))

    def missing(self, names: Any, present: set[str] | None = None) -> dict[str, tuple[str, ...]]:
        """Return the names that fused partners are missing for among the modules that are
        `present` (those of the names), each with those partners."""
        if present is None:
            present = {name.removesuffix(".weight") for name in names}
        return missing(names, (*load_defaults().fuse, *self.fuse), present)

    def over(self, base: "Recipe") -> "Recipe":
        """Return this recipe as an extension of `base`: own rules come first."""
        said = {name: getattr(self, name) for name in self.model_fields_set}
        said["rules"] = (*self.rules, *base.rules)
        said["keep"] = (*self.keep, *base.keep)
        said["fuse"] = (*self.fuse, *base.fuse)
        said["layout"] = (*self.layout, *base.layout)
        said["thresholds"] = (*self.thresholds, *base.thresholds)
        said["defaults"] = {**base.defaults, **self.defaults}
        mine = {"description": "", "measured": None, **said, "name": self.name}
        return base.model_copy(update=mine)


def _refuse_both(said: dict[str, Any], listed: dict[str, str]) -> None:
    """Raise RecipeError where `defaults` keeps a kind that `quantize` lists."""
    for name in listed:
        if said.get(name) == "keep":
            message = f"defaults keeps {name!s}, and quantize lists them"
            raise RecipeError(message, where=place(said, [name]), hint="leave one of them out")


def _refuse_constants(value: dict[str, Any]) -> None:
    """Raise RecipeError where a recipe whose numbers are stored as they are has scales of
    activations."""
    rules = value.get("rules")
    places: list[list[str | int]] = [["kv_scale"]] if value.get("kv_scale") is not None else []
    for number, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        if isinstance(rule, dict) and rule.get("activation_scale") is not None:
            places.append(["rules", number, "activation_scale"])
    for path in places:
        message = f"a recipe that is fake stores no {path[-1]}"
        raise RecipeError(message, where=place(value, path), hint="leave one of them out")


def _listed(data: dict[str, Any], key: str, where: str = "") -> list[Any]:
    value = data.get(key)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise RecipeError(f"{key} is a list of kept kinds", where=where)
    return list(value)


def _without_synonyms(value: dict[str, Any], synonyms: dict[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, item in value.items():
        name = synonyms.get(key, key)
        if item is None:
            continue
        if name in data:
            message = f"{written[name]!r} and {str(key)!r} mean the same: write one of them"
            raise RecipeError(message, where=place_of(key))
        data[name], written[name] = item, str(key)
    return data


_SYNONYMS = {"Rule": ("ignore",), "Recipe": ("ignore", "exclude", "quantize", "extends")}
_OURS = ("where", "name", "said")
# What decides nothing of the output, or (fake) is said of it besides.
_NOT_WRITTEN = {"name", "description", "consumer", "defaults", "thresholds", "fake", "measured"}


def _refuse_unknown(value: dict[str, Any], model: type[BaseModel]) -> None:
    if not isinstance(value, Mapping):
        return
    known = [key for key in model.model_fields if key not in _OURS] + list(
        _SYNONYMS[model.__name__]
    )
    for key in value:
        if key not in known:
            message = f"key {str(key)!r} is unknown"
            raise RecipeError(message, where=place_of(key), hint=did_you_mean(key, known))
