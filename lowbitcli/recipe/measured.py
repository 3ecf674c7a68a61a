"""What a recipe that was chosen by measured error says of the choice: `measured:`, which decides
nothing, and goes into manifests, so that `verify` can show it.

    measured:
      curve: [[4.5, 20.47], [6.1, 24.9], [8.25, 31.5]]
      uniform: {nvfp4: [4.5, 20.47], mxfp8: [8.25, 31.5]}
      chosen: [5.0, 22.1]

Each place is bits for each weight that can be quantized, and the SQNR of the mean over all matrices
in dB. `curve` has the least error for so many bits, `uniform` what one scheme for all comes to.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat

_Number = Annotated[StrictFloat, Field(allow_inf_nan=False)]
Place = tuple[_Number, _Number]


class Measured(BaseModel):
    """Error against bits, and where on it a recipe is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    curve: tuple[Place, ...] = Field(max_length=1000)
    uniform: dict[str, Place] = Field(default_factory=dict, max_length=100)
    chosen: Place | None = None

    def document(self) -> dict[str, Any]:
        """Return this as a manifest has it."""
        return self.model_dump(mode="json", exclude_none=True)
