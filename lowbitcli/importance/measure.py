"""Run a model on a few tokens and write how much each input channel of its matrices counts.

    h_j = mean over the tokens of x_j^2, kept as an exponent: see `lowbit_kernels.importance`

Experts are all shown all tokens, whichever the router would choose, so that none is judged by a
handful. What is written is by names of the checkpoint, not of the model in memory: see
`plan.importance`.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_kernels import importance, tensor_file
from lowbitcli import __version__
from lowbitcli.checkpoint.atomic import os_errors, refuse_sources
from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, OutputError, UnsupportedError, UsageError
from lowbitcli.importance.model import Streamed, transformers
from lowbitcli.importance.tokens import random_ids, sequences
from lowbitcli.importance.watch import Seen, Watch
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.plan.importance import FORMAT, KEY, model_of, module_of, stacked_name
from lowbitcli.plan.nouns import PathLike
from lowbitcli.tensors import safe

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """What was measured: where it is, of how many modules, on how many tokens; `largest` are the
    bytes that the largest layer took, `notes` what to tell."""

    output: Path
    modules: int
    tokens: int
    largest: int
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "output": str(self.output),
            "modules": self.modules,
            "tokens": self.tokens,
            "largest_layer": self.largest,
        }

    def lines(self) -> list[str]:
        """Tell of it."""
        return [
            f"{safe(str(self.output))}: {self.modules:,} modules on {self.tokens:,} tokens; "
            f"the largest layer took {self.largest / 1e6:,.0f} MB",
        ]


def measure(
    source: PathLike,
    output: PathLike,
    *,
    tokens: int = 512,
    seed: int = 0,
    text: PathLike | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> Measured:
    """Measure the importance of the input channels of a model, on random tokens or a text.

    Raises:
        UsageError: transformers is missing, or the source is no model directory.
        UnsupportedError: transformers cannot run the model on tokens alone.
        LowbitError: the checkpoint cannot be read, or the output not be written.
    """
    transformers()
    where, target = device_of(device), Path(output)
    if tokens < 1:
        raise UsageError("--tokens is at least 1")
    if target.exists() and not force:
        raise OutputError(f"{safe(str(target))} exists", hint="--force replaces it")
    if not target.parent.is_dir():
        raise OutputError(f"{safe(str(target.parent))} is no directory", hint="make it first")
    with Checkpoint.open(source) as checkpoint:
        if not checkpoint.is_directory or checkpoint.config is None:
            raise UsageError(
                f"{safe(str(source))}: no model's directory with a config.json",
                hint="the config says which model of transformers runs it",
            )
        refuse_sources(target, [checkpoint.root / file for file in checkpoint.files])
        watch = Watch()
        streamed = Streamed(checkpoint, where, watch)
        ids = _ids(streamed, checkpoint, tokens, seed, text)
        _run(streamed, watch, ids, where, progress)
        found, notes = _by_source(streamed, watch.seen)
        if not streamed.units:
            size = f"{streamed.outside / 1e6:,.0f} MB in fp32"
            notes = (f"no layers were found, so the whole model was in memory: {size}", *notes)
        said = _said(checkpoint, len(ids), seed, text)
        with os_errors(target):
            tensor_file.write(target, found, said)
        return Measured(target, len(found), len(ids), streamed.largest, notes)


def _ids(
    streamed: Streamed, checkpoint: Checkpoint, tokens: int, seed: int, text: PathLike | None
) -> list[int]:
    vocabulary = streamed.model.config.get_text_config().vocab_size
    if text is None:
        return random_ids(tokens, vocabulary, seed)
    with os_errors(Path(text)):
        words = Path(text).read_text(encoding="utf-8")
    try:
        tokenizer = transformers().AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        path = safe(str(checkpoint.path))
        raise UsageError(
            f"{path}: no tokenizer, which a text needs: {error}",
            hint="without --text random tokens are used, which are nearly as good",
        ) from error
    ids = tokenizer(words)["input_ids"][:tokens]
    if not ids:
        raise UsageError(f"{safe(str(text))}: a text of no tokens")
    return ids


def _run(
    streamed: Streamed,
    watch: Watch,
    ids: list[int],
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Run the model on the tokens, all sequences of equal length at once."""
    streamed.begin(ids)
    config = streamed.model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    cut = list(sequences(ids, max(1, limit - 2) if limit else len(ids)))  # some begin at 2
    whole = [one for one in cut if len(one) == len(cut[0])]
    _show_all_experts(streamed, watch)
    if progress is not None:
        _report(streamed, progress)
    for batch in (whole, [one for one in cut if len(one) != len(cut[0])]):
        if batch:
            _call(streamed, watch, torch.tensor(batch, device=device))


