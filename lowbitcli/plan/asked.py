"""What a user asked for, as a value that JSON holds: enough to make the same plan again, in another
process, on another machine, or later."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from lowbitcli.checkpoint.reader import Checkpoint
from lowbitcli.errors import OutputError
from lowbitcli.plan.nouns import PathLike, Plan
from lowbitcli.plan.prepare import Request, dequantization, quantization

QUANTIZE, DEQUANTIZE = "quantize", "dequantize"


@dataclass(frozen=True)
class Asked:
    """A command, its source (a path from the root), its options by name, and the weights that are
    kept as they hold NaN or Inf: name -> what was found."""

    command: str
    source: str
    how: Mapping[str, Any]
    non_finite: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def to_quantize(
        cls, source: PathLike, request: Request, non_finite: Mapping[str, str]
    ) -> "Asked":
        """Return what a quantization was asked for; a recipe's file is named from the root."""
        how = asdict(request)
        if request.recipe is not None:
            name = os.fspath(request.recipe)
            how["recipe"] = os.path.abspath(name) if os.path.exists(name) else name
        if request.importance is not None:
            how["importance"] = os.path.abspath(request.importance)
        if request.activation_scales is not None:
            how["activation_scales"] = os.path.abspath(request.activation_scales)
        return cls(QUANTIZE, os.path.abspath(source), how, dict(non_finite))

    @classmethod
    def to_dequantize(cls, source: PathLike, how: Mapping[str, Any]) -> "Asked":
        """Return what a dequantization was asked for."""
        return cls(DEQUANTIZE, os.path.abspath(source), dict(how))

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Asked":
        """Return what a document says.

        Raises:
            OutputError: it says something else.
        """
        try:
            asked = cls(**document)
            kinds = (asked.command, str), (asked.source, str), (asked.how, dict)
            if all(isinstance(value, kind) for value, kind in kinds):
                return asked
        except TypeError:
            pass
        raise OutputError("what was asked for cannot be understood", hint="another lowbit's?")

    @contextmanager
    def planned(self, output: PathLike | None) -> Iterator[tuple[Plan, Checkpoint]]:
        """Plan it, and hold its source open.

        Raises:
            LowbitError: what making a plan raises.
        """
        try:
            if self.command == DEQUANTIZE:
                planned = dequantization(self.source, output, **self.how)
                with planned as (plan, checkpoint):
                    yield plan, checkpoint
                return
            request = Request(**self.how)
        except TypeError as error:
            raise OutputError("it was asked for in words of another lowbit") from error
        kept = frozenset(self.non_finite)
        with quantization(self.source, output, request, kept) as (plan, checkpoint, _):
            yield plan, checkpoint
