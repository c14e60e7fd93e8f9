"""Rules along answers of people: the numbers of a plain loop, every kind of draft, bad files."""

import json
import math
import re

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.decoding import load_pair
from cactus_theory.emitted import directions
from simulations.__main__ import main
from simulations.common.inputs import DATA, PAIR
from simulations.common.results import read_csv
from simulations.references import COLUMNS, POLICIES, _measured, _rows, rows_along

RULES = ["band:price=1,tilt=0.1", "cactus:delta=0.01", "speculative:tilt=0.25"]
LINES = [
    {
        "prompt": "def area(width, height):\n",
        "beginning": "    ",
        "answer": "return width * height",
    },
    {"prompt": "import os\nimport", "answer": " sys\nimport os"},
    {"text": "x", "canonical_solution": " = 1\n"},
]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(tmp_path, *more, lines=LINES, draft=PAIR / "head", rules=RULES):
    words = ["references", "--draft", str(draft), "--out", str(tmp_path / "out")]
    for rule in rules:
        words += ["--policy", rule]
    return main([*words, "--answers", str(written(tmp_path / "own.jsonl", lines)), *more])


def looped(pair, lines, rule, drafts):
    """Return the sums of each line by one pass of the target a token; ``drafts`` gives p or n."""
    for line in lines:
        text = next(line[key] for key in ("prompt", "text") if key in line)
        before = [pair.tokenizer(part)["input_ids"] for part in (text, line.get("beginning", ""))]
        answer = pair.tokenizer(line.get("answer") or line["canonical_solution"])["input_ids"]
        ids, sums, chances = sum(before, []), dict.fromkeys(COLUMNS, 0.0), [1.0, 1.0]
        count = 0
        for x in answer:
            q = pair.target(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
            p = drafts(ids)
            if p is None:
                h = ct.policy(rule).undrafted(q)
            else:
                drafted = {"draft_token_ids": p} if isinstance(p, int) else {"draft_probs": p}
                h = ct.emitted_law(rule, q, **drafted, normalise=True)
                report = ct.audit(rule, q, **drafted, normalise=True)
                plain = float(q[p] if isinstance(p, int) else torch.minimum(q, p).sum())
                sums["acceptance"] += report.acceptance
                sums["gain"] += report.acceptance - plain
                count += 1
            sums["nats"] += float(torch.special.xlogy(h, h / q).sum())
            sums["surprise"] += float(((q - h) * q.log()).sum())
            sums["agreement"] += float(((h - q) * q).sum())
            sums["entropy"] += float(torch.special.entr(h).sum())
            sums["reference_change"] += float(h[x] - q[x])
            scores = [float(2 * row[x] - (row**2).sum()) for row in (h, q)]
            sums["quadratic_change"] += scores[0] - scores[1]
            sums["log_change"] += float((h[x] / q[x]).log())
            chances = [chance * float(row[x]) for chance, row in zip(chances, (h, q), strict=True)]
            ids = [*ids, x]
        sums["chance"], sums["chance_change"] = chances[0], chances[0] - chances[1]
        yield sums, len(answer), count


def by_model(pair):
    return lambda ids: pair.draft(torch.tensor([ids])).logits[0, -1].double().softmax(-1)


def by_head(pair):
    def row(ids):
        if len(ids) < 2:
            return None
        _, p, drafted = rows_along(pair, ids, [0])  # the answer's first token alone
        return p[0] if drafted[0] else None

    return row


def by_ngram(pair):
    def token(ids):
        for size in (3, 2, 1):
            for end in range(len(ids) - 1, size - 1, -1):
                if len(ids) > size and ids[end - size : end] == ids[-size:]:
                    return ids[end]
        return None

    return token


@pytest.mark.parametrize(
    ("draft", "drafts"),
    [(PAIR / "draft", by_model), (PAIR / "head", by_head), ("ngram", by_ngram)],
)
def test_numbers_are_those_of_a_plain_loop(tmp_path, draft, drafts, capsys):
    assert asked(tmp_path, draft=draft) == 0
    rows, head = read_csv(tmp_path / "out" / "references.csv")
    assert head["cut"] == "0 of 3 answers are longer than read"
    pair = load_pair(PAIR / "target", draft, dtype="float32")
    with torch.inference_mode():
        for rule, row in zip(RULES, rows[1:], strict=True):
            assert row["policy"] == rule
            sums, tokens, drafted = zip(*looped(pair, LINES, rule, drafts(pair)), strict=True)
            assert [int(row[key]) for key in ("tokens", "drafted")] == [sum(tokens), sum(drafted)]
            for column in COLUMNS:
                below = {"acceptance": drafted, "gain": drafted, "chance": [1] * 3,
                         "chance_change": [1] * 3}.get(column, tokens)  # fmt: skip
                above = np.array([own[column] for own in sums])
                assert float(row[column]) == pytest.approx(above.sum() / sum(below), abs=2e-6)
                left = [(above.sum() - a) / (sum(below) - b)
                        for a, b in zip(above, below, strict=True)]  # fmt: skip
                error = math.sqrt(2 / 3 * sum((x - sum(left) / 3) ** 2 for x in left))
                assert float(row[f"{column}_se"]) == pytest.approx(error, rel=1e-4, abs=2e-6)


def test_a_head_drafts_what_a_decode_of_it_would(tmp_path):
    """At every place the row of one round that starts there, with the target's states before it."""
    pair = load_pair(PAIR / "target", PAIR / "head", dtype="float32")
    ids = pair.tokenizer("import os\nimport sys\n\n\ndef main():\n")["input_ids"]
    q, p, drafted = rows_along(pair, ids[:1], ids[1:])
    assert drafted.tolist() == [False, *[True] * (len(ids) - 2)]
    for start in (2, len(ids) - 1):
        seen = []

        class Seen(type(pair.draft)):
            def begin(self, setting, seen=seen):
                drafting = super().begin(setting)
                propose = drafting.propose

                def proposed(wanted, coins):
                    draft = propose(wanted, coins)
                    if draft.probs is not None and not seen:
                        seen.append((list(drafting.texts.rows[0].ids), draft.probs[0, 0].clone()))
                    return draft

                drafting.propose = proposed
                return drafting

        ct.generate(pair.target, Seen(pair.draft.head), torch.tensor([ids[:start]]),
                    policy="speculative", max_new_tokens=4, num_draft_tokens=1)  # fmt: skip
        text, row = seen[0]  # the first round has no states and emits a token without a draft
        whole = rows_along(pair, text[:1], [*text[1:], 0])[1][-1]
        assert torch.allclose(whole, row.double(), atol=1e-5)
        assert torch.allclose(q.sum(-1), torch.ones(len(q), dtype=torch.float64))


def test_a_run_that_was_killed_goes_on_to_the_same_table(tmp_path, monkeypatch):
    assert asked(tmp_path) == 0
    path, table = tmp_path / "out" / "journal.jsonl", tmp_path / "out" / "references.csv"
    whole, lines = table.read_bytes(), path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    table.unlink()
    made = []
    monkeypatch.setattr(
        "simulations.references.rows_along",
        lambda *given: made.append(given) or rows_along(*given),
    )
    assert asked(tmp_path) == 0 and len(made) == 2
    assert table.read_bytes() == whole


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ([{"prompt": "a"}], (), "line 1 of own.jsonl must hold a text under one of answer"),
        ([LINES[0], {"prompt": "a", "answer": ""}], (), "line 2 of own.jsonl must hold a text"),
        ([{"prompt": "a", "answer": 3}], (), "must hold a text under one of answer, canonical"),
        ([{"prompt": "a", "answer": "b", "canonical_solution": "c"}], (), "under one of answer"),
        ([{"prompt": "a", "answer": "b", "beginning": 1}], (), "under 'beginning', if any"),
        ([{"prompt": "a\n" * 2000, "answer": "b"}], (), "must leave the models a position"),
        ([{"answer": "b"}], (), "--answers: line 1 of own.jsonl must hold a prompt"),
        (LINES, ("--draft", "none"), "--draft: must be a draft, whose tokens are accepted"),
        (LINES, ("--num-answers", "1"), "--num-answers: must be at least 2; got 1"),
    ],
)
def test_lines_that_are_no_answers_are_named(tmp_path, capsys, lines, more, said):
    assert asked(tmp_path, *more, lines=lines) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "references.csv").exists()


