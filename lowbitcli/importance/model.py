"""A model whose weights come while it runs, those of one layer at a time.

It is made by transformers without weights. Each of its layers (what lists of modules hold) reads
its own from the checkpoint before it runs, and lets them go afterwards, so that the largest layer
decides what memory it takes, whatever the architecture does around them. Of the input embeddings
only the rows of the tokens are read; the head is not.

transformers' own rules of renaming and converting say which tensors of a checkpoint a layer is made
of: experts that are stored one by one, for instance, and in memory are a stack.
"""

import copy
import importlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import CheckpointError, UnsupportedError, UsageError
from lowbitcli.importance.watch import Watch
from lowbitcli.pipeline.arithmetic import ops_of
from lowbitcli.pipeline.read import load, tensor_of
from lowbitcli.plan.source import SourceWeight, examine, refuse_findings
from lowbitcli.tensors import DATA, safe

LEAST = (5, 0)  # of transformers: the first whose rules of conversion are there to be used
INSTALL = "pip install 'lowbit[importance]'"


def transformers() -> ModuleType:
    """Return the package.

    Raises:
        UsageError: it is not installed, or too old.
    """
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("importance is measured with transformers", hint=INSTALL) from error
    version = tuple(int(x) for x in re.findall(r"\d+", found.__version__)[:2])
    if version < LEAST:
        message = f"transformers {found.__version__} is too old: 5.0 is the first that is used"
        raise UsageError(message, hint=INSTALL)
    return found


