"""Check a checkpoint: its structure, its headers and, against its source, its numbers."""

from lowbitcli.plan.consumers import CONSUMERS, asked
from lowbitcli.verify.bound import BF16_WRITER, FP32_WRITER
from lowbitcli.verify.check import unreadable, verify
from lowbitcli.verify.fix import Fixed, fix
from lowbitcli.verify.limits import Demands
from lowbitcli.verify.nouns import (
    FAIL,
    WARN,
    Check,
    Figures,
    Histogram,
    Kept,
    Problem,
    Summary,
    Verification,
    WeightRow,
    WorstBlock,
)
from lowbitcli.verify.sample import Sample

__all__ = [
    "BF16_WRITER",
    "CONSUMERS",
    "FAIL",
    "FP32_WRITER",
    "WARN",
    "Check",
    "Demands",
    "Figures",
    "Fixed",
    "Histogram",
    "Kept",
    "Problem",
    "Sample",
    "Summary",
    "Verification",
    "WeightRow",
    "WorstBlock",
    "asked",
    "fix",
    "unreadable",
    "verify",
]
