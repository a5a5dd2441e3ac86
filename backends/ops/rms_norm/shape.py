"""The size on which an implementation of rms_norm may decide whether it can run."""

from typing import NamedTuple


class NormShape(NamedTuple):
    """Width that is normalised; the number of rows never decides."""

    width: int
