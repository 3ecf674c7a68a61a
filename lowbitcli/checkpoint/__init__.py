"""Bytes of safetensors files: headers, reading, writing, and the proof of what was written."""

from lowbitcli.checkpoint.header import Entry, Header
from lowbitcli.checkpoint.reader import Checkpoint, StoredTensor
from lowbitcli.checkpoint.writer import StagedOutput

__all__ = ["Checkpoint", "Entry", "Header", "StagedOutput", "StoredTensor"]
