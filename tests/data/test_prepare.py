"""Preparing: built once, opened fast, rebuilt when damaged, one builder at a time, never half a folder."""

import json
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe.data import encode
from moe.data.config import DataConfig
from moe.data.encode import heldout_names
from moe.data.loader import HeldoutData, TrainingData
from moe.data.prepare import PreparedData, cache_root, open_data, prepare_data
from moe.data.sources import SOURCES, Source, read_python_library
from moe.errors import DataError
from moe.model.config import ModelConfig
from tests.data.make import tiny_configs, write_texts


def prepare(folder: Path, cache: Path, **changes: object) -> tuple[PreparedData, list[str]]:
    said: list[str] = []
    data, model = tiny_configs(folder, cache, **changes)
    return prepare_data(data, model, seed=0, progress=said.append), said


def texts_of(prepared: PreparedData) -> list[str]:
    return [
        prepared.tokenizer.decode(shard.document(i).tolist())
        for shard in [*prepared.train, *prepared.heldout.values()]
        for i in range(shard.num_documents)
    ]


def test_every_document_is_trained_on_or_held_out_and_readable_again(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales")
    prepared, said = prepare(folder, tmp_path / "cache")
    assert sorted(texts_of(prepared)) == sorted(path.read_text() for path in folder.iterdir())
    sizes = {size.split: size for size in prepared.sizes}
    assert sizes["train"].documents + sizes["heldout"].documents == 12
    assert sizes["train"].text_bytes + sizes["heldout"].text_bytes == sum(p.stat().st_size for p in folder.iterdir())
    assert sizes["train"].tokens == prepared.train[0].num_tokens
    assert sizes["heldout"].tokens == prepared.heldout["tales"].num_tokens
    assert sizes["train"].bytes_per_token == sizes["train"].text_bytes / sizes["train"].tokens
    assert any("tokenizer of 300 ids learned from 0.0 MB" in line for line in said)
    assert f"data: tales: {sizes['train'].documents} documents" in said[-1]


def test_document_ends_in_one_end_token(tmp_path: Path) -> None:
    """A40: in the shards too."""
    prepared, _ = prepare(write_texts(tmp_path / "tales"), tmp_path / "cache")
    for shard in [*prepared.train, *prepared.heldout.values()]:
        for i in range(shard.num_documents):
            assert shard.document(i).tolist().count(prepared.tokenizer.end_id) == 1
            assert shard.document(i)[-1] == prepared.tokenizer.end_id


def test_heldout_text_is_unknown_to_training_and_tokenizer(tmp_path: Path) -> None:
    """The word of a held-out document alone would be one token, had the tokenizer learned from it."""
    folder = write_texts(tmp_path / "tales")
    kept = heldout_names([path.name for path in folder.iterdir()], 0.2)
    for name in kept:
        (folder / name).write_text("quixotic " * 200)
    prepared, _ = prepare(folder, tmp_path / "cache")
    assert len(prepared.tokenizer.encode(" quixotic")) > 4
    trained = [prepared.tokenizer.decode(prepared.train[0].tokens.tolist())]
    assert "quixotic" not in trained[0]


def test_second_time_opens_the_same_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_texts(tmp_path / "tales")
    first, _ = prepare(folder, tmp_path / "cache")
    monkeypatch.setattr("moe.data.prepare._build", lambda *args: pytest.fail("built again"))
    second, said = prepare(folder, tmp_path / "cache")
    data, model = tiny_configs(folder, tmp_path / "cache")
    third = open_data(data, model, seed=0)
    assert first.fingerprint == second.fingerprint == third.fingerprint
    assert first.sizes == second.sizes == third.sizes
    assert len(said) == 1
    assert json.loads(json.dumps(first.fingerprint)) == first.fingerprint


def test_fingerprint_changes_with_what_decides_the_samples(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales")
    data, model = tiny_configs(folder, tmp_path / "cache")
    prints = [
        prepare(folder, tmp_path / "cache", **c)[0].fingerprint for c in ({}, {"seq_len": 8}, {"heldout_fraction": 0.5})
    ]
    prints.append(open_data(data, model, seed=1).fingerprint)
    (folder / "text-00.txt").write_text("another beginning")
    prints.append(prepare(folder, tmp_path / "cache")[0].fingerprint)
    assert len({json.dumps(fingerprint) for fingerprint in prints}) == len(prints)


def test_other_caches_give_the_same_tokens(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales")
    first, second = (prepare(folder, tmp_path / name)[0] for name in ("one", "two"))
    assert first.fingerprint == second.fingerprint


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def valid_but_other(path: Path) -> None:
    content = json.loads(path.read_text())
    first, second = content["model"]["merges"][-2:]
    content["model"]["merges"][-2:] = [second, first]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("tales.train.bin", cut),
        ("tales.train.bin", flip),
        ("tales.train.bin", Path.unlink),
        ("tales.heldout.idx", cut),
        ("tokenizer.json", cut),
        ("tokenizer.json", valid_but_other),
        ("manifest.json", cut),
        ("manifest.json", Path.unlink),
    ],
)
def test_damaged_cache_is_built_again_with_a_word(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    folder, cache = write_texts(tmp_path / "tales"), tmp_path / "cache"
    good, _ = prepare(folder, cache)
    harm(good.folder / name)
    mended, said = prepare(folder, cache)
    assert "the cache is damaged and is built again" in said[0]
    assert name in said[0] or name.removesuffix(".json") in said[0]
    assert mended.fingerprint == good.fingerprint
    assert prepare(folder, cache)[1] == [said[-1]]
    assert {path.name for path in cache.iterdir()} == {good.folder.name, f"{good.folder.name}.lock"}


def test_opening_before_preparing_or_after_a_change_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales")
    data, model = tiny_configs(folder, tmp_path / "cache")
    with pytest.raises(DataError, match=r"does not exist: the data was not prepared on this machine"):
        open_data(data, model, seed=0)
    prepare(folder, tmp_path / "cache")
    (folder / "text-00.txt").write_text("changed")
    with pytest.raises(DataError, match="or they changed since; call prepare_data"):
        open_data(data, model, seed=0)


def prepare_on_rank(folder: str, cache: str) -> tuple[str, list[str]]:
    prepared, said = prepare(Path(folder), Path(cache))
    return json.dumps(prepared.fingerprint), said


def test_processes_that_prepare_at_once_agree(process_pool: Callable[[int], object], tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales", count=40)
    results = process_pool(2).run(prepare_on_rank, str(folder), str(tmp_path / "cache"))  # type: ignore[attr-defined]
    assert results[0][0] == results[1][0]
    builders = [said for _, said in results if any("learned from" in line for line in said)]
    assert len(builders) == 1


def test_file_system_without_locks_is_said_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    prepared, said = prepare(write_texts(tmp_path / "tales"), tmp_path / "cache")
    assert "has no file locks" in said[0]
    assert prepared.train[0].num_documents > 0


def test_other_users_of_a_shared_cache_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        prepared, _ = prepare(write_texts(tmp_path / "tales"), tmp_path / "cache")
    finally:
        os.umask(before)
    assert prepared.folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in prepared.folder.iterdir()} == {0o644}


def test_what_a_killed_build_left_is_swept_away_after_a_day(tmp_path: Path) -> None:
    folder, cache = write_texts(tmp_path / "tales"), tmp_path / "cache"
    first, _ = prepare(folder, cache)
    for name, age in (("old", 2 * 24 * 3600), ("young", 60)):
        left = cache / f"{first.folder.name}.{name}.tmp"
        left.mkdir()
        os.utime(left, (time.time() - age,) * 2)
    cut(first.folder / "manifest.json")
    prepare(folder, cache)
    assert [path.name.split(".")[1] for path in cache.glob("*.tmp")] == ["young"]


def test_failed_build_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = write_texts(tmp_path / "tales"), tmp_path / "cache"

    def full(self: object, name: str, ids: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moe.data.shards.ShardWriter.add", full)
        with pytest.raises(DataError, match=r"data\.cache_dir .* cannot be used: No space left.* that has room"):
            prepare(folder, cache)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    prepare(folder, cache)


def test_text_that_changes_while_being_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_texts(tmp_path / "tales")
    learn = encode.learn_tokenizer

    def learn_then_change(*args: object) -> object:
        tokenizer = learn(*args)  # type: ignore[arg-type]
        (folder / "text-03.txt").write_text("other")
        return tokenizer

    monkeypatch.setattr("moe.data.prepare.learn_tokenizer", learn_then_change)
    with pytest.raises(DataError, match="tales changed while it was being read"):
        prepare(folder, tmp_path / "cache")


def test_cache_that_cannot_be_written_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache_dir \(.*file/cache\) cannot be used: .*set data\.cache_dir"):
        prepare(write_texts(tmp_path / "tales"), tmp_path / "file" / "cache")


def test_domain_without_text_or_with_one_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "blank.txt").write_text(" \n")
    (tmp_path / "void" / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"void \(text of .*\) has no text; left out: latin\.txt: not UTF-8"):
        prepare(tmp_path / "void", tmp_path / "cache")
    with pytest.raises(DataError, match=r"tales: a domain needs at least two documents, .* has 1 \(text-00\.txt\)"):
        prepare(write_texts(tmp_path / "tales", count=1), tmp_path / "cache")


def test_skipped_files_are_reported(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "tales")
    for number in range(4):
        (folder / f"latin-{number}.txt").write_bytes(b"\xe9")
    _, said = prepare(folder, tmp_path / "cache")
    assert said[0].startswith("data: tales: 4 files left out (latin-0.txt: not UTF-8; latin-1.txt: not UTF-8;")
    assert said[0].endswith(" …)")


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_heldout_share_outside_its_range_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(ValueError, match=r"data\.heldout_fraction \(.*\) must lie between 0 and 1"):
        prepare(write_texts(tmp_path / "tales"), tmp_path / "cache", heldout_fraction=fraction)


def test_split_follows_the_name_and_keeps_both_sides() -> None:
    names = [f"{number}.txt" for number in range(1000)]
    kept = heldout_names(names, 0.1)
    assert 60 < len(kept) < 140
    assert heldout_names(names[::-1], 0.1) == kept
    assert heldout_names(names[:500], 0.1) == {name for name in kept if int(name[:-4]) < 500}
    assert kept < heldout_names(names, 0.2)
    for fraction in (1e-9, 1 - 1e-9):
        assert len(heldout_names(["a", "b"], fraction)) == 1


def test_tokenizer_learns_from_a_fair_share_of_much_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two domains, one giant document: learned from at most 2,000 bytes, in proportion, and said so."""
    monkeypatch.setattr("moe.data.encode.TOKENIZER_TRAINING_BYTES", 2000)
    write_texts(tmp_path / "large", count=30)
    (tmp_path / "large" / "giant.txt").write_text("gïgantic " * 2000)
    write_texts(tmp_path / "small", count=5)
    sources = [f"text:{tmp_path}/large", f"text:{tmp_path}/small"]
    prepared, said = prepare(tmp_path, tmp_path / "cache", sources=sources)
    assert any("learned from 0.0 of 0.0 MB (a fair sample)" in line for line in said)
    assert list(prepared.heldout) == ["large", "small"]
    surveys = encode.survey_sources(tiny_configs(tmp_path, tmp_path, sources=sources)[0])
    shares = encode._tokenizer_shares(surveys, {"large": set(), "small": set()})
    assert 1990 < sum(sum(share.values()) for share in shares.values()) <= 2000
    assert sum(shares["small"].values()) > 50


def test_small_vocabulary_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "tales"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("ab")
    prepared, said = prepare(folder, tmp_path / "cache")
    assert prepared.tokenizer.vocab_size == 258
    assert any("the text gives only 258 of model.vocab_size = 300 ids" in line for line in said)


def test_cache_is_the_users_cache_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(DataConfig()) == tmp_path / "switchyard" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root(DataConfig()) == tmp_path / ".cache" / "switchyard" / "data"
    assert cache_root(DataConfig(cache_dir="~/x")) == tmp_path / "x"


def test_real_text_goes_all_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's json and email packages and the pydoc topics, a vocabulary of 1,024: text in, batches out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    source = Source(
        domain="stdlib",
        description="a part of the library",
        documents=lambda skipped: (
            document
            for document in read_python_library(library, skipped)
            if document.name.startswith(("json/", "email/"))
        ),
    )
    monkeypatch.setitem(SOURCES, "stdlib", source)
    data, model = DataConfig(cache_dir=str(tmp_path), seq_len=64), ModelConfig(vocab_size=1024)
    prepared = prepare_data(data, model, seed=0, progress=lambda line: None)
    started = time.perf_counter()
    prepare_data(data, model, seed=0, progress=lambda line: None)
    assert time.perf_counter() - started < 5  # generous: a loaded machine; the figure is in README.md
    assert prepared.tokenizer.vocab_size == 1024
    assert 2 < prepared.sizes[0].bytes_per_token < 5
    batch = TrainingData(prepared.train, 64, 0, 1024).batch(0, 8)
    assert int(batch.input_ids_BS.max()) < 1024
    heldout = HeldoutData(prepared.heldout, 64, 1024)
    assert heldout.domains == ["stdlib", "topics"]
    assert all(heldout.num_samples(domain) > 0 for domain in heldout.domains)
