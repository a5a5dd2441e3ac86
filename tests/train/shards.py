"""A token shard for tests: documents of known lengths, ids a fixed function of place."""

from pathlib import Path

import numpy as np

from moe.data.shards import ShardWriter, TokenShard


def tiny_shards(folder: Path, vocab_size: int, num_documents: int = 40) -> TokenShard:
    """Open, and write first if need be, a shard of documents of 5 to 60 tokens, each ending with id 0."""
    import torch.distributed as dist

    if dist.get_rank() == 0 and not (folder / "tiny.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.Generator(np.random.PCG64(7))
        with ShardWriter(folder / "tiny", vocab_size) as writer:
            for number in range(num_documents):
                ids = generator.integers(1, vocab_size, int(generator.integers(5, 60)))
                ids[-1] = 0
                writer.add(f"document {number}", ids)
    dist.barrier()
    return TokenShard(folder / "tiny")