@pytest.mark.parametrize("most", [4, 128])
def test_answers_that_are_longer_than_read_are_counted(tmp_path, most):
    """By the flag, and by the 1,024 positions of the models."""
    prompt, given = "a\n" * 504, ("--max-new-tokens", str(most))
    long = {"prompt": prompt, "answer": "b\n" * 50}
    assert asked(tmp_path, *given, lines=[long, *LINES], rules=RULES[:1], draft="ngram") == 0
    rows, head = read_csv(tmp_path / "out" / "references.csv")
    tokenizer = load_pair(PAIR / "target", "ngram").tokenizer
    answers = [line.get("answer") or line["canonical_solution"] for line in (long, *LINES)]
    sizes = [len(tokenizer(answer)["input_ids"]) for answer in answers]
    room = 1024 - len(tokenizer(prompt)["input_ids"])
    assert 4 < room < sizes[0]
    read = [min(sizes[0], most, room), *(min(size, most) for size in sizes[1:])]
    assert int(rows[0]["tokens"]) == sum(read)
    cut = sum(own < size for own, size in zip(read, sizes, strict=True))
    assert head["cut"] == f"{cut} of 4 answers are longer than read" and cut >= 1


def test_the_swept_policies_are_each_once():
    assert len(set(POLICIES)) == len(POLICIES)
    assert {ct.policy(spec).name for spec in POLICIES} > {"band", "lenience", "cactus", "relaxed"}


