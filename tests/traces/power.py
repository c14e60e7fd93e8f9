"""What ``expect`` lists of known and of unknown faults: ``python -m tests.traces.power``.

Shipped pair, T = 0.5, chain, K = 4, 12 prompts, 64 tokens. Of each kind of engine there is one
decode, from which runs of at most 2,000 rounds are drawn: whole texts, with coins of their own.
Signatures are those of ``expect --trace``, from rows alone.
"""

import argparse
from collections import Counter
from dataclasses import replace
from functools import partial

from cactus_theory.decoding import load_pair
from cactus_theory.policies.reshaped import Truncated
from cactus_theory.traces.expect import expectations
from cactus_theory.traces.faults import FAULTS, Fault, Rows, cut, heated, with_faults
from cactus_theory.verify.contract import find_verifier
from tests.test_docs import ROOT
from tests.traces.planted import Pool
from tests.traces.test_expect_faults import decodes_of

HEAT, REPEATS, RUNS = 0.5, 8, 50


def uniform(rows: Rows) -> Rows:
    """Return target rows that lost a tenth of their mass to all tokens alike."""
    return replace(rows, q=0.9 * rows.q + 0.1 / rows.q.shape[-1])


def sharper(rows: Rows) -> Rows:
    return replace(rows, p=None if rows.p is None else heated(rows.p, 1 / 1.3))


KNOWN = ("both-temperature 1", "target-top-p", "no-draft-law")
UNKNOWN = (
    Fault("both at 0.4", lambda rows: rows, "", "", temperature=0.4),
    Fault("target at 0.7", lambda rows: replace(rows, q=heated(rows.q, 0.7 / HEAT)), "", ""),
    Fault(
        "target cut to 0.8", lambda rows: replace(rows, q=cut(rows.q, Truncated(top_p=0.8))), "", ""
    ),
    Fault("target 0.1 uniform", uniform, "", ""),
    Fault("sharper law", sharper, "", ""),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    runs, pair = parser.parse_args().runs, ROOT / "simulations" / "pair"
    judge, models = find_verifier("chain"), load_pair(pair / "target", pair / "draft")
    decodes = decodes_of(models, "stories.jsonl", 4, 64, HEAT, judge)
    rounds, _, _ = decodes.rounds(None, REPEATS, 0)
    signatures = expectations(rounds, "speculative", with_faults(rounds, judge))
    healthy = signatures.pop("")
    known = {fault.name: fault for fault in FAULTS}
    print(f"expected from {healthy.rounds:g} rounds, {len(signatures)} signatures", flush=True)
    pool = partial(Pool.of, *decodes.rounds(None, REPEATS, 900_000)[:2])
    pools = {"healthy": pool(told=True), "short ends": pool(short_ends=True, told=True)}
    for number, fault in enumerate([*map(known.get, KNOWN), *UNKNOWN]):
        faulty = decodes.rounds(fault, REPEATS, 500_000 + 1000 * number)[:2]
        pools[fault.name] = Pool.of(*faulty, told=True)
    for name, own in pools.items():
        kind = name.replace(",", "").partition(" ")[0]
        without = {key: value for key, value in signatures.items() if key.split()[0] != kind}
        for known_ones, label in ((signatures, name), (without, f"{name}, not known")):
            found = own.runs(runs, healthy, known_ones)
            listed = Counter(fault for one in found for fault in one.not_excluded)
            false = sum(bool(set(one.not_excluded) - {kind}) for one in found)
            names = ", ".join(f"{fault} {count}" for fault, count in listed.most_common())
            alarms = sum(one.alarm for one in found)
            print(f"{label}: alarm {alarms}, others listed {false}; {names}", flush=True)
            if len(without) == len(signatures):
                break


if __name__ == "__main__":
    main()
