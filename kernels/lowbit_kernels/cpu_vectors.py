"""What the loops of the CPU are compiled with: numba, and vectors where its compiler sees none.

    @vectors
    def _pair(w, at, out, to):
        x = w.load(at, 16)
        out.store(to, where(x.above(3), x + 1, 0))

`vectors` makes of this a function that `jit` functions call: its body runs once, when they are
compiled, and writes instructions of LLVM for all lanes. Arrays come as `Memory`, numbers as `Lanes`
of one. LLVM turns vectors of any width into what the processor has, so one text serves all of them.
No instruction may be contracted or reordered: the bits are those of the text.

What was compiled is kept where numba keeps it: beside this file, or, where that cannot be written,
in the user's cache directory (NUMBA_CACHE_DIR says another). A name holds the digest of all files
that it was compiled from, so that no other version's is taken.
"""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba  # pyright: ignore[reportMissingImports]
from numba.core import cgutils, types  # pyright: ignore[reportMissingImports]
from numba.extending import intrinsic  # pyright: ignore[reportMissingImports]

ir = cgutils.ir  # of llvmlite, the one that numba came with
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


def _digest() -> str:
    here = Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.glob("cpu_*.py")))
    return hashlib.sha256(text).hexdigest()[:12]


def jit(function: Callable[..., Any]) -> Any:
    """Compile `function` when it is first called, keep the code, and hold no lock while it runs."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        function.__qualname__ = f"{function.__qualname__}_{_DIGEST}"
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it: an installation that is read-only, and no home
        return numba.njit(**options)(function)


_DIGEST = _digest()


class Lanes:
    """Numbers of one type, side by side; a Python number on the other side stands for all lanes."""

    def __init__(self, builder: Any, value: Any) -> None:
        self._builder, self.value = builder, value

    @property
    def _count(self) -> int:
        return self.value.type.count if isinstance(self.value.type, ir.VectorType) else 1

    @property
    def one(self) -> Any:
        """The type of a lane."""
        kind = self.value.type
        return kind.element if isinstance(kind, ir.VectorType) else kind

    def _type(self, one: Any) -> Any:
        return ir.VectorType(one, self._count) if self._count > 1 else one

    def _of(self, value: Any) -> "Lanes":
        return Lanes(self._builder, value)

    def like(self, other: Any) -> Any:
        """Return a number, or lanes, as the instruction's other side."""
        if isinstance(other, Lanes):
            return other.value
        kind = self.value.type
        return ir.Constant(kind, [other] * self._count if self._count > 1 else other)

    def _do(self, integer: str, floating: str, other: Any) -> "Lanes":
        name = integer if isinstance(self.one, ir.IntType) else floating
        return self._of(getattr(self._builder, name)(self.value, self.like(other)))

    def __add__(self, other: Any) -> "Lanes":
        return self._do("add", "fadd", other)

    def __sub__(self, other: Any) -> "Lanes":
        return self._do("sub", "fsub", other)

    def __mul__(self, other: Any) -> "Lanes":
        return self._do("mul", "fmul", other)

    def __truediv__(self, other: Any) -> "Lanes":
        return self._do("sdiv", "fdiv", other)

    def __and__(self, other: Any) -> "Lanes":
        return self._of(self._builder.and_(self.value, self.like(other)))

    def __or__(self, other: Any) -> "Lanes":
        return self._of(self._builder.or_(self.value, self.like(other)))

    def __xor__(self, other: Any) -> "Lanes":
        return self._of(self._builder.xor(self.value, self.like(other)))

    def __lshift__(self, other: Any) -> "Lanes":
        return self._of(self._builder.shl(self.value, self.like(other)))

    def __rshift__(self, other: Any) -> "Lanes":
        """Shift to the right, zeros coming in."""
        return self._of(self._builder.lshr(self.value, self.like(other)))

    def above(self, other: Any) -> "Lanes":
        """Say in which lanes signed integers, or floats, are larger; NaN never is."""
        if isinstance(self.one, ir.IntType):
            return self._of(self._builder.icmp_signed(">", self.value, self.like(other)))
        return self._of(self._builder.fcmp_ordered(">", self.value, self.like(other)))

    def below_unsigned(self, other: Any) -> "Lanes":
        """Say in which lanes integers, read as unsigned ones, are less."""
        return self._of(self._builder.icmp_unsigned("<", self.value, self.like(other)))

    def equals(self, other: Any) -> "Lanes":
        """Say in which lanes both are the same number."""
        if isinstance(self.one, ir.IntType):
            return self._of(self._builder.icmp_signed("==", self.value, self.like(other)))
        return self._of(self._builder.fcmp_ordered("==", self.value, self.like(other)))

    def choose(self, yes: Any, no: Any) -> "Lanes":
        """Return lanes of two values of LLVM."""
        return self._of(self._builder.select(self.value, yes, no))

    def least(self, other: Any) -> "Lanes":
        """Return the lesser of signed integers."""
        return self.above(other).choose(self.like(other), self.value)

    def most(self, other: Any) -> "Lanes":
        """Return the larger of signed integers."""
        return self.above(other).choose(self.value, self.like(other))

    def read_as(self, one: Any) -> "Lanes":
        """Return the same bits as lanes of the type `one`, more or fewer of them."""
        bits = {F32: 32, F64: 64}
        old, new = (bits.get(kind) or kind.width for kind in (self.one, one))
        count = self._count * old // new
        kind = ir.VectorType(one, count) if self._count > 1 else one
        return self._of(self._builder.bitcast(self.value, kind))

    def to(self, one: Any) -> "Lanes":
        """Convert numbers: integers to narrower ones or, without sign, wider ones; fp32 to fp64."""
        kind = self._type(one)
        if one is F64:
            return self._of(self._builder.fpext(self.value, kind))
        name = "trunc" if one.width < self.one.width else "zext"
        return self._of(getattr(self._builder, name)(self.value, kind))

    def signed_to(self, one: Any) -> "Lanes":
        """Convert signed integers to wider ones, or to floats."""
        name = "sitofp" if one in (F32, F64) else "sext"
        return self._of(getattr(self._builder, name)(self.value, self._type(one)))

    def truncated_to(self, one: Any) -> "Lanes":
        """Convert floats that are small enough, and numbers, to signed integers, towards zero."""
        return self._of(self._builder.fptosi(self.value, self._type(one)))

    def spread(self, count: int) -> "Lanes":
        """Return one number in `count` lanes."""
        kind, place = ir.VectorType(self.value.type, count), ir.Constant(I32, 0)
        one = self._builder.insert_element(ir.Constant(kind, ir.Undefined), self.value, place)
        mask = ir.Constant(ir.VectorType(I32, count), [0] * count)
        return self._of(self._builder.shuffle_vector(one, one, mask))

    def chosen(self, places: list[int]) -> "Lanes":
        """Return the lanes at `places`."""
        if len(places) == 1:
            return self._of(self._builder.extract_element(self.value, ir.Constant(I32, places[0])))
        mask = ir.Constant(ir.VectorType(I32, len(places)), places)
        return self._of(self._builder.shuffle_vector(self.value, self.value, mask))

    def largest(self) -> "Lanes":
        """Return the largest lane of unsigned integers."""
        name = f"llvm.vector.reduce.umax.v{self._count}i{self.one.width}"
        kind = ir.FunctionType(self.one, [self.value.type])
        reduce = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._of(self._builder.call(reduce, [self.value]))


