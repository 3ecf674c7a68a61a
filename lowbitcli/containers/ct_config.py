"""The `quantization_config` of compressed-tensors: read it as module -> scheme, write it from
declarations.

Which group a module belongs to: an exact target wins over `re:` (a match at the start of the
name), which wins over a class name; `ignore` wins over all. What could be read as a class or as a
pattern, and is a module, is written as the pattern that takes that module alone. Source:
compressed-tensors 0.20.1, `utils/match.py`, `config/base.py`, `quantization/quant_args.py`; which
fields the consumers really need was tried on vLLM 0.33 and transformers 5.24.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowbitcli.containers import ct_integers
from lowbitcli.containers.container import Declaration
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.containers.stacks import modules_kept
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.regex import MAX_NAME, MAX_PATTERN, compile_bounded
from lowbitcli.schemes import BY_NAME, Scheme
from lowbitcli.tensors import safe

VERSION = "0.20.1"  # of the config's schema that is written

_FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_TOKEN = {**_FLOAT8, "strategy": "token", "dynamic": True, "group_size": None}
_MX8 = {**_FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_MX4 = {**_FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INT8 = {**_FLOAT8, "type": "int"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
BLOCK128 = [128, 128]

# scheme -> (format, weights, input_activations where they are dynamic)
GROUPS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8_tensor": (
        "float-quantized",
        {**_FLOAT8, "strategy": "tensor", "group_size": None},
        _TOKEN,
    ),
    "fp8_channel": (
        "float-quantized",
        {**_FLOAT8, "strategy": "channel", "group_size": None},
        _TOKEN,
    ),
    "fp8_block128": (
        "float-quantized",
        {**_FLOAT8, "strategy": "block", "group_size": None, "block_structure": BLOCK128},
        {**_FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "mxfp8": ("mxfp8-quantized", _MX8, {**_MX8, "dynamic": True}),
    "mxfp4": ("mxfp4-pack-quantized", _MX4, {**_MX4, "dynamic": True}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            **_FLOAT4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        None,
    ),
    "int8_channel": (
        "int-quantized",
        {**_INT8, "strategy": "channel", "group_size": None},
        {**_INT8, "strategy": "token", "group_size": None, "dynamic": True},
    ),
    "int4_g128": ("pack-quantized", {**_INT4, "strategy": "group", "group_size": 128}, None),
}

# scheme -> input_activations where their scale is stored
STATIC: dict[str, dict[str, Any]] = {
    "fp8_tensor": {**_FLOAT8, "strategy": "tensor"},
    "nvfp4": {**GROUPS["nvfp4"][1], "dynamic": "local"},
}
CACHE = {**_FLOAT8, "strategy": "tensor"}


def of(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the quantization part of a config.json, empty where there is none.

    Raises:
        CheckpointError: it is there, and no object.
    """
    for key in QUANTIZATION_KEYS:
        found = (config or {}).get(key)
        if isinstance(found, Mapping):
            return found
        if found is not None:
            raise CheckpointError(f"config.json: {key} is no object")
    return {}


def model_dtype(config: Mapping[str, Any] | None) -> str:
    """Return the dtype that a model's config says its weights have, as safetensors calls it; ""
    if it says none."""
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    config = config or {}
    nested = config.get("text_config")
    for where in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if isinstance(where.get(key), str) and where[key] in names:
                return names[where[key]]
    return ""


