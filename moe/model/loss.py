"""The language loss: the end of the token path.

Legend: B rows, S tokens, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

from moe.model.batch import IGNORE_LABEL


def lm_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Σ cross-entropy over labelled tokens, nats, fp32 scalar; exactly 0, with a graph, when no token is labelled.

    logits_BSV: fp32. A sum, because the mean of means over ranks would weigh tokens unequally.
    """
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORE_LABEL, reduction="sum")
