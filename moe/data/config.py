"""Where text comes from and how it is cut. Torch-free."""

from dataclasses import dataclass, field

MIN_VOCAB_SIZE = 257
"""Smallest model.vocab_size that data can be made for: the 256 bytes and the end token."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Text to packed samples."""

    sources: list[str] = field(default_factory=lambda: ["stdlib", "topics"])
    """Tagged domains, each a source known to moe/data/sources.py: stdlib (Python's own library, tests left out), topics
    (English reference prose of pydoc), text:PATH (your own .txt, .md, .py or .jsonl file, or a folder of them)."""
    seq_len: int = 256
    """Tokens per sample."""
    heldout_fraction: float = 0.03
    """Share of each domain's documents kept for evaluation, chosen by a hash of the document's name; above 0, below 1.
    At least one document of each domain is kept and at least one is trained on."""
    cache_dir: str | None = None
    """Tokenizer and token shards are kept here; the user's cache folder when null. Safe to delete between runs."""
