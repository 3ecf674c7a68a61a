"""How much each input channel of a model counts, measured without data."""

from lowbitcli.importance.measure import Measured, measure

__all__ = ["Measured", "measure"]
