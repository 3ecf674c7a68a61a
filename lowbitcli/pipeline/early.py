"""A head start: what takes long and needs no tensor library, while one is being imported.

| thread | does | takes on an H200 machine |
|---|---|---|
| source | asks the system to read the weights | as long as the disk |
| context | the first GPU's primary context, through the driver | 0.3 to 0.5 s |
| compiler | Triton's checksum of itself, which it takes before the first kernel | 0.3 to 0.5 s |

The collector of cycles stands still meanwhile: it finds nothing in modules that are being imported,
and took a sixth of their time. Whatever fails here is left for who needs it to say.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import threading
from collections.abc import Callable, Iterator

from lowbitcli.checkpoint.ahead import read_ahead
from lowbitcli.pipeline import stop

_DRIVER = "libcuda.so.1"
_threads: list[threading.Thread] = []


def begin(source: str | os.PathLike[str], device: str) -> None:
    """Begin, in the background, what a run of `source` on what `device` means will need."""
    read_ahead(source)
    if device == "auto" or device.startswith("cuda"):
        index = device.partition(":")[2]
        _begin(_context, int(index) if index.isdecimal() else 0)
        _begin(_compiler)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Collect no cycles in this `with`, which imports much, and let a signal wait for its end.

    An exception raised where a library's own code calls Python while it is being loaded may end the
    process by SIGABRT; a second signal does not wait.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with stop.Later():
            yield
    finally:
        gc.freeze()  # modules stay: no later collection looks at them again
        if collected:
            gc.enable()


def wait() -> None:
    """Wait for what was begun."""
    while _threads:
        _threads.pop().join()


def _begin(work: Callable[..., None], *arguments: int) -> None:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    _threads.append(thread)


def _context(index: int) -> None:
    """Make the primary context of a GPU, the one that torch will use; every call lets go of the
    interpreter's lock."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL(_DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _compiler() -> None:
    """Let Triton take its checksum, which is of hundreds of megabytes."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(_DRIVER)  # without a GPU nothing will be compiled
        importlib.import_module("triton.runtime.cache").triton_key()
