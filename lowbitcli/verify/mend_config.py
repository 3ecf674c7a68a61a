"""What `verify --fix` adds to what is declared: fields that readers need, and modules that are not
quantized to the list of those. Nothing that stands there is changed."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from lowbitcli.containers import ct_config
from lowbitcli.containers.modelopt_config import ALGORITHMS, MIXED, PRODUCER
from lowbitcli.errors import LowbitError
from lowbitcli.plan.consumers import Seen, many
from lowbitcli.plan.rules_config import CT, as_object
from lowbitcli.plan.rules_names import FP8, HEADS, NO_LINEAR, all_ignored
from lowbitcli.schemes import Scheme

Document = dict[str, Any]
LISTS = {CT: "ignore", "modelopt": "ignore", "deepseek": "modules_to_not_convert"}
GROUP_SIZES = {"nvfp4": 16, "mxfp8": 32, "mxfp4": 32}


def mended(seen: Seen) -> tuple[Document | None, Document | None, list[str]]:
    """Return config.json and hf_quant_config.json as they should be (None: as it is or not there),
    and what was changed."""
    config = copy.deepcopy(dict(seen.config)) if seen.checkpoint.config is not None else None
    beside = copy.deepcopy(seen.checkpoint.quant_config)
    beside = dict(beside) if beside is not None else None
    if config is None or not seen.said:
        return None, None, []
    said = _quantization(config)
    told: list[str] = []
    for mend in _MENDS.get(seen.container, ()):
        told += [f"config.json: {one}" for one in mend(seen, said)]
    if seen.container == "modelopt":
        made = _beside(seen, said, beside)
        if made is not None:
            beside, words = made
            return config if told else None, beside, [*told, words]
    return (config if told else None), None, told


def _quantization(config: Document) -> Document:
    """Return the part of a config that is about quantization, to be changed in place."""
    for key in ("quantization_config", "compression_config"):
        if isinstance(config.get(key), dict):
            return config[key]
    return {}


def _schemes(said: Document) -> Iterator[tuple[str, Document, Scheme]]:
    """Yield (label, group, scheme of its weights) of groups that can be read."""
    for label, group in as_object(said.get("config_groups")).items():
        try:
            found = ct_config.read({"config_groups": {label: group}})
        except LowbitError:
            continue
        schemes = [*found.exact.values(), *(x for _, x in found.patterns), *found.classes]
        if schemes:
            yield str(label), group, schemes[0]


def _status(_: Seen, said: Document) -> Iterator[str]:
    if "quantization_status" not in said:
        said["quantization_status"] = "compressed"
        yield "quantization_status: compressed added"


def _formats(_: Seen, said: Document) -> Iterator[str]:
    formats = set()
    for label, group, scheme in _schemes(said):
        form, weights, _unused = ct_config.GROUPS.get(scheme.name, ("", {}, None))
        formats.add(group.get("format") or form)
        if form and not group.get("format"):
            group["format"] = form
            yield f"config_groups.{label}.format: {form} added"
        dtype = weights.get("scale_dtype")
        if dtype and not group["weights"].get("scale_dtype"):
            group["weights"]["scale_dtype"] = dtype
            yield f"config_groups.{label}.weights.scale_dtype: {dtype} added"
    formats.discard("")
    if formats and not said.get("format"):
        said["format"] = formats.pop() if len(formats) == 1 else "mixed-precision"
        yield f"format: {said['format']} added"


def _scheme_of_activations(seen: Seen, said: Document) -> Iterator[str]:
    stored = [
        x for x in seen.checkpoint.tensors if x.endswith((".input_scale", "activation_scale"))
    ]
    if "activation_scheme" not in said and not stored:
        said["activation_scheme"] = "dynamic"
        yield "activation_scheme: dynamic added"


def _scale_format(_: Seen, said: Document) -> Iterator[str]:
    if not said.get("scale_fmt"):
        said["scale_fmt"] = "ue8m0"
        yield "scale_fmt: ue8m0 added"


def _ignored(seen: Seen, said: Document) -> Iterator[str]:
    """Add the modules that are not quantized and that a reader would take for quantized."""
    missed = missing(seen)
    if not missed:
        return
    keys = ["ignored_layers", "modules_to_not_convert"] if seen.container in FP8 else ["ignore"]
    keys = [key for key in keys if isinstance(said.get(key), list)] or [
        LISTS.get(seen.container, keys[0])
    ]
    for key in keys:
        said[key] = [*(said.get(key) or []), *missed]
        yield f"{key}: {len(missed):,} modules added that are not quantized: {many(missed)}"


def missing(seen: Seen) -> list[str]:
    """Return the modules that are not quantized and that nothing ignores."""
    if not seen.quantized or "quantized_layers" in seen.said:
        return []
    if seen.container == CT and not any("Linear" in g.get("targets", ()) for g in _groups(seen)):
        return []
    modules = {
        module for module in seen.plain if seen.kind_of(module) not in NO_LINEAR or module in HEADS
    }
    tied = ct_config.has_untold_head(seen.config) and "lm_head" not in seen.quantized
    if tied and not any(module in seen.plain for module in HEADS):
        modules.add("lm_head")
    # vLLM takes an excluded name for excluded wherever it stands in another.
    unsafe = {m for m in modules if seen.container == "modelopt" and _swallows(seen, m)}
    return sorted(modules - all_ignored(seen, "transformers", modules) - unsafe)


def _swallows(seen: Seen, module: str) -> bool:
    return any(module in other for other in seen.quantized)


def _groups(seen: Seen) -> list[Document]:
    groups = as_object(seen.said.get("config_groups")).values()
    return [dict(group) for group in groups if isinstance(group, dict)]


def _beside(seen: Seen, said: Document, there: Document | None) -> tuple[Document, str] | None:
    """Return hf_quant_config.json, where it is missing or lacks modules, and what was changed."""
    ignored = [x for x in said.get("ignore") or () if isinstance(x, str)]
    if there is None:
        algorithm = str(said.get("quant_algo"))
        scheme = ALGORITHMS.get(algorithm.upper(), "")
        nested: Document = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
        if said.get("kv_cache_scheme"):
            nested["kv_cache_quant_algo"] = "FP8"
        if scheme in GROUP_SIZES:
            nested["group_size"] = GROUP_SIZES[scheme]
        if algorithm.upper() == MIXED:
            nested["quantized_layers"] = said.get("quantized_layers") or {}
        else:
            nested["exclude_modules"] = ignored
        made = {"producer": said.get("producer") or PRODUCER, "quantization": nested}
        return made, "hf_quant_config.json: made of what config.json says"
    quantization = there.get("quantization")
    nested = quantization if isinstance(quantization, dict) else {}
    excluded = nested.get("exclude_modules")
    if not isinstance(excluded, list):
        return None
    lacking = sorted(set(ignored) - set(map(str, excluded)))
    if not lacking:
        return None
    nested["exclude_modules"] = [*excluded, *lacking]
    return there, f"hf_quant_config.json: exclude_modules: {many(lacking)} added"


_Mend = Callable[[Seen, Document], Iterator[str]]
_MENDS: dict[str, tuple[_Mend, ...]] = {
    CT: (_status, _formats, _ignored),
    "deepseek": (_scheme_of_activations, _ignored),
    "native-mxfp8": (_scheme_of_activations, _scale_format, _ignored),
    "modelopt": (_ignored,),
}
