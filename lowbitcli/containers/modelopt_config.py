"""What ModelOpt says of a checkpoint: module -> algorithm, in config.json and hf_quant_config.json.

config.json has it flat (`quant_method: modelopt`, `quant_algo`, `ignore`, `config_groups`), older
exports and hf_quant_config.json under `quantization` (`quant_algo`, `exclude_modules`). Where both
are there they must name the same algorithm. `MIXED_PRECISION` lists every quantized layer by its
full name. Source: ModelOpt 0.47, `torch/export/convert_hf_config.py`, `quant_utils.py`; which keys
readers ask for was tried on vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbitcli.containers.container import Declaration, Listing
from lowbitcli.containers.ct_config import has_untold_head, of
from lowbitcli.containers.plain import QUANTIZATION_KEYS
from lowbitcli.containers.stacks import modules_kept
from lowbitcli.errors import CheckpointError, UnsupportedError
from lowbitcli.schemes import BY_NAME, Scheme
from lowbitcli.tensors import safe

# The schema's. Readers look for this name of a producer to know that the schema is ModelOpt's.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MIXED = "MIXED_PRECISION"

# algorithm, in capitals -> scheme
ALGORITHMS = {
    "FP8": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "FP8_PB_WO": "fp8_block128",
    "FP8_BLOCK_SCALES": "fp8_block128",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}
# scheme, also with static activations -> (algorithm that is written, size of a block where readers
# want it)
WRITTEN: dict[str, tuple[str, int | None]] = {
    "fp8_channel": ("FP8_PER_CHANNEL_PER_TOKEN", None),
    "fp8_block128": ("fp8_pb_wo", None),
    "nvfp4": ("W4A16_NVFP4", 16),
    "mxfp8": ("MXFP8", 32),
    "fp8_tensor static": ("FP8", None),
    "nvfp4 static": ("NVFP4", 16),
}
_FP8: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
_NVFP4: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
GROUPS: dict[str, dict[str, Any]] = {
    "nvfp4": {"weights": _NVFP4},
    "nvfp4 static": {"weights": _NVFP4, "input_activations": _NVFP4},
    "fp8_tensor static": {"weights": _FP8, "input_activations": _FP8},
}


@dataclass(frozen=True)
class Said:
    """What a checkpoint declares: one scheme for all modules but the excluded ones, or one for each
    that is named."""

    scheme: Scheme | None
    layers: Mapping[str, Scheme] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module that is stored as if quantized, None where that is wrong.

        Of the excluded names only whole ones count: what their wildcards mean differs from reader
        to reader.
        """
        if self.scheme is None:
            return self.layers.get(module)
        return None if module in self.excluded else self.scheme


def is_declared(listing: Listing) -> bool:
    """Does a checkpoint say that ModelOpt's readers are to load it?"""
    said = of(listing.config)
    method = said.get("quant_method")
    if method is not None:
        return method in ("modelopt", "modelopt_fp4", "modelopt_mixed")
    if "quantization" in said or "quant_algo" in said:
        return True
    return not said and listing.quant_config is not None


def read(listing: Listing) -> Said:
    """Understand what is declared.

    Raises:
        CheckpointError: it is malformed, or the two files disagree.
        UnsupportedError: it declares an algorithm that is not read here.
    """
    found = [
        _parts(said, where)
        for said, where in (
            (of(listing.config), "config.json: quantization_config"),
            (listing.quant_config or {}, "hf_quant_config.json"),
        )
        if said
    ]
    algorithms = {str(one["quant_algo"]).upper() for one in found}
    if len(algorithms) > 1:
        told = " and ".join(sorted(safe(one[:40]) for one in algorithms))
        raise CheckpointError(f"config.json and hf_quant_config.json disagree: {told}")
    said = found[0]
    if algorithms == {MIXED}:
        return Said(None, _layers(said["quantized_layers"]))
    excluded = said["exclude_modules"]
    if not isinstance(excluded, list) or not all(isinstance(one, str) for one in excluded):
        raise CheckpointError("the modules that ModelOpt excludes are no list of strings")
    return Said(_scheme(said["quant_algo"]), excluded=frozenset(excluded))