@dataclass(frozen=True)
class DeclaredSchemes:
    """What a config says: scheme by exact module name, by pattern, by class of module, and what
    it ignores."""

    exact: Mapping[str, Scheme]
    patterns: tuple[tuple[re.Pattern[str], Scheme], ...]
    classes: tuple[Scheme, ...]
    ignored: frozenset[str]
    ignored_patterns: tuple[re.Pattern[str], ...]

    def ignores(self, module: str) -> bool:
        return module in self.ignored or any(_takes(p, module) for p in self.ignored_patterns)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme that the config declares for `module`, None where it is ignored or
        in no group."""
        if self.ignores(module):
            return None
        if module in self.exact:
            return self.exact[module]
        for pattern, scheme in self.patterns:
            if _takes(pattern, module):
                return scheme
        return self.classes[0] if self.classes else None


def read(config: Mapping[str, Any], modules: Collection[str] = ()) -> DeclaredSchemes:
    """Understand a quantization_config; `modules` are those of the checkpoint, whose names are
    no patterns and, but for Linear, no classes.

    Raises:
        CheckpointError: it is malformed, or two groups claim every Linear.
        UnsupportedError: it declares a scheme that is not read here.
    """
    _refuse_more(config)
    exact: dict[str, Scheme] = {}
    patterns: list[tuple[re.Pattern[str], Scheme]] = []
    classes: list[Scheme] = []
    groups = config.get("config_groups")
    groups = {} if groups is None else groups
    if not isinstance(groups, Mapping):
        raise CheckpointError("quantization_config.config_groups is no object")
    for label, group in groups.items():
        scheme, targets = _group(label, group)
        for target in targets:
            if target in modules or not _is_ambiguous(target):
                exact[target] = scheme
            elif target.startswith("re:"):
                patterns.append((_compile(target), scheme))
            if (target not in modules and _is_class(target)) or target == "Linear":
                classes.append(scheme)
    if len(set(classes)) > 1:
        raise CheckpointError("quantization_config has two groups for the same class of modules")
    ignored = _strings(config.get("ignore"), "ignore")
    return DeclaredSchemes(
        exact,
        tuple(patterns),
        tuple(classes),
        frozenset(ignored),
        tuple(_compile(e) for e in ignored if e.startswith("re:") and e not in modules),
    )


def _is_class(entry: str) -> bool:
    """Would a reader who knows no module of this name take it for a class of modules?"""
    return "." not in entry and entry[:1].isupper()


def _is_ambiguous(entry: str) -> bool:
    return entry.startswith("re:") or _is_class(entry)


def _entry(module: str) -> str:
    """Return what names this module and nothing else, to every reader."""
    pattern = rf"{re.escape(module)}\Z"
    if not _is_ambiguous(module) or len(module) > MAX_NAME or len(pattern) > MAX_PATTERN:
        return module
    return f"re:{pattern}"


def _group(label: str, group: Any) -> tuple[Scheme, list[str]]:
    label = _shown(label)
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"quantization_config.config_groups.{label} says nothing of weights")
    targets = _strings(group.get("targets"), f"config_groups.{label}.targets")
    return _scheme(label, group["weights"]), targets


def _scheme(label: str, weights: Mapping[str, Any]) -> Scheme:
    """Return the scheme of the weights of a group, by number of bits, type and strategy."""
    said = [weights.get("num_bits"), weights.get("type"), weights.get("strategy")]
    size, blocks = weights.get("group_size"), weights.get("block_structure")
    names = {
        (8, "float", "tensor"): "fp8_tensor",
        (8, "float", "channel"): "fp8_channel",
        (8, "float", "block"): "fp8_block128" if blocks == BLOCK128 else "",
        (8, "float", "group"): "mxfp8" if size == 32 else "",
        (4, "float", "tensor_group"): "nvfp4" if size == 16 else "",
        (4, "float", "group"): "mxfp4" if size == 32 else "",
    }
    name = next((name for kind, name in names.items() if list(kind) == said), "")
    scheme = BY_NAME.get(name) if name else _integers(said, size)
    odd = _odd(weights)
    if scheme is None or odd:
        bits, kind, strategy = (_shown(value) for value in said)
        raise UnsupportedError(
            f"quantization_config.config_groups.{label} declares weights of {bits} bits, "
            f"type {kind}, strategy {strategy}, group size {_shown(size)}{odd}, which is not read",
            hint=f"read are: {', '.join(sorted(GROUPS))}",
        )
    return scheme


def _refuse_more(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where weights are rotated or sparse besides."""
    for key, what in (("transform_config", "rotations"), ("sparsity_config", "sparsity")):
        said = config.get(key)
        if not said or (isinstance(said, Mapping) and said.get("format") == "dense"):
            continue
        raise UnsupportedError(
            f"quantization_config.{key} declares {what}, which cannot be undone here: "
            f"{_shown(said)}",
            hint="dequantize it with compressed-tensors, or start from the unquantized model",
        )


