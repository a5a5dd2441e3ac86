"""Byte-level BPE between text and token ids, on the data path between sources and shards. The `tokenizers` library does
the work; this wrapper fixes what must not vary: id 0 ends every document, and nothing else adds a token.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from moe.data.config import MIN_VOCAB_SIZE
from moe.errors import DataError

END_TOKEN = "<|end|>"
END_ID = 0


class Tokenizer:
    """Text to ids and back, exactly. Byte-level: there is no unknown character and no normalisation.

    There is no start token; the end token is set by `encode_document` alone, once. The characters "<|end|>" inside a
    text are ordinary text: the pre-tokenizer parts letters from punctuation, so no merge can spell the end token.
    """

    def __init__(self, inner: tokenizers.Tokenizer, origin: str = "tokenizer") -> None:
        """Wrap a byte-level BPE; `origin` names it in errors. Raises: DataError when it is not one of ours."""
        self._inner = inner
        # Not part of the file: without it "<|end|>" in a text would become the end token.
        self._inner.encode_special_tokens = True
        self.vocab_size: int = inner.get_vocab_size()
        """Every id is below this. Smaller than asked for when the training text was too short for more merges."""
        self.end_id = END_ID
        self.fingerprint = hashlib.sha256(inner.to_str().encode()).hexdigest()
        """Of the whole definition: equal fingerprints give equal ids."""
        if inner.token_to_id(END_TOKEN) != END_ID or max(inner.get_vocab().values()) != self.vocab_size - 1:
            raise DataError(f"{origin}: id {END_ID} must be {END_TOKEN} and ids must have no gaps; train it again")
        every_byte = "".join(map(chr, range(0x250))) + "\U0001f600"
        if self.decode(self.encode(every_byte)) != every_byte:
            raise DataError(f"{origin}: is not a byte-level tokenizer (text does not survive it); train it again")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read what `save` wrote. Raises: DataError naming the file when it is missing or damaged."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{path} cannot be read as a tokenizer ({error}); delete it, and it is trained again"
            ) from error
        return cls(inner, origin=str(path))

    def save(self, path: Path) -> None:
        """Write the definition as JSON; a reader sees the old file or the new one, never half of one."""
        # Not tempfile, whose files other users of a shared cache could not read.
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            temporary.write_text(self._inner.to_str(), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no end token: for prompts. Raises: DataError when the text is not encodable as UTF-8."""
        _check_encodable(text)
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_document(self, text: str) -> list[int]:
        """Ids of a whole document, closed by exactly one end token."""
        return [*self.encode(text), END_ID]

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Like `encode_document` for each text, in parallel; int64 arrays of at least one id."""
        for text in texts:
            _check_encodable(text)
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, END_ID], dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; end tokens are left out, and bytes that are no UTF-8 (a cut character) become U+FFFD.

        Raises: DataError naming an id outside the vocabulary (the library would drop it without a word).
        """
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} at position {position} is outside the tokenizer's vocabulary "
                    f"(0 … {self.vocab_size - 1}); the ids come from another tokenizer, or from a model whose "
                    "surplus rows were not masked"
                )
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character {error.start}, which "
            "is no character; remove it"
        ) from error


def train_tokenizer(texts: Iterable[str] | Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most `vocab_size` ids: the end token, the 256 bytes, then merges by frequency.

    Deterministic for one version of the library, whatever the number of threads. Texts are split as GPT-2's are
    (letters, digits, punctuation, white space; a leading space belongs to the word).

    Raises: ValueError when `vocab_size` has no room for the bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size ({vocab_size}) must be at least {MIN_VOCAB_SIZE}, the 256 bytes and the end token; "
            "choose 4096"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)
