"""What the library's front door takes: arguments, and fields of the values it is asked by, are of
the types that their annotations name; others are refused before anything is done.

Words are those of `lowbit_kernels.typed`, the error is the front door's own. A path has a name and
no NUL: an empty one would be the current folder to some calls, and no output to others. Numbers are
finite: a limit that is NaN would be kept by all.
"""

import dataclasses
import functools
import inspect
import math
import os
import reprlib
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from lowbit_kernels.typed import called, kind_of
from lowbitcli.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
PLAIN = (str, bytes, int, float, type(None))


def check(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value that is not of the annotated type, or a field of it that is not of its own.

    Raises:
        UsageError: it is another; the name is said, of a field with the parameter before it.
    """
    words, holds = kind_of(annotation, meta=True)
    if not holds(value):
        given = reprlib.repr(value) if isinstance(value, PLAIN) else called(value)
        raise UsageError(f"{name} is {words}, not {given}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} is a finite number, not {value!r}")
    kinds = [typing.get_origin(one) for one in typing.get_args(annotation)]
    if os.PathLike in kinds and value is not None and not _is_path(value):
        raise UsageError(f"{name} is a path, not {reprlib.repr(value)}")
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check(f"{name}.{field.name}", getattr(value, field.name), field.type)


def _is_path(x: Any) -> bool:
    """Say whether the system can take `x` for a path."""
    try:
        text = os.fspath(x)
        return isinstance(text, str) and text != "" and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        return False


def checked(function: Function) -> Function:
    """Return `function` with its arguments looked at first."""
    annotations = {n: p.annotation for n, p in inspect.signature(function).parameters.items()}
    names = tuple(annotations)

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in annotations:
                check(name, value, annotations[name])
        return function(*args, **kwargs)

    return typing.cast(Function, door)
