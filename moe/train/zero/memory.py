"""What masters and moments weigh on one rank (docs/deepspeed.md has the table). Torch-free."""

from moe.train.config import DType

MOMENT_BYTES, MASTER_BYTES = 8, 4
"""Per parameter: two fp32 moments; one fp32 master."""


def optimizer_state_bytes(
    *, dense: int, experts: int, zero_stage: int, dtype: DType, num_ranks: int, num_copies: int
) -> float:
    """Bytes of AdamW's masters and moments on one rank, padding left out.

    dense: parameters that all ranks share; experts: those of this rank's experts; num_copies: ranks that hold the same
    experts. At stage 0 an fp32 weight is its own master; the partitions of stages 1 to 3 are copies in either dtype.
    """
    if zero_stage == 0:
        each = MOMENT_BYTES + (MASTER_BYTES if dtype is DType.bf16 else 0)
        return float(each * (dense + experts))
    return (MOMENT_BYTES + MASTER_BYTES) * (dense / num_ranks + experts / num_copies)