class Streamed:
    """A model of a checkpoint, on `device`; `watch` is told of the weights that are there."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, watch: Watch) -> None:
        self._package = transformers()
        self._loading = importlib.import_module("transformers.core_model_loading")
        self._checkpoint, self._device, self._watch = checkpoint, device, watch
        source = examine(checkpoint)
        refuse_findings(source)
        self._weights = dict(source.weights)
        self.model = self._empty()
        self.base: nn.Module = getattr(self.model, "base_model", self.model)
        mapping = importlib.import_module("transformers.conversion_mapping")
        self._mapping = mapping.get_model_conversion_mapping(self.model)
        self.sources = self._sources()
        self.units = dict(_units(self.base, self._name_of(self.base)))
        for name, unit in self.units.items():
            unit.register_forward_pre_hook(self._before(name))
            unit.register_forward_hook(self._after(name), always_call=True)

    @property
    def largest(self) -> int:
        """Return the bytes of the largest layer in fp32."""
        sizes = [sum(p.numel() for p in unit.parameters()) for unit in self.units.values()]
        return 4 * max(sizes, default=0)

    @property
    def outside(self) -> int:
        """Return the bytes of what belongs to no layer, embeddings of tokens left out, in fp32."""
        own = self._outside()
        embedding = self._embedding()
        return 4 * sum(p.numel() for name, p in own.items() if name != embedding)

    def begin(self, ids: Iterable[int]) -> None:
        """Read what belongs to no layer; of the embeddings the rows of `ids`."""
        self._make_buffers()  # before weights are there, which it would make anew as well
        embedding = self._embedding()
        names = set(self._outside())
        if self._sparse(embedding):
            names.discard(embedding)
            self._set_rows(embedding, sorted(set(ids)))
        self._read(names)
        self.model.tie_weights()
        self._check(self._outside())
        self._watch.take(self._outside())

    def _empty(self) -> Any:
        """Return the model without weights."""
        try:
            config = self._package.AutoConfig.from_pretrained(
                self._checkpoint.path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            path = safe(str(self._checkpoint.path))
            raise UnsupportedError(f"{path}: transformers has no model for it: {error}") from error
        for one in (config, getattr(config, "text_config", None)):
            if one is not None and hasattr(one, "quantization_config"):
                del one.quantization_config
        named = (getattr(config, "architectures", None) or [""])[0]
        kind = getattr(self._package, named or "", None)
        how = {"dtype": torch.float32, "attn_implementation": "eager"}
        with torch.device("meta"):
            if kind is not None:
                model = kind._from_config(config, **how)
            else:
                model = self._package.AutoModel.from_config(config, **how)
        model.set_experts_implementation("eager")
        return model.eval()

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, one in self.model.named_modules() if one is module)

    def _sources(self) -> dict[str, list[str]]:
        """Return for each tensor of the model those of the checkpoint that it is made of."""
        renamings = [x for x in self._mapping if isinstance(x, self._loading.WeightRenaming)]
        converters = [x for x in self._mapping if isinstance(x, self._loading.WeightConverter)]
        known = self.model.state_dict()
        found: dict[str, list[str]] = {}
        for name in sorted(self._weights, key=self._loading.dot_natural_key):
            renamed, _ = self._loading.rename_source_key(
                name, renamings, converters, self.model.base_model_prefix, known
            )
            if renamed not in known and name in known:
                renamed = name
            found.setdefault(renamed, []).append(name)
        return found

    def _outside(self) -> dict[str, nn.Parameter]:
        """Return the parameters that belong to no layer, by name, of the model that is run."""
        prefix = self._name_of(self.base)
        inside = tuple(f"{name}." for name in self.units)
        named = self.model.named_parameters(remove_duplicate=False)
        return {
            name: p
            for name, p in named
            if name.startswith(prefix and f"{prefix}.") and not name.startswith(inside)
        }

    def _embedding(self) -> str:
        try:
            module = self.model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return ""
        return f"{self._name_of(module)}.weight" if isinstance(module, nn.Embedding) else ""

    def _sparse(self, embedding: str) -> bool:
        """Can the rows of some tokens be read alone?"""
        stored = self.sources.get(embedding, [])
        return len(stored) == 1 and self._weights[stored[0]].scheme is None

    def _set_rows(self, embedding: str, ids: list[int]) -> None:
        """Give the embeddings of `ids` their numbers; memory of the others is never touched."""
        weight = self._weights[self.sources[embedding][0]]
        spec = weight.reads[DATA].spec
        wanted = self.model.get_parameter(embedding).shape
        if tuple(spec.shape) != tuple(wanted):
            raise CheckpointError(
                f"{safe(spec.name)} is {list(spec.shape)}, and config.json makes it {list(wanted)}",
                hint="is config.json that of this checkpoint?",
            )
        step = spec.nbytes // spec.shape[0]
        table = torch.empty(spec.shape, dtype=torch.float32, device=self._device)
        for number in ids:
            raw = self._checkpoint.read(spec.name, number * step, (number + 1) * step)
            row = tensor_of(raw, spec._replace(shape=spec.shape[1:]))
            table[number] = row.to(self._device, torch.float32)
        module = self.model.get_submodule(embedding.rpartition(".")[0])
        module.weight = nn.Parameter(table, requires_grad=False)

    def _stored(self, name: str) -> Tensor:
        """Return a tensor as the model's own files would hold it, unquantized."""
        weight = self._weights[name]
        if weight.scheme is None:
            spec = weight.reads[DATA].spec
            return tensor_of(self._checkpoint.read(spec.name), spec)
        return _dequantized(weight, self._checkpoint, self._device)

    def _read(self, names: Iterable[str]) -> None:
        """Bring tensors of the model, by name, into memory."""
        wanted = [source for name in sorted(names) for source in self.sources.get(name, [])]
        tensors = {name: self._stored(name) for name in wanted}
        config = importlib.import_module("transformers.modeling_utils").LoadStateDictConfig(
            dtype=torch.float32,
            device_map={"": self._device},
            weight_mapping=copy.deepcopy(self._mapping),
        )
        with _quiet():
            info, _ = self._loading.convert_and_load_state_dict_in_model(
                self.model, tensors, config
            )
        wrong = [*info.mismatched_keys, *info.conversion_errors.items()]
        if wrong:
            raise CheckpointError(
                f"{safe(str(self._checkpoint.path))}: transformers cannot take {wrong[0]}"
            )

    def _make_buffers(self) -> None:
        """Compute what no checkpoint holds: tables of positions and the like."""
        for module in self.model.modules():
            missing = [x for x, b in module._buffers.items() if b is not None and b.is_meta]
            for name in missing:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=self._device)
            if missing:
                with torch.no_grad():
                    self.model._init_weights(module)

    def _before(self, name: str) -> Any:
        def read(unit: nn.Module, *_: Any) -> None:
            named = _under(name, unit)
            self._read([*named, *_under(name, unit, buffers=True)])
            named = _under(name, unit)
            self._check(named)
            self._watch.take(named)

        return read

    def _after(self, name: str) -> Any:
        def drop(unit: nn.Module, *_: Any) -> None:
            self._watch.leave(_under(name, unit))
            for module in unit.modules():
                for own, p in module._parameters.items():
                    if p is not None:
                        empty = torch.empty_like(p, device="meta")
                        module._parameters[own] = nn.Parameter(empty, requires_grad=False)

        return drop

    def _check(self, named: Mapping[str, Tensor]) -> None:
        lacking = [name for name, tensor in named.items() if tensor.is_meta]
        if lacking:
            raise CheckpointError(
                f"{safe(str(self._checkpoint.path))}: the model needs {safe(lacking[0])}, "
                "and no tensor is that"
            )


def _dequantized(weight: SourceWeight, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    if weight.scheme is None:
        raise ValueError("it is not quantized")
    parts = {name: load(checkpoint, part, device) for name, part in weight.reads.items()}
    value = ops_of(weight.scheme).dequantize(parts, torch.float32)
    return value if weight.plain is None else weight.plain.encode(value)


def _units(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers: the modules with weights in the outermost lists of modules."""
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        if isinstance(module, nn.ModuleList) and any(True for _ in child.parameters()):
            yield path, child
        else:
            yield from _units(child, path)


def _under(name: str, unit: nn.Module, *, buffers: bool = False) -> dict[str, Tensor]:
    own = unit.named_buffers() if buffers else unit.named_parameters()
    return {f"{name}.{key}": tensor for key, tensor in own}


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers draw no bar of its own for each layer."""
    logging = importlib.import_module("transformers.utils.logging")
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()
