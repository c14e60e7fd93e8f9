"""Chances of ends along logged texts, and what is said of lengths."""

import math

import pytest
import torch

import cactus_theory as ct
from cactus_theory.cli import main
from cactus_theory.traces import Cycle, Trace, save_trace
from cactus_theory.traces.ends import end_ratio, warning_of_longer_answers
from cactus_theory.tuning import Costs
from cactus_theory.tuning.report import notes, payload
from cactus_theory.tuning.tune import tune
from tests.traces.conftest import VOCAB

ENDS = [0, 3]


@pytest.fixture
def trace(ragged, tmp_path) -> Trace:
    shape = {"vocab_size": VOCAB, "num_draft_tokens": 3, "eos_token_ids": ENDS}
    return save_trace(tmp_path / "trace", ragged, **shape)


@pytest.mark.parametrize("spec", ["band:price=1", "lenience:lenience=0.4", "cactus:delta=0.1"])
def test_ratios_are_of_the_rows_where_drafts_start(trace, spec):
    sums = []
    for cycle in trace:
        if len(cycle.draft_token_ids):
            q, p = cycle.target_probs[0], torch.eye(VOCAB, dtype=torch.float64)
            p = (p if cycle.draft_probs is None else cycle.draft_probs)[
                cycle.draft_token_ids[0] if cycle.draft_probs is None else 0
            ]
            h = ct.emitted_law(ct.policy(spec), q, p)
            sums.append((float(h[ENDS].sum()), float(q[ENDS].sum())))
    above, below = map(math.fsum, zip(*sums, strict=True))
    assert end_ratio(trace, spec).value == pytest.approx(above / below, rel=1e-6)
    assert above != pytest.approx(below, rel=1e-3)


def test_a_held_end_has_the_ratio_1_and_a_floored_one_no_less(trace):
    assert end_ratio(trace, "band:price=1,hold=eos").value == pytest.approx(1, abs=1e-9)
    assert end_ratio(trace, "band:price=1,floor=eos").value >= 1


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [(0.9, 0.04, True), (1.4, 0.04, False), (0.9, 0.06, False), (math.nan, 0.1, False),
     (0.9, math.nan, False), (1.0, 0.0, False), (None, None, False)],
)  # fmt: skip
def test_words_need_two_standard_errors(value, error, said):
    assert ("longer" in warning_of_longer_answers(value, error)) == said


def test_tune_and_audit_say_that_answers_get_longer(tmp_path, capsys):
    source, texts = torch.Generator().manual_seed(0), []

    for text in range(8):
        logits = torch.randn(6, 2, VOCAB, generator=source, dtype=torch.float64)
        rare = logits[:, :1] + 0.5 * torch.randn(6, 1, VOCAB, generator=source, dtype=torch.float64)
        rare[..., ENDS] -= 2  # a draft that ends too rarely
        p = rare.softmax(-1)
        ids = torch.multinomial(p[:, 0], 1, generator=source)
        cycles = zip(ids, logits.softmax(-1), p, strict=True)
        texts.append([Cycle(text, 2 * place, *rows) for place, rows in enumerate(cycles)])
    shape = {"vocab_size": VOCAB, "num_draft_tokens": 1, "eos_token_ids": ENDS}
    trace = save_trace(tmp_path / "trace", texts, **shape)
    tuned = tune(trace, Costs.ratios(0.01), 0.05, policies=["band:price"], widths=[1])
    assert payload(tuned)["end_ratio"] < 1
    assert any("answers will probably get longer" in note for note in notes(tuned))
    lossless = tune(trace, Costs.ratios(0.01), 0.05, policies=["speculative"], widths=[1])
    assert payload(lossless)["end_ratio"] is None
    for spec, said in (("speculative", 0), ("band:price=1", 1), ("band:price=1,hold=eos", 0)):
        assert main(["audit", str(tmp_path / "trace"), "--policy", spec]) == 0
        assert capsys.readouterr().out.count("answers will probably get longer") == said
