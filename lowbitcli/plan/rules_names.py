"""What consumers make of names: ignored modules in their dialect, heads, embeddings, groups of
modules that are served as one, and parts that they do not know or miss."""

import difflib
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from lowbitcli.containers import ct_config
from lowbitcli.containers.stacks import is_stack
from lowbitcli.plan.consumers import WARN, Found, Rule, Seen, many
from lowbitcli.plan.rules_config import CT, HUB
from lowbitcli.regex import MAX_NAME, compile_bounded
from lowbitcli.tensors import DATA

FP8 = ("deepseek", "native-mxfp8")
# Kinds of matrices that are no Linear in the model, or that consumers never quantize by a class.
NO_LINEAR = ("embeddings", "norms", "convolutions", "relative_attention_bias", "routers", "heads")
HEADS = ("lm_head", "output", "embed_out")


def ignored(seen: Seen) -> list[str]:
    """Return the entries of the list of modules that are not quantized, whatever it is called."""
    nested = (seen.checkpoint.quant_config or {}).get("quantization")
    nested = nested if isinstance(nested, dict) else {}
    for said, key in (
        (seen.said, "ignore"),
        (seen.said, "ignored_layers"),
        (seen.said, "modules_to_not_convert"),
        (seen.said, "exclude_modules"),
        (nested, "exclude_modules"),
    ):
        found = said.get(key)
        if isinstance(found, list) and found:
            return [entry for entry in found if isinstance(entry, str)]
    return []


def takes(seen: Seen, consumer: str, entry: str, module: str) -> bool:
    """Does a consumer take `module` for ignored by this entry?

    compressed-tensors: exact, or `re:` with re.match (utils/match.py:116). SGLang also takes the
    end of a name (compressed_tensors/utils.py:83). ModelOpt: vLLM exact, any part of the name, or a
    glob (modelopt.py:191); SGLang a glob of the whole or of one component
    (modelopt_quant.py:379); TensorRT-LLM a glob. FP8: vLLM and SGLang exact; transformers an
    expression or the end of a name (quantizers_utils.py should_convert_module).
    """
    if entry == module:
        return True
    if seen.container == CT:
        if entry.startswith("re:"):
            return _end(entry.removeprefix("re:"), module) is not None
        return consumer == "sglang" and module.endswith(f".{entry}")
    if seen.container == "modelopt":
        if consumer == "vllm":
            return entry in module or any(_globs(module, one) for one in _stars(entry))
        if consumer == "sglang" and any(_globs(part, entry) for part in module.split(".")):
            return True
        return _globs(module, entry)
    if consumer == "transformers":
        end = _end(entry, module)
        whole = end is not None and (
            end == len(module) or module[end] == "." or module[end - 1 : end] == "."
        )
        return whole or module.endswith(entry)
    return consumer == "tensorrt-llm" and _globs(module, entry)


def _globs(name: str, entry: str) -> bool:
    """Does a glob take a name? Most entries are none, of which there are many."""
    if "*" in entry or "?" in entry or "[" in entry:
        return fnmatchcase(name, entry)
    return name == entry


def _stars(entry: str) -> tuple[str, ...]:
    return (entry, f"{entry[:-1]}.*") if entry.endswith("*") else (entry,)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return compile_bounded(pattern)
    except ValueError:
        return None


def _end(pattern: str, module: str) -> int | None:
    """Return where a match from the start of a name ends, None where there is none."""
    compiled = _compiled(pattern)
    found = compiled.match(module) if compiled is not None and len(module) <= MAX_NAME else None
    return None if found is None else found.end()


def taken(seen: Seen, consumer: str, entry: str, modules: Collection[str]) -> list[str]:
    """Return the modules that an entry takes; of many the exact one at once."""
    exact = seen.container in FP8 and consumer in ("vllm", "sglang")
    exact = exact or (seen.container == CT and not entry.startswith("re:") and consumer != "sglang")
    if exact:
        return [entry] if entry in modules else []
    return [module for module in modules if takes(seen, consumer, entry, module)]


