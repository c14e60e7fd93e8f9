"""Simulated engines: texts that are hard or easy throughout, ends of text, short drafts, one K or
many. What is expected comes of a few logged texts, what is counted of others."""

from dataclasses import dataclass, replace

import numpy as np

from cactus_theory.traces import Observation, compare_observed
from cactus_theory.traces.expect import Expectation, LoggedRounds

WIDTH = 4


@dataclass(frozen=True)
class Engine:
    """Texts of at most ``most`` tokens; ``tells`` is what is known of its counts."""

    texts: int = 80
    logged: int = 12
    most: int = 48
    engine_most: int = 48
    ends: float = 0.0  # of a token to end its text
    short: bool = False  # drafts no more than is left
    adaptive: bool = False  # K from 1 on, by the load
    behind: bool | None = None
    tells: str = ""  # drafted, answers
    repeats: int = 1  # logged texts of a prompt
    fault: float = 1.0  # by which acceptance is multiplied

    def decode(self, source: np.random.Generator, ease: np.ndarray, most: int, fault: float):
        """Return text, position, φ, ends, what is kept, and lengths, by round."""
        shape = (len(ease), most, WIDTH)
        phi = np.clip(ease[:, None, None] + 0.15 * source.standard_normal(shape), 0.02, 1) * fault
        end = source.random(shape) < self.ends
        kept = (source.random(shape) < phi).cumprod(-1).astype(bool)
        lengths = np.full(shape[:2], WIDTH)
        if self.adaptive:
            lengths = source.integers(1, WIDTH + 1, (shape[0], 1)) + np.zeros_like(lengths)
        new = np.minimum(kept.sum(-1), lengths) + 1
        ended = (kept & end).any(-1) | (source.random(shape[:2]) < self.ends)
        position = new.cumsum(1) - new
        goes = (position < most) & (ended.cumsum(1) - ended == 0)
        text = np.repeat(np.arange(len(ease)), goes.sum(1))
        return text, position[goes], phi[goes], end[goes], kept[goes], lengths[goes]

    def run(self, source: np.random.Generator):
        ease = 0.65 + 0.12 * source.standard_normal(self.logged // self.repeats)
        text, position, phi, end, *_ = replace(self, adaptive=False).decode(
            source, np.tile(ease, self.repeats), self.most, 1.0
        )
        alive = np.pad(phi.cumprod(1), ((0, 0), (1, 0)), constant_values=1.0)
        going = np.pad(~end.cumsum(1).astype(bool), ((0, 0), (1, 0)), constant_values=True)
        left = np.clip(self.most - 1 - position, 0, WIDTH)
        prompts = np.tile(np.arange(len(ease)), self.repeats)
        lengths, names = np.full(len(text), WIDTH), ("made", "chain", "made")
        healthy = Expectation(LoggedRounds(text, lengths, left, alive, going, prompts, names))
        if self.repeats == 1:
            ease = 0.65 + 0.12 * source.standard_normal(self.texts)
        else:
            ease = np.tile(ease, self.texts // len(ease))
        return healthy, self.counts(source, ease)

    def counts(self, source: np.random.Generator, ease: np.ndarray) -> Observation:
        _, position, _, end, kept, lengths = self.decode(source, ease, self.engine_most, self.fault)
        left = np.clip(self.engine_most - 1 - position, 0, WIDTH) if self.short else WIDTH
        lengths = np.minimum(lengths, left)
        drafted = np.arange(WIDTH) < lengths[:, None]
        kept &= drafted
        if not self.behind:
            kept &= np.pad(~end.cumsum(1).astype(bool), ((0, 0), (1, 0)), constant_values=True)[
                :, :-1
            ]
        rounds = int(drafted[:, 0].sum())
        known: dict = {"behind_ends": self.behind}
        if "answers" in self.tells:
            known["answers"] = len(ease)
        if "drafted" in self.tells:
            known["drafted"] = float(drafted.sum())
        return Observation(kept.sum(0) / rounds, rounds, np.zeros(WIDTH), **known)


KINDS = {
    "ordinary": Engine(),
    "ends, left out": Engine(ends=0.03, most=64, engine_most=64, behind=False, tells="answers"),
    "ends, counted": Engine(ends=0.03, most=64, engine_most=64, behind=True, tells="answers"),
    "ends, unknown": Engine(ends=0.03, most=64, engine_most=64),
    "short answers": Engine(texts=200, logged=24, most=12, engine_most=12, short=True,
                            tells="drafted"),
    "short answers, unknown": Engine(texts=200, logged=24, most=12, engine_most=12, short=True),
    "adaptive K": Engine(adaptive=True, tells="drafted"),
    "longer texts than were logged": Engine(logged=6, texts=6, engine_most=8 * 48, tells="answers"),
    "many longer texts": Engine(logged=6, texts=40, engine_most=8 * 48, tells="answers"),
    "the same prompts": Engine(logged=24, repeats=2, texts=96),
    "five texts": Engine(logged=5),
}  # fmt: skip


def alarms(engine: Engine, runs: int, seed: int = 0) -> tuple[int, int]:
    """Return in how many runs the engine is off, and in how many something is asked."""
    source, off, asked = np.random.default_rng(seed), 0, 0
    for _ in range(runs):
        healthy, seen = engine.run(source)
        try:
            off += compare_observed(healthy, seen).alarm
        except ValueError as error:
            assert "the verdict depends on it" in str(error)
            asked += 1
    return off, asked


if __name__ == "__main__":
    for name, engine in KINDS.items():
        power = [alarms(replace(engine, fault=fault), 100) for fault in (0.9, 0.8)]
        print(f"{name}: {alarms(engine, 400)} of 400; at 0.9 and 0.8 of 100: {power}", flush=True)
