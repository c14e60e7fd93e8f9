"""Which files count, what the tokenizer and the samples of the target make of them, and scores."""

import json
import math

import pytest
import torch

from simulations.train.corpus import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    Document,
    Stream,
    beginnings,
    encode_stream,
    fingerprint,
    is_held_out,
    read_corpus,
)
from simulations.train.fit import build
from simulations.train.report import held_out_loss, overlap


def test_split_is_stable():
    """Frozen choices: a change of hash or share would mix training and held-out text."""
    assert [i for i in range(100) if is_held_out(f"pkg/m{i}.py")] == [8, 49, 53, 88, 94]
    names = ["bisect.py", "ftplib.py", "queue.py", "pickle.py", "struct.py", "heapq.py"]
    assert [n for n in names if is_held_out(n)] == ["ftplib.py", "pickle.py", "struct.py"]


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
    found = {d.path for part in read_corpus(tmp_path) for d in part}
    assert found - {p.name for p in corpus_folder.glob("*.py")} == {"kept/a.py"}


def test_fingerprint_sees_content_and_path_but_not_order():
    a, b = Document("a.py", "x = 1\n"), Document("b.py", "y = 2\n")
    others = (
        fingerprint([a, Document("b.py", "y = 3\n")]),
        fingerprint([a, Document("c.py", b.text)]),
    )
    assert fingerprint([a, b]) == fingerprint([b, a]) not in others


def test_texts_code_and_json_lines_are_documents_of_one_corpus(tmp_path):
    prose = "\n\n".join(f"Paragraph {i}. " + "word " * 400 for i in range(12))
    (tmp_path / "prose.txt").write_text(prose)
    (tmp_path / "code.py").write_text("x = 1\n")
    lines = [json.dumps({"text": f"line {i}"}) for i in range(60)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    texts = {d.path: d.text for part in read_corpus(tmp_path, 0.25) for d in part}
    parts = [texts[path] for path in sorted(texts) if path.startswith("prose")]
    assert len(parts) > 1 and "".join(parts) == prose
    assert texts["lines.jsonl:7"] == "line 6" and texts["code.py"] == "x = 1\n"
    unseen = [{d.path for d in read_corpus(tmp_path, 0.25, seed)[1]} for seed in (0, 0, 5)]
    assert unseen[0] == unseen[1] != unseen[2] and 0.1 < len(unseen[0]) / len(texts) < 0.4
    assert sum(map(len, read_corpus(tmp_path / "lines.jsonl", 0.25))) == 60  # a file alone
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(chat))
    with pytest.raises(ValueError, match="--corpus: every line must hold one text; got a chat"):
        read_corpus(tmp_path)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'é\u2028'\n", "", "  \n\n x", "\x00\x7f"])
def test_the_tokenizer_loses_nothing(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == END_OF_TEXT_ID
    assert len(tokenizer) == 300


def test_stream_keeps_every_document_and_marks_starts(corpus_folder, tokenizer, stream):
    documents = read_corpus(corpus_folder)[0]
    text = tokenizer.decode(stream.tokens.tolist(), skip_special_tokens=False)
    assert text == END_OF_TEXT + "".join(d.text + END_OF_TEXT for d in documents)
    separators = torch.nonzero(stream.tokens == END_OF_TEXT_ID).flatten()[:-1]
    assert set((separators + 1).tolist()) <= set(stream.starts.tolist())
    others = sorted(set(stream.starts.tolist()) - set((separators + 1).tolist()))
    words = {tokenizer.decode(stream.tokens[i : i + 4].tolist()).split()[0] for i in others}
    assert words == {"def", "class"}


@pytest.fixture(scope="module")
def sharp():
    """Return a fresh model whose distribution is far from uniform."""
    model = build(2, 32, 300, seed=2).eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(8.0)
    return model


def test_beginnings_are_of_documents_and_definitions_in_several_lengths(corpus_folder, tokenizer):
    documents = read_corpus(corpus_folder)[0][:20]
    found, stream = beginnings(tokenizer, documents), encode_stream(tokenizer, documents)
    ids = stream.tokens.tolist()
    assert len(found) == len(stream.starts)
    for own, start in zip(found, stream.starts.tolist(), strict=True):
        assert own[0] == END_OF_TEXT_ID and ids[start : start + len(own) - 1] == own[1:]
    assert [len(own) for own in found[:3]] == [1, 8, 16]


@pytest.mark.parametrize("size", [3, 8, 9, 17, 30])
def test_held_out_loss_scores_every_token_once(sharp, size):
    """With context 8: token t sees back to the start of the block before its own."""
    tokens = torch.randint(300, (size,), generator=torch.Generator().manual_seed(size))
    found = held_out_loss(sharp, Stream(tokens.int(), tokens), size=100, context=8)
    total = 0.0
    for t in range(1, size):
        first = max(0, (t - 1) // 8 * 8 - 8)
        with torch.no_grad():
            logits = sharp(tokens[None, first:t]).logits[0, -1]
        total += torch.nn.functional.cross_entropy(logits, tokens[t]).item()
    assert found["tokens"] == size - 1
    assert found["nats_per_token"] == pytest.approx(total / (size - 1), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / 100, rel=1e-5)


def test_overlap_of_a_model_with_itself_is_one(sharp):
    begun = [[0, 5, 9], [0]]
    found = overlap(sharp, sharp, begun, rows=32, length=8, seed=0)
    assert found["mean"] == pytest.approx(1, abs=1e-5)
    assert found["positions"] == 32 * 8 and found["sequences"] == 32
    other = build(1, 32, 300, seed=1).eval()
    apart = overlap(sharp, other, begun, rows=32, length=8, seed=0)
    assert apart["mean"] < 0.9