def all_ignored(seen: Seen, consumer: str, modules: Collection[str]) -> set[str]:
    """Return the modules that a consumer takes for ignored."""
    return {x for entry in ignored(seen) for x in taken(seen, consumer, entry, modules)}


def dialect(seen: Seen, consumer: str) -> Iterator[Found]:
    """An entry in the words of another container has no effect."""
    for entry in ignored(seen):
        told = f"{entry!r} among the ignored modules"
        if seen.container == CT and "*" in entry and not entry.startswith("re:"):
            yield Found("", f"{told} is a glob, and only exact names and re: are understood")
        elif seen.container in (*FP8, "modelopt") and entry.startswith("re:"):
            yield Found("", f"{told} begins with re:, which is not understood there")
        elif seen.container in FP8 and "*" in entry and consumer in ("vllm", "sglang"):
            yield Found("", f"{told} is a glob, which it does not expand: it has no effect")


def no_such_module(seen: Seen, consumer: str) -> Iterator[Found]:
    """A name that is no module's is most often misspelt."""
    entries = ignored(seen)
    for entry in entries:
        if entry.startswith("re:") or "*" in entry or "." not in entry:
            continue  # writers list patterns for every model, and heads that are tied
        if entry in seen.modules or taken(seen, consumer, entry, seen.modules):
            continue
        if is_stack(f"{entry}.gate_up_proj", 3) or ".experts" in entry:
            continue  # what consumers call the experts of a stack
        if seen.kind_of(entry) in ("embeddings", "heads"):
            continue  # in a part of the model that is not here, or tied
        near = difflib.get_close_matches(entry, sorted(seen.plain), 1)
        told = f"the ignored module {entry!r} is not there"
        yield Found("", told + (f"; is {near[0]!r} meant?" if near else ""), WARN)


def not_ignored(seen: Seen, consumer: str) -> Iterator[Found]:
    """A matrix in floating point that nothing ignores is loaded as a quantized one."""
    if not seen.quantized or seen.container not in (CT, "modelopt", *FP8) or not _is_by_class(seen):
        return
    heads = consumer == "transformers" and seen.container == CT
    ordinary = {
        module
        for module in seen.plain
        if seen.kind_of(module) not in NO_LINEAR or (heads and module in HEADS)
    }
    missed = ordinary - all_ignored(seen, consumer, ordinary)
    if missed:
        yield Found(
            seen.data_of(min(missed)),
            f"{len(missed):,} modules are stored in {seen.plain[min(missed)].dtype} and nothing "
            f"ignores them, so that it looks for their scales: {many(missed)}",
        )
    if heads and ct_config.has_untold_head(seen.config):
        there = any(module in seen.plain or module in seen.quantized for module in HEADS)
        if not there and not all_ignored(seen, consumer, {"lm_head"}):
            told = "the tied lm_head is not ignored: it has no scale, and logits are NaN"
            yield Found("", told)


def _is_by_class(seen: Seen) -> bool:
    """Does what is declared take every Linear that is not ignored?"""
    if seen.container == CT:
        groups = seen.said.get("config_groups")
        groups = groups.values() if isinstance(groups, dict) else ()
        return any("Linear" in (g.get("targets") or ()) for g in groups if isinstance(g, dict))
    return not (seen.container == "modelopt" and "quantized_layers" in seen.said)


def ignored_and_quantized(seen: Seen, consumer: str) -> Iterator[Found]:
    """A quantized weight that is taken for ignored: its scale belongs to no parameter."""
    if seen.container not in (CT, "modelopt", *FP8):
        return
    entries = ignored(seen)
    for entry in entries:
        hit = taken(seen, consumer, entry, seen.quantized)
        if hit:
            what = "ValueError: There is no module or parameter named ...weight_scale"
            if consumer != "vllm":
                what = "it takes the codes for weights"
            yield Found(
                seen.data_of(min(hit)),
                f"the ignored {entry!r} takes {len(hit):,} modules that are quantized: {what} "
                f"({many(hit)})",
            )


