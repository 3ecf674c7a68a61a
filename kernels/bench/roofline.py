"""How a kernel is timed here, and against what: the copy bandwidth of the same card in the same
run.

A figure is the bytes that the operation cannot do without (each input read once, each output
written once) over its GPU time, as a share of what a device-to-device copy reaches (read + write).
GPU time comes from replaying a CUDA graph, so that launches cost nothing; buffers rotate through
more than twice the L2, so that no replay finds its input there.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

L2_ROTATION = (
    160 << 20
)  # bytes of input that a set of buffers has at least: beyond twice 60 MB of L2
ROUNDS = 20
CYCLES = 2_000_000_000  # of the GPU's clock in a second, or somewhat fewer
WARM_MS = 50  # of replays before any is timed: clocks take that long to rise


@dataclass(frozen=True)
class Contender:
    """One way of doing an operation: `prepare(w)` returns the call that is timed. `queued`: it
    copies from the host, which a graph cannot hold.
    """

    name: str
    prepare: Callable[[torch.Tensor], Callable[[], object]]
    queued: bool = False


@dataclass(frozen=True)
class Operation:
    """What is measured: contenders for the same result, and the bytes it takes at least.

    `minimal(w)` counts each input and output once, `moved(w)` what any implementation of two passes
    has to move; `check` raises where the contender that is ours is wrong. `shapes` are the only
    ones it is measured at.
    """

    name: str
    minimal: Callable[[torch.Tensor], float]
    contenders: Sequence[Contender]
    moved: Callable[[torch.Tensor], float] | None = None
    check: Callable[[torch.Tensor], None] | None = None
    dtype: torch.dtype = torch.bfloat16
    shapes: Sequence[str] = ()


@dataclass
class Row:
    operation: str
    contender: str
    shape: str
    milliseconds: float = 0.0
    share: float = 0.0
    share_moved: float | None = None
    problem: str = ""
    extra: dict = field(default_factory=dict)


def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median GPU time of one call, over replays of a graph that makes all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begun = time.perf_counter()
    while (time.perf_counter() - begun) * 1e3 < WARM_MS:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / len(calls))
    del graph
    return statistics.median(times)


def milliseconds_queued(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median GPU time of one call, all of them launched while the GPU is kept busy."""
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for call in calls:
            call()
        seconds = time.perf_counter() - begun
    times: list[float] = []
    for _ in range(2 * ROUNDS):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((4 * seconds + 0.02) * CYCLES))
        start.record()
        for call in calls:
            call()
        stop.record()
        idle = start.query()  # before all was launched: some call waited for the GPU
        torch.cuda.synchronize()
        if not idle:
            times.append(start.elapsed_time(stop) / len(calls))
        if len(times) == ROUNDS // 2:
            return statistics.median(times)
    raise RuntimeError("the GPU was idle before all calls were launched")


def copy_bandwidth() -> float:
    """Return GB/s of a device-to-device copy of 4 GiB, bytes read and written.

    Timed outside a graph: there a copy becomes a node that the copy engines do, at two thirds of
    it.
    """
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    size = 2 * source.numel() * source.element_size()
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return size / statistics.median(times) / 1e6


def random_weight(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * 0.02).to(dtype)


def measure(
    operation: Operation, shape: Sequence[int], bandwidth: float, alone: bool = False
) -> list[Row]:
    """Check, then time every contender of an operation on weights of one shape, or `alone` ours."""
    size = torch.empty(0, dtype=operation.dtype).element_size()
    for dimension in shape:
        size *= dimension
    count = max(1, min(16, -(-L2_ROTATION // size)))
    weights = [random_weight(shape, operation.dtype, seed) for seed in range(count)]
    if operation.check is not None:
        operation.check(weights[0])
    rows = []
    for contender in operation.contenders:
        if alone and not contender.name.startswith("lowbit"):
            continue
        row = Row(operation.name, contender.name, "x".join(map(str, shape)))
        try:
            calls = [contender.prepare(w) for w in weights]
            row.milliseconds = (milliseconds_queued if contender.queued else milliseconds)(calls)
            rate = bandwidth * row.milliseconds * 1e6
            row.share = operation.minimal(weights[0]) / rate
            if operation.moved is not None:
                row.share_moved = operation.moved(weights[0]) / rate
        except Exception as error:  # a peer that fails is a row, not the end of the bench
            if contender.name == "lowbit":
                raise
            row.problem = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        rows.append(row)
    return rows
