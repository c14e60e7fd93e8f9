"""Which files count, which are held out, and what names the corpus."""

import pytest

from simulations.train_pair.corpus import (
    Document,
    boundaries,
    fingerprint,
    held_out,
    is_held_out,
    read_corpus,
    training,
)


def test_split_is_stable():
    """Frozen choices: a change of hash or share would mix training and held-out text."""
    assert [i for i in range(100) if is_held_out(f"pkg/m{i}.py")] == [8, 49, 53, 88, 94]
    names = ["bisect.py", "ftplib.py", "queue.py", "pickle.py", "struct.py", "heapq.py"]
    assert [n for n in names if is_held_out(n)] == ["ftplib.py", "pickle.py", "struct.py"]


def test_about_five_percent_is_held_out():
    share = sum(is_held_out(f"a/b{i}.py") for i in range(20_000)) / 20_000
    assert 0.045 < share < 0.055


def test_adding_a_file_moves_no_other(tmp_path, corpus_folder):
    before = {d.path: is_held_out(d.path) for d in read_corpus(corpus_folder)}
    for path in before:
        (tmp_path / path).write_text((corpus_folder / path).read_text())
    (tmp_path / "another.py").write_text("x = 1\n")
    after = {d.path: is_held_out(d.path) for d in read_corpus(tmp_path)}
    assert {k: after[k] for k in before} == before


def test_tests_packages_tables_and_undecodable_files_are_left_out(tmp_path, corpus_folder):
    for path in corpus_folder.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    skipped = ["test/a.py", "x/tests/a.py", "site-packages/a.py", "idlelib/idle_test/a.py"]
    for name in [*skipped, "kept/a.py", "_sysconfigdata_linux.py", "latin.py", "table.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "table.py").write_text('"""Codec generated from X with gencodec.py."""\n')
    found = {d.path for d in read_corpus(tmp_path)}
    assert found - {p.name for p in corpus_folder.glob("*.py")} == {"kept/a.py"}


def test_parts_cover_the_corpus_once(corpus_folder):
    documents = read_corpus(corpus_folder)
    assert len(documents) == 80
    paths = [d.path for d in training(documents)] + [d.path for d in held_out(documents)]
    assert sorted(paths) == sorted(d.path for d in documents)


def test_fingerprint_sees_content_and_path_but_not_order():
    a, b = Document("a.py", "x = 1\n"), Document("b.py", "y = 2\n")
    assert fingerprint([a, b]) == fingerprint([b, a])
    assert fingerprint([a, b]) != fingerprint([a, Document("b.py", "y = 3\n")])
    assert fingerprint([a, b]) != fingerprint([a, Document("c.py", "y = 2\n")])


def test_boundaries_are_top_level_only():
    text = "import x\n\ndef f():\n    def g(): pass\n\n@d\nclass C: pass\n\nasync def h(): pass\n"
    assert [text[i:].split()[0] for i in boundaries(text)] == ["def", "@d", "class", "async"]


def test_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one training .py file, got none"):
        read_corpus(tmp_path)