def _parts(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return quant_algo, exclude_modules and quantized_layers of either form."""
    nested = said.get("quantization", said)
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{where}: quantization is no object")
    if not isinstance(nested.get("quant_algo"), str):
        raise CheckpointError(f"{where} names no quant_algo")
    excluded = nested.get("exclude_modules", nested.get("ignore"))
    return {
        "quant_algo": nested["quant_algo"],
        "exclude_modules": [] if excluded is None else excluded,
        "quantized_layers": nested.get("quantized_layers"),
    }


def _layers(said: Any) -> dict[str, Scheme]:
    if not isinstance(said, Mapping):
        raise CheckpointError("ModelOpt's MIXED_PRECISION lists no quantized_layers")
    layers = {}
    for name, layer in said.items():
        if not isinstance(layer, Mapping):
            raise CheckpointError(f"quantized_layers: {safe(str(name)[:80])} is no object")
        layers[str(name)] = _scheme(layer.get("quant_algo"))
    return layers


def _scheme(algorithm: Any) -> Scheme:
    name = ALGORITHMS.get(str(algorithm).upper())
    if name is None:
        raise UnsupportedError(
            f"ModelOpt's quant_algo {safe(str(algorithm)[:80])} is not read",
            hint=f"read are: {', '.join(ALGORITHMS)}",
        )
    return BY_NAME[name]


def write(
    declarations: Sequence[Declaration], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the new config.json and hf_quant_config.json (None where nothing is quantized)."""
    said = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    layers = {
        item.name.removesuffix(".weight"): item.scheme.name
        + (" static" if item.activations == "static" else "")
        for item in declarations
        if item.scheme is not None
    }
    if not layers:
        return said, None
    excluded = _excluded(declarations, layers, config)
    if len(set(layers.values())) > 1:
        flat, nested = _mixed(layers)
    else:
        flat, nested = _uniform(next(iter(layers.values())), excluded)
    if any(item.cache for item in declarations):
        flat["kv_cache_scheme"] = dict(_FP8)
        nested["kv_cache_quant_algo"] = "FP8"
    said["quantization_config"] = {"quant_method": "modelopt", **flat, "producer": PRODUCER}
    return said, {"producer": PRODUCER, "quantization": nested}


def _uniform(scheme: str, excluded: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    algorithm, size = WRITTEN[scheme]
    flat: dict[str, Any] = {"quant_algo": algorithm, "ignore": excluded}
    if scheme in GROUPS:
        flat["config_groups"] = {"group_0": {**GROUPS[scheme], "targets": ["Linear"]}}
    nested = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        **({"group_size": size} if size else {}),
        "exclude_modules": excluded,
    }
    return flat, nested


def _mixed(layers: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    named = {}
    for module, scheme in sorted(layers.items()):
        algorithm, size = WRITTEN[scheme]
        named[module] = {"quant_algo": algorithm, **({"group_size": size} if size else {})}
    groups = {
        f"group_{number}": {
            **GROUPS[scheme],
            "targets": sorted(module for module, own in layers.items() if own == scheme),
        }
        for number, scheme in enumerate(sorted(set(layers.values()) & GROUPS.keys()))
    }
    flat = {"quant_algo": MIXED, "config_groups": groups, "quantized_layers": named, "ignore": []}
    nested = {"quant_algo": MIXED, "kv_cache_quant_algo": None, "quantized_layers": named}
    return flat, nested


def _excluded(
    declarations: Sequence[Declaration], layers: Mapping[str, str], config: Mapping[str, Any]
) -> list[str]:
    kept = {
        item.name.removesuffix(".weight")
        for item in declarations
        if item.scheme is None and len(item.shape) >= 2 and item.name.endswith(".weight")
    }
    stacks = ((item.name, item.shape) for item in declarations if item.scheme is None)
    kept |= modules_kept(stacks, layers) | _experts_kept(kept, layers)
    if has_untold_head(config):
        kept.add("lm_head")
    return sorted(kept - layers.keys())


def _experts_kept(kept: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return the modules of experts of which none is quantized: vLLM 0.33 asks for that name."""
    found = {name.partition(".experts.")[0] for name in kept if ".experts." in name}
    busy = {name.partition(".experts.")[0] for name in layers} if found else set()
    return {f"{before}.experts" for before in found - busy}


def swallowed(excluded: Sequence[str], layers: Sequence[str]) -> dict[str, str]:
    """Return excluded module -> a quantized one whose name it is a part of: vLLM takes an excluded
    name for excluded wherever it stands in another."""
    text = "\n".join(layers)
    return {
        name: next(layer for layer in layers if name in layer) for name in excluded if name in text
    }
