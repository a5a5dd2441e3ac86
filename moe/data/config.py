"""Where text comes from and how it is cut. Torch-free."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Text to packed samples."""

    sources: list[str] = field(default_factory=lambda: ["stdlib", "topics"])
    """Tagged domains, each a source known to moe/data/sources.py: stdlib (Python's own library, tests left out), topics
    (English reference prose of pydoc)."""
    seq_len: int = 256
    """Tokens per sample."""
    heldout_fraction: float = 0.03
    """Share of each domain's documents kept for evaluation, chosen by a hash of the document's name."""
    cache_dir: str | None = None
    """Tokenizer and token shards are kept here; the user's cache folder when null."""
