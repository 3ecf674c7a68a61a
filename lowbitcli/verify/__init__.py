"""Check a checkpoint: its structure, its headers and, against its source, its numbers.

Here are the nouns, which a report is read with too, without a tensor library; `check` and `fix` do
the work.
"""

from lowbitcli.plan.consumers import CONSUMERS, asked
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
    "CONSUMERS",
    "FAIL",
    "WARN",
    "Check",
    "Demands",
    "Figures",
    "Histogram",
    "Kept",
    "Problem",
    "Sample",
    "Summary",
    "Verification",
    "WeightRow",
    "WorstBlock",
    "asked",
]
