"""Tokenizer: exact round trip, one end token, determinism, refusal of foreign files and ids."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.tokenizer import END_ID, END_TOKEN, Tokenizer, train_tokenizer
from moe.errors import DataError
from tests.data.make import WORDS

TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@given(text=st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_document(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode_documents([text])[0].tolist()


@given(text=st.lists(st.sampled_from([*END_TOKEN, " ", "a", END_TOKEN])).map("".join))
@settings(max_examples=300, deadline=None)
def test_document_has_exactly_one_end_token(tokenizer: Tokenizer, text: str) -> None:
    """A40: the end token's own characters inside a text stay text, and nothing adds a second one or a start token."""
    ids = tokenizer.encode_document(text)
    assert ids.count(END_ID) == 1
    assert ids[-1] == END_ID
    assert END_ID not in tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_end_token_cannot_be_learned_from_text() -> None:
    """A40: however often "<|end|>" is in the training text, no merge spells it."""
    tokenizer = train_tokenizer([f"a{END_TOKEN}b {END_TOKEN}\n" * 500], 400)
    assert END_ID not in tokenizer.encode(f"{END_TOKEN} {END_TOKEN}{END_TOKEN}")


def test_common_words_are_one_token_and_bytes_are_always_there(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode("switchyard of the trains")) < len("switchyard of the trains") / 2
    assert len(train_tokenizer(["ab"], 257).encode("zwölf")) == 6


def test_training_is_deterministic() -> None:
    first, second = (train_tokenizer(TEXTS * 50, 300) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert train_tokenizer(TEXTS, 290).fingerprint != first.fingerprint


def test_short_text_gives_a_smaller_vocabulary() -> None:
    assert train_tokenizer(["ab"], 4096).vocab_size == 258


def test_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size \(256\) must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A40: the rule about the end token's characters is not in the file, so loading must set it again."""
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(f"trains {END_TOKEN}") == tokenizer.encode(f"trains {END_TOKEN}")
    assert END_ID not in loaded.encode(f"trains {END_TOKEN}")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("damage", ["missing", "cut", "not json", "no bytes", "end elsewhere"])
def test_damaged_file_is_refused_by_name(tokenizer: Tokenizer, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    content = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_text(path.read_text()[:-100])
    elif damage == "not json":
        path.write_bytes(b"\x00\xff" * 50)
    elif damage == "no bytes":
        content["pre_tokenizer"] = {"type": "Whitespace"}
        path.write_text(json.dumps(content))
    else:
        content["added_tokens"], vocab = [], content["model"]["vocab"]
        del vocab[END_TOKEN]
        path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("token_id", [300, -1, 10**9])
def test_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(DataError, match=rf"token id {token_id} at position 2 is outside .* \(0 … 299\)"):
        tokenizer.decode([1, 2, token_id])


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"\\ud800\) at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode_documents(["good", "\udfff"])


def test_cut_character_is_shown_as_replacement(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("ö")[:1]) == "\ufffd"
