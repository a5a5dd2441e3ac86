"""One micro-batch, as the model takes it: on the data path, between packing and the embedding."""

from typing import NamedTuple

from torch import Tensor

IGNORE_LABEL = -100
"""Label of a position that has no target; it enters neither the loss nor its normaliser."""
PADDING_DOCUMENT = -1
"""Document id of padding; such a token is not routed, not counted, and attended by itself alone."""


class TokenBatch(NamedTuple):
    """B rows of S tokens, all int64. Tensors only, so that it passes through any engine."""

    input_ids_BS: Tensor
    labels_BS: Tensor
    """Next token of the same document, or IGNORE_LABEL."""
    positions_BS: Tensor
    """Position inside the document: 0 at each document's first token."""
    document_ids_BS: Tensor
    """Which document of the row a token belongs to (0, 1, …), or PADDING_DOCUMENT. Attention stays inside."""
