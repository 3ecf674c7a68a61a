"""lowbit: turn safetensors checkpoints into low-bit ones, back again, and say what was lost."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lowbit")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
