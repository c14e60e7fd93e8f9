"""How tight promises are on tiny models: ``python -m tests.tightness`` prints the guide's table.

For every text law that is enumerated: the KL of the text over the expected meter, the largest
binary KL of any event over the KL, and the largest change of any event over the largest that the
meter allows. Level sets of the likelihood ratio are enough (THEORY.md, Theorem 23).
"""

import itertools

import numpy as np
import torch

from cactus_theory.answer_bounds import most_variation
from tests.markov.pair import Setting, markov_pair
from tests.markov.texts import enumerate_texts
from tests.test_answer_bounds import kl2, level_sets

SPECS = (
    "band:price=4",
    "band:price=1",
    "cactus:delta=0.1",
    "lenience:lenience=0.7",
    "mixture:alpha=0.2",
)
SIZES = ((2, 4), (4, 2), (3, 6), (4, 5))
SEEDS = 8


def ratios(spec: str, vocab: int, length: int, seed: int) -> tuple[float, float, float, float]:
    """Return the meter, KL over it, kl₂ over KL, and change over the most allowed."""
    pair = markov_pair(vocab, seed=seed, distance=1.0)
    texts = enumerate_texts(pair, Setting(spec, min(3, length - 1), length, "chain"))
    events = level_sets(texts.law[-1].numpy(), texts.target[-1].numpy())
    meter, kl = texts.meter.mean, texts.kl
    change = np.abs(np.subtract(*events)).max()
    return meter, kl / meter, kl2(*events).max() / kl, change / most_variation(meter)


def main() -> None:
    """Print a line for each policy: range of the meter, then median (least–most) of each ratio."""
    torch.set_num_threads(1)
    for spec in SPECS:
        tried = itertools.product(SIZES, range(SEEDS))
        meter, *others = np.array([ratios(spec, *size, seed) for size, seed in tried]).T
        cells = [f"{np.median(own):.2f} ({own.min():.2f}–{own.max():.2f})" for own in others]
        print(f"{spec:<24} {meter.min():.3g} to {meter.max():.3g}", *cells, sep="  ")


if __name__ == "__main__":
    main()
