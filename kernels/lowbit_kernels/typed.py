"""Arguments of public functions are of the types that their annotations name: others are refused by
ValueError, as everything else that cannot be done is.

| annotation | takes |
|---|---|
| `Tensor` | a dense tensor of real numbers; on the device `meta` only where a function says so |
| `int`, `float`, `bool`, `str` | that; a bool is no number, an int is a float too |
| `tuple[...]`, `Sequence[...]` | a list or a tuple of such |
| `Mapping[str, ...]` | a mapping of such |
| another class | its instances |
| `Any` | everything: the function looks for itself |

Without this a wrong argument would end in an AttributeError or a TypeError of torch, somewhere
inside, or be taken for what it is not: `high=True` is 1.
"""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = tuple[str, Callable[[Any], bool]]  # what to say, and what is it

NUMBERS = {int: (int, torch.SymInt), float: (int, float, torch.SymInt, torch.SymFloat)}
WORDS = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
WORDS |= {bytes: "bytes", torch.dtype: "a dtype of torch"}
ANYTHING = "anything"
DENSE = "a dense tensor of real numbers"


def is_dense(x: Any) -> bool:
    """Say whether `x` is a dense tensor of real numbers."""
    real = isinstance(x, Tensor) and not (x.is_complex() or x.dtype == torch.bool or x.is_quantized)
    return real and x.layout == torch.strided


def called(x: Any) -> str:
    """Return what `x` is, in a word or two."""
    if not isinstance(x, Tensor):
        return x.__name__ if isinstance(x, type) else type(x).__name__
    if x.device.type == "meta":
        return "on meta, where tensors have no values"
    return str(x.layout) if x.layout != torch.strided else f"{x.dtype} {list(x.shape)}"


def _of_items(words: str, items: Sequence[Kind], whole: tuple[type, ...], endless: bool) -> Kind:
    def holds(x: Any) -> bool:
        if not isinstance(x, whole) or not (endless or len(x) == len(items)):
            return False
        return all(items[0 if endless else i][1](one) for i, one in enumerate(x))

    number = "" if endless else f" of {len(items)}"
    each = "" if items[0][0] == ANYTHING else f", each {items[0][0]}"
    return f"{words}{number}{each}", holds


def kind_of(annotation: Any, meta: bool) -> Kind:
    """Return what an annotation takes; `meta` is whether tensors may lie there."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return ANYTHING, lambda x: True
    if annotation is Tensor:
        return DENSE, lambda x: is_dense(x) and (meta or x.device.type != "meta")
    if annotation is None or annotation is type(None):
        return "None", lambda x: x is None
    if origin in (types.UnionType, typing.Union):
        kinds = [kind_of(one, meta) for one in inside]
        return " or ".join(k[0] for k in kinds), lambda x: any(k[1](x) for k in kinds)
    if origin is Mapping:
        key, value = (kind_of(one, meta) for one in inside)
        return (
            f"a mapping to {value[0]}",
            lambda x: (
                isinstance(x, Mapping) and all(key[1](k) and value[1](v) for k, v in x.items())
            ),
        )
    if origin in (tuple, Sequence):
        items = [kind_of(one, meta) for one in inside if one is not Ellipsis]
        return _of_items(
            "a list or tuple", items, (list, tuple), origin is not tuple or ... in inside
        )
    if origin is os.PathLike:
        return "a path", lambda x: isinstance(x, os.PathLike)
    if origin is Callable:
        return "a function", callable
    if annotation is inspect.Parameter.empty:  # self, or cls
        return "", lambda x: True
    if annotation in NUMBERS:
        plain = NUMBERS[annotation]
        return WORDS[annotation], lambda x: isinstance(x, plain) and not isinstance(x, bool)
    words = WORDS.get(annotation, f"a {annotation.__name__}")
    return words, lambda x: isinstance(x, annotation)


def typed(function: Function, *, meta: bool = False) -> Function:
    """Return `function` with its arguments looked at first.

    Raises ValueError, when called, for an argument of a type that its annotation does not name.
    """
    kinds = {
        name: kind_of(parameter.annotation, meta)
        for name, parameter in inspect.signature(function).parameters.items()
    }
    names = tuple(kinds)

    @functools.wraps(function)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        for name, given in (*zip(names, args, strict=False), *kwargs.items()):
            if name in kinds and not kinds[name][1](given):
                raise ValueError(f"{name} is {kinds[name][0]}, this is {called(given)}")
        return function(*args, **kwargs)

    return typing.cast(Function, looked_at)


def typed_with_meta(function: Function) -> Function:
    """Return what `typed` does of a function that takes tensors on the device `meta`, of which it
    makes such."""
    return typed(function, meta=True)