def _call(streamed: Streamed, watch: Watch, ids: Tensor) -> None:
    given: dict[str, Any] = {"input_ids": ids}
    if getattr(streamed.model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    if "use_cache" in _arguments(streamed.base):
        given["use_cache"] = False
    watch.closed.clear()
    try:
        with torch.no_grad(), watch:
            streamed.base(**given)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        name = type(streamed.model).__name__
        raise UnsupportedError(
            f"transformers does not run {name} on tokens alone: {error}",
            hint="without importance the search takes all columns for equal",
        ) from error


def _arguments(module: nn.Module) -> tuple[str, ...]:
    code = getattr(type(module).forward, "__wrapped__", type(module).forward).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _report(streamed: Streamed, progress: Progress) -> None:
    sizes = {x: 4 * sum(p.numel() for p in u.parameters()) for x, u in streamed.units.items()}
    done = 0
    for name, unit in streamed.units.items():
        done += sizes[name]

        def tell(*_: Any, done: int = done, name: str = name) -> None:
            progress(done, sum(sizes.values()), name)

        unit.register_forward_hook(tell)


def _show_all_experts(streamed: Streamed, watch: Watch) -> None:
    """Let stacks of experts be shown all tokens by all of them before they are routed."""
    for name, module in streamed.model.named_modules():
        stacks = {own: p for own, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if stacks:
            names = {f"{name}.{own}" for own in stacks}
            count = max(len(p) for p in stacks.values())
            hook = _Everything(watch, names, count)
            module.register_forward_pre_hook(hook, with_kwargs=True)


class _Everything:
    """Calls experts with all tokens for each of them, and lets that be all that is watched."""

    def __init__(self, watch: Watch, names: set[str], count: int) -> None:
        self._watch, self._names, self._count, self._busy = watch, names, count, False

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        chosen = [x for x in given if isinstance(x, Tensor) and not x.is_floating_point()]
        if self._busy or len(chosen) != 1 or chosen[0].dim() != 2:
            return
        shape = (len(chosen[0]), self._count)
        every = torch.arange(self._count, device=chosen[0].device).expand(shape)

        def instead(x: Any) -> Any:
            if x is chosen[0]:
                return every.to(x.dtype)
            if isinstance(x, Tensor) and x.shape == chosen[0].shape:
                return x.new_ones(shape)
            return x

        self._busy = True
        try:
            module(*map(instead, args), **{key: instead(x) for key, x in kwargs.items()})
        finally:
            self._busy = False
        self._watch.closed |= self._names


def _by_source(
    streamed: Streamed, seen: Mapping[str, Seen]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return exponents by the names of the checkpoint, and what to tell."""
    found: dict[str, dict[int | None, Tensor]] = {}
    for name, one in seen.items():
        sources = streamed.sources.get(name, [])
        mean = one.mean
        if not bool(mean.isfinite().all()):
            raise CheckpointError(f"{safe(name)}: its inputs are not finite when the model runs")
        for source in sources:
            module, expert = stacked_name(module_of(source))
            own = mean if expert is None or len(mean) == 1 else mean[expert : expert + 1]
            found.setdefault(module, {})[expert] = importance.exponents_of(own)
    if not found:
        raise CheckpointError("none of the model's matrices was multiplied by anything")
    tensors = {}
    for module, rows in sorted(found.items()):
        stack = torch.cat([rows[expert] for expert in sorted(rows, key=lambda e: e or 0)])
        tensors[module] = stack[0] if bool((stack == stack[0]).all()) else stack
    missing = [
        x
        for unit in streamed.units
        for x in streamed.sources
        if _is_unseen(x, unit, seen, streamed)
    ]
    told = [f"not run on tokens, and without importance: {safe(x)}" for x in missing[:3]]
    told += [f"and {len(missing) - 3:,} more"] if len(missing) > 3 else []
    return tensors, tuple(told)


def _is_unseen(name: str, unit: str, seen: Mapping[str, Seen], streamed: Streamed) -> bool:
    if not name.startswith(f"{unit}.") or name in seen:
        return False
    parent, _, own = name.rpartition(".")
    try:
        module = streamed.model.get_submodule(parent)
    except AttributeError:
        return False
    return own == "weight" and isinstance(module, nn.Linear)


def _said(checkpoint: Checkpoint, tokens: int, seed: int, text: PathLike | None) -> dict[str, str]:
    said = {
        KEY: FORMAT,
        "model": model_of(checkpoint),
        "tokens": str(tokens),
        "lowbit": __version__,
        "torch": torch.__version__,
        "transformers": transformers().__version__,
    }
    if text is None:
        return said | {"seed": str(seed)}
    return said | {"text": hashlib.sha256(Path(text).read_bytes()).hexdigest()}
