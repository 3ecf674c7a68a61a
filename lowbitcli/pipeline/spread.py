"""Over what a run is spread: this process's threads, processes of this machine, a cluster, shares.

| asked for | who does the jobs |
|---|---|
| `--device D` | this process, on D |
| `--devices D,E` | a process for each; this one hands out, writes down and publishes |
| `--cluster local`, `auto`, `ray://...` | tasks of Ray; this process does as above |
| `--num-shards N` | the above, for the N-th part of the jobs; other machines do the others |
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lowbitcli.errors import UsageError
from lowbitcli.pipeline import cluster
from lowbitcli.pipeline.arithmetic import device_of
from lowbitcli.pipeline.processes import Processes
from lowbitcli.pipeline.run import Engine
from lowbitcli.pipeline.shares import Share, share_of

ALL = "all"


@dataclass(frozen=True)
class Spread:
    """What was asked for, in the words of the command line."""

    devices: str | None = None
    cluster: str | None = None
    shard_index: int | None = None
    num_shards: int | str | None = None

    def share(self, environment: Mapping[str, str] = os.environ) -> Share | None:
        """Return the share that this run does, None where it does all."""
        number = None if self.num_shards is None else str(self.num_shards)
        return share_of(self.shard_index, number, environment)

    @contextmanager
    def opened(self, device: str) -> Iterator[tuple[torch.device, Engine | None]]:
        """Open what does the jobs: a device of this process, or an engine and the CPU beside it.

        Raises:
            UsageError: what is asked for excludes each other, or is not installed.
            DeviceError: there is no such device.
        """
        if self.devices is not None and (self.cluster is not None or device != "auto"):
            other = "--cluster" if self.cluster is not None else "--device"
            raise UsageError(f"{other} and --devices exclude each other", hint="leave one out")
        if self.cluster is not None:
            with cluster.connected(self.cluster, device) as engine:
                yield torch.device("cpu"), engine
        elif self.devices is not None:
            yield torch.device("cpu"), Processes(named(self.devices))
        else:
            yield device_of(device), None


def named(devices: str) -> list[str]:
    """Return the devices in `cuda:0,cuda:1`, or all GPUs for `all`.

    Raises:
        UsageError: one is not the name of a device.
        DeviceError: there is none such.
    """
    if devices.strip() == ALL:
        device_of("cuda")
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    found = [name.strip() for name in devices.split(",")]
    if "auto" in found or "" in found:
        raise UsageError(f"{devices!r} names no devices", hint="--devices cuda:0,cuda:1, or all")
    for name in found:
        device_of(name)
    return found