def test_tokens_that_the_target_excludes_have_infinite_surprise_and_no_nan():
    """A row of the target with zeros, one that is one-hot, and a one-hot draft."""
    q = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    p = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    rules = [ct.policy(one) for one in ("speculative", "mixture:alpha=0.5,support=free", *RULES)]
    for row in range(3):
        ids = torch.tensor([1])
        found = _measured(q[[row]], p[[row]], ids, rules)
        for rule, own in zip(rules, found.tolist(), strict=True):
            law = ct.emitted_law(rule, q[row], p[row])
            named = dict(zip(COLUMNS, own, strict=True))
            assert not np.isnan(own).any()
            outside = bool(law[q[row] == 0].sum() > 0)
            assert (named["nats"] == math.inf) is (named["surprise"] == math.inf) is outside
            entropy, surprise, agreement = (float(one) for one in directions(law, q[row]))
            due = entropy, surprise, agreement, float(law[1] - q[row, 1])
            got = [named[key] for key in ("entropy", "surprise", "agreement", "reference_change")]
            assert got == pytest.approx(due, abs=1e-12)
    assert outside is False and math.isinf(_measured(q[:1], p[:1], ids, rules)[1, 2])


def test_a_better_policy_is_the_best_of_those_that_cost_no_more():
    random = np.random.default_rng(0)
    policies = [f"band:price={1 + number}" for number in range(9)]
    results = [{"tokens": 5, "drafted": 4, "sums": random.normal(size=(9, 11)).tolist()}
               for _ in range(6)]  # fmt: skip
    rows = _rows("own", policies, results)
    for row in rows:
        others = [
            other
            for other in rows
            if other["nats"] <= row["nats"]
            and other["reference_change"] >= row["reference_change"]
            and other["gain"] > row["gain"]
        ]
        best = max(others, key=lambda other: other["gain"], default=None)
        assert row["better"] == (best and best["policy"])
        if best:
            assert row["better_gain"] == pytest.approx(best["gain"] - row["gain"])
    assert {bool(row["better"]) for row in rows} == {True, False}


def leads(rows, column):
    """Return, of each lenience within the sweep, the bands' lead at its nats and its ``column``.

    Along each tilt's curve, linear in ln nats; then across the tilts, linear in ``column``.
    """
    curves = {}
    for row in rows:
        if found := re.fullmatch(r"band:price=[\d.]+(?:,tilt=([\d.]+))?", row["policy"]):
            point = [float(row[key]) for key in ("nats", "gain", column)]
            curves.setdefault(float(found[1] or 0), []).append(point)
    for row in rows:
        if row["policy"].startswith("lenience"):
            nats, gain, change = (float(row[key]) for key in ("nats", "gain", column))
            sorted_curves = (np.array(sorted(curves[tilt])) for tilt in sorted(curves))
            points = [[np.interp(np.log(nats), np.log(own[:, 0]), own[:, at]) for at in (1, 2)]
                      for own in sorted_curves if own[0, 0] <= nats <= own[-1, 0]]  # fmt: skip
            gains, changes = np.array(points).reshape(-1, 2).T
            if len(changes) > 1 and changes[0] <= change <= changes[-1]:
                yield 100 * (np.interp(change, changes, gains) / gain - 1)


@pytest.mark.parametrize(
    ("table", "file", "column", "said"),
    [
        ("references", "gsm8k_test.jsonl", "reference_change", "3.5 to 7.3 %"),
        ("references", "humaneval.jsonl", "reference_change", "2.9 to 13.4 %"),
        ("facts", "facts.jsonl", "chance_change", "2.8 to 6.7 %"),
        ("references_ngram", None, "reference_change", "11 to 37 %"),
    ],
)
def test_the_page_has_the_leads_over_lenience_of_its_tables(table, file, column, said):
    rows, _ = read_csv(DATA / f"{table}.csv")
    files = [file] if file else dict.fromkeys(row["file"] for row in rows)
    found = [lead for one in files
             for lead in leads([row for row in rows if row["file"] == one], column)]  # fmt: skip
    digits = 1 if "." in said else 0
    assert f"{min(found):.{digits}f} to {max(found):.{digits}f} %" == said
    assert said in (DATA.parent / "results" / "references.md").read_text(encoding="utf-8")
    assert len(found) >= 7
