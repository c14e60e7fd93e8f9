"""``eos`` in a policy's knobs is read as the ids that end texts, by whoever knows them."""

import copy

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory import tuning
from cactus_theory.cli import main
from cactus_theory.decoding import Between, ByPosition, Ledger
from cactus_theory.traces import Trace, replay
from cactus_theory.traces.log import log_trace
from cactus_theory.vllm import settings
from simulations.__main__ import main as simulate

IDS = torch.tensor([[1, 2, 3]])
SPEC, BY_IDS = "band:price=1.0,hold=eos", "band:price=1.0,hold=5+7"
REFUSED = "hold: eos stands for the ends of a model's texts, and none are known here; write their"


def judged(result):
    return {node.policy.spec for node in result.rows}


@pytest.fixture(scope="module")
def ending(tiny):
    """Return the tiny pair, whose target ends texts with 5 and 7."""
    target = copy.deepcopy(tiny[0])
    target.generation_config.eos_token_id = [5, 7]
    return target, tiny[1]


@pytest.fixture(scope="module")
def trace(ending, tmp_path_factory):
    sizes = {"num_draft_tokens": 2, "max_new_tokens": 6, "policy": SPEC}
    return log_trace(
        *ending, [[1, own] for own in range(6)], tmp_path_factory.mktemp("ends"), **sizes
    )


@pytest.mark.parametrize(
    "followed",
    [
        lambda spec: spec,
        lambda spec: Ledger(spec, 0.1),
        lambda spec: Between(spec, opening=3, closing=4),
        lambda spec: ByPosition([(0, "speculative"), (3, spec)]),
        lambda spec: Ledger(ByPosition([(0, spec)]), 0.1),
    ],
)
def test_a_decode_reads_it_as_the_ids_that_end_its_texts(ending, followed):
    options = {"max_new_tokens": 16, "record_rows": True}
    named, by_ids = (
        ct.generate(*ending, IDS, policy=followed(spec), **options) for spec in (SPEC, BY_IDS)
    )
    assert named.output_token_ids.tolist() == by_ids.output_token_ids.tolist()
    assert judged(named) == judged(by_ids) and not any("eos" in spec for spec in judged(named))
    other = ct.generate(*ending, IDS, policy="band:price=1,floor=eos+3", eos_token_ids=9, **options)
    assert judged(other) == {"band:price=1.0,floor=3+9"}


def test_what_is_stored_has_ids(trace, tmp_path):
    assert Trace.open(trace.folder).header.details["policy"] == BY_IDS
    assert replay(trace, SPEC).policy == BY_IDS
    found = tuning.tune(trace, tuning.Costs.ratios(0.1), 9.0, policies=[SPEC])
    tuning.save_tuned(found, tmp_path / "tuned.json")
    assert "eos" not in (tmp_path / "tuned.json").read_text().replace("eos_token_ids", "")
    table = tmp_path / "compare.csv"
    given = ["compare", str(trace.folder), "--policy", SPEC, "--csv", str(table)]
    assert main(given) == 0 and '"band:price=1.0,hold=5+7"' in table.read_text()


def test_elsewhere_it_is_refused_by_name(tiny, capsys):
    q, p = np.array([[0.2, 0.8]]), np.array([[0.9, 0.1]])
    rows = "simulations/data/rows.npz"
    doors = (
        lambda: ct.generate(*tiny, IDS, policy=SPEC, max_new_tokens=4),  # whose texts have no end
        lambda: ct.emitted_law(ct.policy(SPEC), q, p),
        lambda: ct.audit(ct.policy(SPEC), q, p),
        lambda: settings.read({"CACTUS_POLICY": SPEC}),
    )
    for door in doors:
        with pytest.raises(ValueError, match=REFUSED):
            door()
    assert main(["audit", rows, "--policy", SPEC]) == 2
    assert simulate(["throughput", "--policy", SPEC]) == 2
    assert capsys.readouterr().err.count(REFUSED) == 2
    with pytest.raises(ValueError, match="hold: must be token ids, as 2.151645, or eos; got 'end'"):
        ct.policy("band:price=1,hold=end")
