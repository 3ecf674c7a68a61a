"""What consumers demand of the names of the files that hold the weights."""

from collections.abc import Iterator

from lowbitcli.plan.consumers import Found, Rule, Seen

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"


def named_files(seen: Seen, consumer: str) -> Iterator[Found]:
    """transformers 5.24 opens `model.safetensors`, or the shards that its index names, or the file
    that `transformers_weights` of config.json names; vLLM and SGLang take every `*.safetensors`
    that is there. (`_get_resolved_checkpoint_files`; tried.)"""
    checkpoint = seen.checkpoint
    if not checkpoint.is_directory or WHOLE in checkpoint.files or checkpoint.index_name == INDEX:
        return
    if seen.config.get("transformers_weights") in checkpoint.files:
        return
    if any(name.startswith("diffusion_pytorch_model") for name in checkpoint.files):
        return  # a component that diffusers loads
    told = f"neither {WHOLE} nor {INDEX} is there: OSError, no file of these names"
    yield Found("", told)


FILE_RULES = (Rule(named_files, ("transformers",)),)