def split_groups(seen: Seen, _: str) -> Iterator[Found]:
    """vLLM 0.33 and SGLang 0.5.23: one scheme for all that is served as one matrix."""
    for group in seen.groups:
        schemes = {
            name: weight.scheme.name if weight is not None and weight.scheme else "kept"
            for name in group
            for weight in (seen.quantized.get(name),)
        }
        if len(set(schemes.values())) > 1 and any(x in seen.quantized for x in group):
            told = ", ".join(f"{name} {scheme}" for name, scheme in sorted(schemes.items()))
            first = next(name for name in group if name in seen.quantized)
            yield Found(
                seen.data_of(first),
                f"served as one matrix, in different schemes ({told}): ValueError: Found different "
                "quantization schemes",
            )


def heads(seen: Seen, consumer: str) -> Iterator[Found]:
    """A quantized head: FP8 methods of vLLM 0.33 and SGLang 0.5.23 take LinearBase only; vLLM's
    compressed-tensors takes a head by its name, not as a Linear."""
    for module in seen.quantized:
        if seen.kind_of(module) != "heads" or module.rpartition(".")[2] not in HEADS:
            continue
        name = seen.data_of(module)
        if seen.container in FP8:
            told = "the head is quantized, and its FP8 method leaves heads alone"
            yield Found(name, f"{told}: the scale belongs to no parameter")
        elif seen.container == CT and consumer == "vllm" and not _is_named(seen, module):
            told = "the head is quantized, but no target names it, and a head is no Linear there"
            yield Found(name, told)


def _is_named(seen: Seen, module: str) -> bool:
    groups = seen.said.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        for target in targets if isinstance(targets, list) else ():
            text = str(target)
            if text == module or (text.startswith("re:") and _end(text[3:], module) is not None):
                return True
    return False


def embeddings(seen: Seen, _: str) -> Iterator[Found]:
    """Embeddings are looked up: vLLM 0.33 takes INT only (compressed_tensors.py
    get_quant_method), the others none."""
    for module, weight in seen.quantized.items():
        if seen.kind_of(module) == "embeddings":
            yield Found(weight.reads[DATA].spec.name, "an embedding is quantized, and not read")


WHAT_OF = {
    "missing": {
        "vllm": "it computes with memory that nothing was written to, or stops",
        "sglang": "it logs a line and computes with memory that nothing was written to",
        "tensorrt-llm": "KeyError where it loads the layer",
        "transformers": "the weight is initialised anew",
        "comfyui": "KeyError where it loads the layer",
    },
    "orphan": {
        "vllm": "ValueError: There is no module or parameter named so",
        "sglang": "a line in the log, and nothing else",
        "transformers": "reported as UNEXPECTED",
    },
    "mismatch": dict.fromkeys(
        ("vllm", "sglang", "tensorrt-llm", "transformers", "comfyui"),
        "an AssertionError, or numbers that are read wrong",
    ),
    "duplicate": {"vllm": "ValueError: There is no module or parameter named so"},
}


def findings(seen: Seen, consumer: str) -> Iterator[Found]:
    """What we found missing, alone or of the wrong kind, and what becomes of it."""
    for found in seen.source.findings:
        told = WHAT_OF.get(found.kind, {}).get(consumer)
        if told is not None:
            name = found.tensor if seen.has(found.tensor) else ""
            yield Found(name or found.tensor, f"{found.message}: {told}")


NAME_RULES = (
    Rule(dialect, HUB),
    Rule(no_such_module, HUB),
    Rule(not_ignored, HUB),
    Rule(ignored_and_quantized, HUB),
    Rule(split_groups, ("vllm", "sglang")),
    Rule(heads, ("vllm", "sglang")),
    Rule(embeddings, HUB),
    Rule(findings, (*HUB, "comfyui")),
)
