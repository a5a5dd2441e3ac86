"""Sources: which files become documents, and how a wrong source is refused."""

import json
import sysconfig
from pathlib import Path

import pytest

from moe.data.sources import SOURCES, Document, open_source, open_sources, read_python_library, source_problem
from moe.errors import DataError


def read(spec: str) -> tuple[list[Document], list[str]]:
    skipped: list[str] = []
    return list(open_source(spec).documents(skipped)), skipped


def test_python_library_leaves_out_tests_packages_and_what_another_source_has(tmp_path: Path) -> None:
    kept = ["abc.py", "json/decoder.py", "unittest/case.py"]
    left_out = [
        "test/test_abc.py", "json/tests/a.py", "idlelib/idle_test/b.py", "lib2to3/tests/c.py", "site-packages/d.py",
        "__pycache__/e.py", "pydoc_data/topics.py", "_sysconfigdata__linux.py", "config-3.11/python-config.py",
        "abc.pyc", ".hidden/f.py",
    ]  # fmt: skip
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfy = 2\n")

    skipped: list[str] = []
    documents = list(read_python_library(tmp_path, skipped))

    assert [document.name for document in documents] == [*kept[:2], "marked.py", kept[2]]
    assert documents[2].text == "y = 2\n"
    assert skipped == ["latin.py: not UTF-8"]


def test_standard_library_is_there_without_tests_and_sorted() -> None:
    skipped: list[str] = []
    names = [document.name for document in SOURCES["stdlib"].documents(skipped)]
    assert names == sorted(names)
    assert len(names) == len(set(names)) > 300
    assert "argparse.py" in names
    assert not [name for name in names if "test" in name.split("/")[:-1] or "tests" in name.split("/")[:-1]]


def test_zipped_library_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"python311\.zip is not a folder.*use topics or text:PATH"):
        list(read_python_library(tmp_path / "python311.zip", []))


def test_topics_are_english_prose() -> None:
    documents, skipped = read("topics")
    assert not skipped
    assert len(documents) > 50
    assert all(document.text.strip() for document in documents)


def test_topics_are_not_in_the_library_too() -> None:
    assert (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").exists()
    assert "pydoc_data/topics.py" not in [document.name for document in SOURCES["stdlib"].documents([])]


def test_folder_gives_its_text_files_by_name_and_jsonl_by_line(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "deep" / "c.md").write_text("c")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    lines = [json.dumps({"text": "first", "id": 1}), "", json.dumps({"text": " "}), json.dumps({"text": "zwölf"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    documents, skipped = read(f"text:{tmp_path}")

    assert documents == [("a.jsonl:1", "first"), ("a.jsonl:4", "zwölf"), ("b.txt", "b"), ("deep/c.md", "c")]
    assert skipped == ["latin.txt: not UTF-8"]


def test_domain_is_the_name_of_the_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "my novels").mkdir()
    (tmp_path / "book.txt").write_text("b")
    assert open_source(f"text:{tmp_path}/my novels").domain == "my_novels"
    assert open_source(f"text:{tmp_path}/book.txt").domain == "book"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "cut', "is not JSON"),
        ('["text"]', "has list"),
        ('{"body": "x"}', r"has keys \['body'\]"),
        ('{"text": 3}', r"has keys \['text'\]"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_wrong_line_of_a_jsonl_is_named(tmp_path: Path, line: str, found: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2 .*{found}.*mend or remove the line"):
        read(f"text:{path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("stdlb", r"stdlb is no known source; did you mean stdlib\? Known: stdlib, topics, text:PATH"),
        ("novels", r"novels is no known source; Known: stdlib"),
        ("text:", r"text: does not exist"),
        ("text:/no/such/place", r"text:/no/such/place does not exist; give a \.txt, \.md, \.py, \.jsonl file"),
    ],
)
def test_unknown_source_is_refused_with_the_nearest_name(spec: str, message: str) -> None:
    problem = source_problem(spec)
    assert problem is not None
    with pytest.raises(DataError, match=message):
        open_source(spec)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"a\.pdf must end in one of \.txt"):
        open_source(f"text:{tmp_path}/a.pdf")


def test_no_source_and_twice_the_same_domain_are_refused(tmp_path: Path) -> None:
    (tmp_path / "topics").mkdir()
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        open_sources([])
    with pytest.raises(DataError, match=r"topics and text:.* would both be the domain topics"):
        open_sources(["topics", f"text:{tmp_path}/topics"])


def test_known_sources_have_no_problem(tmp_path: Path) -> None:
    assert [source_problem(spec) for spec in ("stdlib", "topics", f"text:{tmp_path}")] == [None, None, None]
