"""Choose a mixed precision by measuring: the least error that a budget of bits allows.

What is decided together is in `units`, what is measured in `measure`, the choice in `knapsack`.
"""

from lowbitcli.search.candidates import KEEP, USUAL
from lowbitcli.search.measure import Allowed
from lowbitcli.search.nouns import Found, Wanted
from lowbitcli.search.search import choose

__all__ = ["KEEP", "USUAL", "Allowed", "Found", "Wanted", "choose"]