def where(which: Lanes, yes: "Lanes | float", no: "Lanes | float") -> Lanes:
    """Return lanes of `yes` and `no`, one of which may be a number."""
    known = yes if isinstance(yes, Lanes) else no
    if not isinstance(known, Lanes):
        raise TypeError("one of both says what type it is")
    return which.choose(known.like(yes), known.like(no))


class Memory:
    """An array, read and written at places counted in its elements."""

    def __init__(self, builder: Any, data: Any, size: int) -> None:
        self._builder, self._data, self._size = builder, data, size

    @property
    def one(self) -> Any:
        return self._data.type.pointee

    def _at(self, place: Lanes, kind: Any) -> Any:
        pointer = self._builder.gep(self._data, [place.value])
        return self._builder.bitcast(pointer, ir.PointerType(kind))

    def load(self, place: Lanes, count: int) -> Lanes:
        """Return `count` elements."""
        kind = ir.VectorType(self.one, count) if count > 1 else self.one
        value = self._builder.load(self._at(place, kind))
        value.align = self._size
        return Lanes(self._builder, value)

    def store(self, place: Lanes, lanes: Lanes) -> None:
        """Write elements."""
        store = self._builder.store(lanes.value, self._at(place, lanes.value.type))
        store.align = self._size


def vectors(function: Callable[..., Lanes | None], result: Any = types.void) -> Any:
    """Make a function for loops of one that writes instructions; `result` is its type in numba."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        wrapped = []
        for kind, value in zip(signature.args, values, strict=True):
            if isinstance(kind, types.Array):
                if kind.layout != "C":
                    raise TypeError("vectors lie side by side, this array does not")
                data = context.make_array(kind)(context, builder, value).data
                wrapped.append(Memory(builder, data, kind.dtype.bitwidth // 8))
            else:
                wrapped.append(Lanes(builder, value))
        found = function(*wrapped)
        return context.get_dummy_value() if found is None else found.value

    def typed(_: Any, *arguments: Any) -> Any:
        return result(*arguments), generate

    # numba looks at the names of the arguments, so there must be as many.
    own = inspect.signature(function).parameters
    first = inspect.Parameter("typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typed.__signature__ = inspect.Signature([first, *own.values()])  # pyright: ignore[reportFunctionMemberAccess]
    return intrinsic(typed)
