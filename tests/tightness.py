"""How tight promises are on tiny models: ``python -m tests.tightness`` writes the table of a page.

For every text law that is enumerated: the KL of the text over the expected meter, the largest
binary KL of any event over the KL, and the largest change of any event over the largest that the
meter allows. Level sets of the likelihood ratio are enough (THEORY.md, Theorem 23).
"""

import itertools

import numpy as np
import torch

from cactus_theory.answer_bounds import most_variation
from simulations.common.inputs import DATA
from simulations.common.results import provenance, write_csv
from tests.markov.pair import Setting, markov_pair
from tests.markov.texts import enumerate_texts
from tests.test_answer_bounds import kl2, level_sets

SPECS = ("band:price=4", "band:price=1", "cactus:delta=0.1", "lenience:lenience=0.7",
         "mixture:alpha=0.2")  # fmt: skip
HEADS = "meter", "kl_over_meter", "binary_kl_over_kl", "change_over_allowed"
SIZES = ((2, 4), (4, 2), (3, 6), (4, 5))


def ratios(spec: str, vocab: int, length: int, seed: int) -> tuple[float, float, float, float]:
    """Return the meter, KL over it, kl₂ over KL, and change over the most allowed."""
    pair = markov_pair(vocab, seed=seed, distance=1.0)
    texts = enumerate_texts(pair, Setting(spec, min(3, length - 1), length, "chain"))
    events = level_sets(texts.law[-1].numpy(), texts.target[-1].numpy())
    meter, kl = texts.meter.mean, texts.kl
    change = np.abs(np.subtract(*events)).max()
    return meter, kl / meter, kl2(*events).max() / kl, change / most_variation(meter)


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for spec, (vocab, length), seed in itertools.product(SPECS, SIZES, range(8)):
        pair = {"policy": spec, "vocabulary": vocab, "tokens": length, "seed": seed}
        lines.append(pair | dict(zip(HEADS, ratios(spec, vocab, length, seed), strict=True)))
    write_csv(DATA / "tightness.csv", lines, provenance("python -m tests.tightness"))
    for spec in SPECS:
        meter, *others = ([own[head] for own in lines if own["policy"] == spec] for head in HEADS)
        cells = [f"{np.median(own):.2f} ({min(own):.2f}–{max(own):.2f})" for own in others]
        print(f"{spec:<24} {min(meter):.3g} to {max(meter):.3g}", *cells, sep="  ")


if __name__ == "__main__":
    main()