def _integers(said: Sequence[Any], size: Any) -> Scheme | None:
    """Return the scheme of integers in groups or channels, None where there is none."""
    bits, kind, strategy = said
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel"):
        return None
    if strategy == "channel":
        return ct_integers.scheme_of(bits, None)
    return ct_integers.scheme_of(bits, size) if type(size) is int else None


def _odd(weights: Mapping[str, Any]) -> str:
    """Return what in a group makes its weights something else than codes times a scale."""
    if weights.get("symmetric") is False:
        return ", asymmetric (with zero points)"
    if weights.get("actorder"):
        return f", activation order {_shown(weights['actorder'])}"
    return ""


def _shown(value: Any) -> str:
    """Return what a config says, for a message: it may be anything, of any length."""
    return safe(str(value)[:80])


def _strings(value: Any, where: str) -> list[str]:
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(f"quantization_config.{where} is no list of strings")
    return value


def _takes(pattern: re.Pattern[str], module: str) -> bool:
    """Does a pattern take a module? None takes a name beyond the length that its time was bounded
    for."""
    return len(module) <= MAX_NAME and pattern.match(module) is not None


def _compile(entry: str) -> re.Pattern[str]:
    try:
        return compile_bounded(entry.removeprefix("re:"))
    except ValueError as error:
        raise CheckpointError(
            f"quantization_config: the pattern {_shown(entry)!r} {safe(str(error)[:200])}"
        ) from error


def write(declarations: Sequence[Declaration], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with a quantization_config that declares these weights and ignores every
    other module; without one where none is quantized, as readers refuse one without groups."""
    kinds: dict[tuple[str, str], list[str]] = {}
    ignore: set[str] = set()
    for item in declarations:
        module = item.name.removesuffix(".weight")
        if item.scheme is not None:
            kinds.setdefault((item.scheme.name, item.activations), []).append(module)
        elif item.name.endswith(".weight") and (len(item.shape) >= 2 or has_8_bits(item.dtype)):
            ignore.add(module)
    said = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    if not kinds:
        return said
    ignore |= modules_kept(
        ((item.name, item.shape) for item in declarations if item.scheme is None),
        (module for modules in kinds.values() for module in modules),
        singly=True,
        model=str(config.get("model_type")),
    )
    formats = {GROUPS[scheme][0] for scheme, _ in kinds}
    groups = {}
    for number, ((scheme, activations), modules) in enumerate(sorted(kinds.items())):
        form, weights, dynamic = GROUPS[scheme]
        inputs = {"dynamic": dynamic, "static": STATIC.get(scheme)}.get(activations)
        groups[f"group_{number}"] = {
            "format": form,
            "targets": ["Linear"]
            if len(kinds) == 1
            else [_entry(module) for module in sorted(modules)],
            "weights": dict(weights),
            "input_activations": dict(inputs) if inputs else None,
            "output_activations": None,
        }
    quantized = {module for modules in kinds.values() for module in modules}
    if has_untold_head(config):
        ignore.add("lm_head")
    said["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [_entry(module) for module in sorted(ignore - quantized)],
        "kv_cache_scheme": dict(CACHE) if any(item.cache for item in declarations) else None,
        "global_compression_ratio": None,
        "transform_config": {},
        "sparsity_config": {},
        "version": VERSION,
    }
    return said


def has_8_bits(dtype: str) -> bool:
    """May numbers of this dtype be the codes of a quantized weight?"""
    return dtype.startswith("F8_") or dtype == "I8"


def has_untold_head(config: Mapping[str, Any]) -> bool:
    """A tied head has no tensor in the file, but is a Linear in the model: readers must be told
    to leave it."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
