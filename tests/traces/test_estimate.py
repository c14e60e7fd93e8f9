"""Standard errors count texts: the jackknife against the bootstrap, paired and not."""

import numpy as np
import pytest

from cactus_theory.traces import Estimate, Replay
from cactus_theory.traces.estimate import ratio_of_sums
from tests.amounts import amount

TEXTS = 60
# the jackknife and the bootstrap agree to O(1/T); the bootstrap's own error is 1/√(2·draws)
AGREE = 0.15
EXACT = 1e-12


def made(name: str, gain: float, spend: float, seed: int = 0) -> Replay:
    """Return a replay of texts that differ; the same texts for every name."""
    texts = np.random.default_rng(seed)
    cycles = texts.integers(5, 40, TEXTS).astype(float)
    mean = 1 + texts.gamma(4, 0.25, TEXTS)
    noise = np.random.default_rng(len(name)).normal(0, 0.02, TEXTS)
    tokens = cycles * (mean * (1 + gain) + noise)
    spent = cycles * spend * texts.gamma(9, 1 / 9, TEXTS)
    one = np.ones((1, TEXTS))
    return Replay(
        name, 1, source=f"seed {seed}", cycles=cycles, tokens=tokens, spent={"kl": spent},
        reached=one, accepted_at=one / 2, drafts=cycles, drafted=cycles,
    )  # fmt: skip


def resampled(replays: list[Replay], of, draws: int) -> float:
    """Return the bootstrap's standard error of ``of(replays)`` over whole texts."""
    generator, found = np.random.default_rng(7), []
    for _ in range(draws):
        take = generator.integers(TEXTS, size=TEXTS)
        found.append(of(*(own.part(take) for own in replays)).value)
    return float(np.std(found))


FIRST = [made("a", 0.1, 0.05), made("bb", 0.3, 0.15)]


@pytest.mark.parametrize(
    ("replays", "of"),
    [
        (FIRST[:1], lambda a: a.tokens_per_call),
        (FIRST[:1], lambda a: a.divergence_per_token()),
        (FIRST[:1], lambda a: a.acceptance_by_position[0]),
        (FIRST, lambda a, b: b.tokens_per_call - a.tokens_per_call),
        (FIRST, lambda a, b: b.tokens_per_call / a.tokens_per_call),
        (FIRST, lambda a, b: b.divergence_per_token() - a.divergence_per_token()),
    ],
)
def test_the_error_is_the_bootstraps(replays: list[Replay], of) -> None:
    wanted = resampled(replays, of, amount(400, 4000))
    assert of(*replays).standard_error == pytest.approx(wanted, rel=AGREE, abs=EXACT)


def test_paired_differences_are_far_surer_than_their_parts() -> None:
    parts = [own.tokens_per_call.standard_error for own in FIRST]
    paired = FIRST[1].tokens_per_call - FIRST[0].tokens_per_call
    assert paired.standard_error < 0.5 * min(parts)
    assert paired.value == pytest.approx(
        FIRST[1].tokens_per_call.value - FIRST[0].tokens_per_call.value, abs=EXACT
    )


def test_the_jackknife_of_a_mean_is_the_textbooks() -> None:
    values = np.random.default_rng(1).random(TEXTS)
    found = ratio_of_sums(values, np.ones(TEXTS), "")
    assert found.standard_error == pytest.approx(values.std(ddof=1) / TEXTS**0.5, rel=EXACT)


def test_one_text_has_no_error() -> None:
    one = FIRST[0].part([3])
    assert np.isnan(one.tokens_per_call.standard_error) and one.tokens_per_call.value > 1


def test_an_infinite_divergence_stays_infinite() -> None:
    spent = FIRST[0].spent["kl"].copy()
    spent[4] = np.inf
    found = ratio_of_sums(spent, FIRST[0].tokens, "")
    assert found.value == np.inf and np.isfinite(found.left_out[4])
    assert np.isnan(found.standard_error)


OTHER = made("a", 0, 0.1, seed=1)
UNPAIRED = {
    "from the same texts to be paired": lambda: FIRST[0].tokens_per_call - OTHER.tokens_per_call,
    "got 3 and 4 texts": lambda: Estimate(1.0, np.ones(3), "x") / Estimate(1.0, np.ones(4), "x"),
}


@pytest.mark.parametrize("said", UNPAIRED)
def test_what_cannot_be_paired_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        UNPAIRED[said]()
