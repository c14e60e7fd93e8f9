"""How often faults are named where both decodes are drawn anew: ``python -m tests.traces.power``.

Stories pair (``../shared/models``), T = .5, blocks, K = 8, 12 prompts, 64 tokens. Of each kind of
engine several decodes are made once. A trial draws their texts with replacement, prompt by prompt:
some for what is expected, others for a run of at most 2,000 rounds, whose coins are drawn anew.
Tens of minutes of one core.
"""

import argparse

import numpy as np
import torch

from cactus_theory.decoding import load_pair
from cactus_theory.policies import policy as find_policy
from cactus_theory.traces import Expectation, Observation, Replay, compare_observed
from cactus_theory.traces.faults import visible_faults
from cactus_theory.traces.replays import batch_law
from cactus_theory.verify.contract import find_verifier
from tests.decoding.conftest import STORIES
from tests.traces.planted import Pool
from tests.traces.test_expect_faults import BY_NAME, decodes_of

KINDS = ("healthy", "target-temperature", "block-by-token")
COUNTED, REPEATS, PROMPTS = 2000, 9, 12
FIRST_SEEDS = (100_000, 300_000, 500_000)


class Engine:
    """Rounds of one kind of engine: sums by text under each verifier, and their own chances."""

    def __init__(self, kind: str, decodes, batches: int, seed: int) -> None:
        judge, rule = decodes.judge, find_policy("speculative")
        sums: dict[str, list[np.ndarray]] = {}
        chances, texts = [], []
        for number in range(batches):
            fault = BY_NAME.get(kind)
            rounds, verifier, _ = decodes.rounds(fault, REPEATS, seed + 1000 * number)
            judges = {"own": verifier}
            if fault is None:
                planted = {
                    own.name: own.verifier(judge, 0.5) for own in visible_faults(rounds, judge)
                }
                judges |= {name: own for name, own in planted.items() if own is not None}
            ends = torch.tensor(rounds.header.eos_token_ids)
            pool = Pool.of(rounds, verifier)
            chances.append(pool.alive)
            texts.append(pool.text + number * rounds.texts)
            for name, own in judges.items():
                found = np.zeros((6, decodes.num_draft_tokens, rounds.texts))
                for batch in rounds.batches(0):
                    alive, going, _ = batch_law(batch, rule, own, {}, ends)
                    reached = torch.where(going[:, :-1], alive[:, :-1], 0.0)
                    kept = torch.where(going[:, :-1], alive[:, 1:], 0.0)
                    parts = (going[:, :1] + 0.0 * kept, reached, kept, reached**2,
                             reached * kept, kept**2)  # fmt: skip
                    for row, part in enumerate(parts):
                        np.add.at(found[row].T, batch.text.numpy(), part.numpy())
                sums.setdefault(name, []).append(found)
        self.kind, self.sums = kind, {name: np.concatenate(own, -1) for name, own in sums.items()}
        self.chances, text = np.concatenate(chances), np.concatenate(texts)
        self.rounds = [np.flatnonzero(text == own) for own in range(batches * rounds.texts)]

    def texts(self, source: np.random.Generator, most: int) -> np.ndarray:
        """Return texts of at most so many rounds together, prompt after prompt."""
        repeats = len(self.rounds) // PROMPTS
        drawn = source.integers(repeats, size=(repeats, PROMPTS)) * PROMPTS + np.arange(PROMPTS)
        sizes = np.array([len(self.rounds[text]) for text in drawn.ravel()])
        return drawn.ravel()[: np.searchsorted(sizes.cumsum(), most, "right")]

    def expectation(self, name: str, texts: np.ndarray) -> Expectation:
        """Return what is expected of a verifier on these texts."""
        cycles, reached, kept, *squares = self.sums[name][..., texts]
        replay = Replay(name, "block", len(kept), self.kind, cycles[0], cycles[0] + kept.sum(0),
                        kept.sum(0), {}, reached, kept)  # fmt: skip
        return Expectation(replay, np.stack(squares).sum(-1), None, texts % PROMPTS)

    def run(self, source: np.random.Generator) -> Observation:
        """Return what a run counts."""
        chances = self.chances[
            np.concatenate([self.rounds[text] for text in self.texts(source, COUNTED)])
        ]
        rates = (source.random((len(chances), 1)) < chances).mean(0)
        return Observation(rates, len(chances), np.zeros(len(rates)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=8, help="of 108 texts, of each engine (8)")
    parser.add_argument("--expected", type=int, nargs="+", default=[2264, 4000, 6000])
    parser.add_argument("--trials", type=int, default=600)
    args = parser.parse_args()
    pair = load_pair(STORIES / "stories260K", STORIES / "stories-xs-281K")
    decodes = decodes_of(pair, "stories.jsonl", 8, 64, 0.5, find_verifier("block"))
    engines = [
        Engine(kind, decodes, args.batches, seed)
        for kind, seed in zip(KINDS, FIRST_SEEDS, strict=True)
    ]
    healthy = engines[0]
    print("rounds decoded:", *(f"{own.kind} {len(own.chances)}" for own in engines))
    for engine in engines:
        for name, own in (("decoded", engine), ("by rows", healthy)):
            judge = engine.kind if own is healthy and engine is not healthy else "own"
            means = own.expectation(judge, np.arange(len(own.rounds))).if_reached
            print(f"{engine.kind} {name}:", *(f"{mean.value:.3f}" for mean in means))
    for expected in args.expected:
        for engine in engines:
            source, found = np.random.default_rng(0), []
            for _ in range(args.trials):
                texts = healthy.texts(source, expected)
                known = {name: healthy.expectation(name, texts) for name in healthy.sums}
                for other in engines[1:]:
                    own = other.expectation("own", other.texts(source, expected))
                    known[f"{other.kind} decoded"] = own
                found.append(compare_observed(known.pop("own"), engine.run(source), known))
            alarms = np.mean([own.alarm for own in found])
            named = np.mean([engine.kind in own.named for own in found])
            names = np.mean([len(own.named) for own in found])
            print(f"expected from {expected}, {engine.kind}: alarm {alarms:.1%}, named {named:.1%},"
                  f" {names:.2f} names", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
