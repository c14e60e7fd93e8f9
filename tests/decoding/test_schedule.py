"""A schedule changes the rule where it says, and nowhere else."""

import pytest
import torch

from cactus_theory.decoding import Between, ByPosition, generate
from cactus_theory.decoding._rules import Rules
from cactus_theory.decoding._text import Texts

PROMPT = torch.tensor([[1, 5, 9]])
MARKED = Between("cactus:delta=5", opening=7, closing=(8, 9))


def by_definition(state, drafted):
    chosen = []
    for token in drafted:
        chosen.append(int(state))
        state = (state or token == 7) and token not in (8, 9)
    return chosen


@pytest.mark.parametrize("state", [False, True])
def test_markers_rule_from_the_next_token_on(state):
    source = torch.Generator().manual_seed(2)
    for _ in range(60):
        drafted = torch.randint(6, 11, (7,), generator=source)
        assert MARKED.choose(state, drafted).tolist() == by_definition(state, drafted.tolist())
    assert MARKED.choose(state, drafted[:0]).tolist() == []


def test_markers_in_the_prompt_and_the_text_count():
    assert MARKED.begin([1, 7, 3]) is True
    assert MARKED.begin([7, 3, 8, 2]) is False
    assert MARKED.advance(True, [4, 9]) is False
    assert MARKED.advance(False, [7]) is True


def test_positions_count_new_tokens():
    steps = ByPosition([(0, "speculative"), (3, "typical"), (5, "cactus:delta=1")])
    assert steps.begin([1, 2, 3]) == 0
    assert steps.choose(steps.advance(0, [9]), torch.zeros(6).long()).tolist() == [0, 0, 1, 1, 2, 2]


def test_rules_are_numbered_over_rows():
    texts = Texts([[7], [1], [2]], 4, frozenset(), torch.device("cpu"))
    rules = Rules([MARKED, "typical", "cactus:delta=5"], texts)
    assert [rule.spec for rule in rules.rules] == ["speculative", "cactus:delta=5.0", "typical"]
    choice = rules.choose(torch.tensor([[3, 8, 3], [3, 3, 3], [3, 3, 3]]))
    assert choice.tolist() == [[1, 1, 0], [2, 2, 2], [1, 1, 1]]


def test_a_schedule_that_never_changes_is_its_rule(tiny):
    options = {"max_new_tokens": 30, "seed": 3, "record_rows": True}
    for spec in ("cactus:delta=0.5", "band:delta=0.2"):
        alone = generate(*tiny, PROMPT, policy=spec, **options)
        steps = ByPosition([(0, spec), (1000, "speculative")])
        scheduled = generate(*tiny, PROMPT, policy=steps, **options)
        assert scheduled.output_token_ids.tolist() == alone.output_token_ids.tolist()
        assert scheduled.meter.kl == pytest.approx(alone.meter.kl, rel=1e-9)


def test_divergence_is_spent_only_inside(tiny):
    """Relaxed up to token 10: no row behind it may differ from the target."""
    steps = ByPosition([(0, "cactus:delta=2"), (10, "speculative")])
    short = generate(*tiny, PROMPT, policy=steps, max_new_tokens=10, seed=4)
    long = generate(*tiny, PROMPT, policy=steps, max_new_tokens=40, seed=4)
    strict = generate(*tiny, PROMPT, policy="speculative", max_new_tokens=40, seed=4)
    assert long.meter.kl > 0.01
    assert long.meter.kl <= short.meter.kl + 10 * long.meter.largest_row_kl
    assert strict.meter.kl == 0
    assert long.meter.rows > short.meter.rows


def test_strict_outside_the_markers_is_lossless(tiny):
    never = Between("cactus:delta=5", opening=16, closing=12)
    options = {"max_new_tokens": 25, "seed": 6}
    strict = generate(*tiny, PROMPT, policy="speculative", **options)
    marked = generate(*tiny, PROMPT, policy=never, **options)
    assert 16 not in strict.output_token_ids[0].tolist()
    assert marked.output_token_ids.tolist() == strict.output_token_ids.tolist()
    assert marked.meter.kl == 0
    inside = generate(*tiny, torch.tensor([[1, 16, 9]]), policy=never, **options)
    assert inside.meter.kl > 0.1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Between("typical", opening=3, closing=3), "closing: must differ .* token 3"),
        (lambda: Between("typical", opening=(), closing=3), "opening: must name at least one"),
        (lambda: Between("typical", opening=-1, closing=3), "opening: must be an integer .* -1"),
        (lambda: ByPosition([(1, "typical")]), r"steps: positions must start at 0 .* \(1,\)"),
        (lambda: ByPosition([(0, "typical"), (0, "typical")]), r"steps: .*\(0, 0\)"),
    ],
)
def test_refuses_schedules_that_make_no_sense(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_refuses_a_policy_of_no_kind(tiny):
    with pytest.raises(TypeError, match="policy: must be a spec, a Policy or a Schedule; got 3"):
        generate(*tiny, PROMPT, policy=3, max_new_tokens=4)
