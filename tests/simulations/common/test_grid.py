"""Which decodes there are, in what order, and what their results are called."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cactus_theory.base.specs import files_of, label
from simulations.common import grid as grid_module
from simulations.common.grid import Config, Grid, checked_policy, configs
from simulations.common.journal import Journal


def test_grid_gives_k_to_what_drafts_and_batches_to_what_takes_them() -> None:
    found = configs(["plain", "hf_assisted"], ["speculative"], [2, 4], [1, 8])
    assert found == [
        Config("plain", 0),
        *(Config("hf_assisted", k) for k in (2, 4)),
        *(Config("speculative", k) for k in (2, 4)),
        Config("plain", 0, batch=8),
        *(Config("speculative", k, batch=8) for k in (2, 4)),
    ]


def test_jobs_cover_every_prompt_once_a_repeat_and_repeats_follow_each_other() -> None:
    lines = [Config("plain", 0), Config("plain", 0, batch=4)]
    todo = list(Grid(lines, prompts=6, repeats=2, metered=2).jobs.values())
    assert len({job.key for job in todo}) == len(todo) == 4 * (6 + 2)
    assert [job.repeat for job in todo] == sorted(job.repeat for job in todo)
    for start in range(0, len(todo), 8):
        groups = [job.group for job in todo[start : start + 8] if job.config.batch == 1]
        assert groups == list(range(6))


def test_a_rule_in_a_file_keeps_its_spec(monkeypatch) -> None:
    spec, asked = "some/where/mine.py:careful:alpha=0.5", []
    rule = SimpleNamespace(at_ends=lambda ends: None)
    monkeypatch.setattr(grid_module, "read_rule", lambda own: asked.append(own) or rule)
    assert checked_policy(spec) == spec and asked == [spec]


def test_policies_go_to_every_verifier_that_can_follow_them() -> None:
    policies, both = ["band:price=1", "band:price=1,per_row=True", "typical"], ["chain", "block"]
    found = configs(["plain"], policies, [2], [1], both)
    assert found == [
        Config("plain", 0),
        Config("band:price=1.0", 2),
        Config("band:price=1.0", 2, "block"),
        Config("band:price=1.0,per_row=True", 2, "block"),
        Config("typical", 2),
    ]
    assert [line.key for line in found[1:3]] == [
        "band:price=1.0|K=2|batch=1",
        "band:price=1.0@block|K=2|batch=1",
    ]


@pytest.mark.parametrize(
    ("policy", "verifiers", "said"),
    [
        ("typical", ["block"], "--verifier: one must be able to follow typical.*write it as f"),
        ("typical", ["chain", "knot"], "--verifier: must be among .*; got 'knot'"),
    ],
)
def test_a_policy_that_no_verifier_can_follow_is_refused(policy, verifiers, said) -> None:
    with pytest.raises(ValueError, match=said):
        configs([], [policy], [2], [1], verifiers)


LABELS = [
    ("speculative", "speculative", "", []),
    ("band:price=2.0", "band", "price=2.0", []),
    ("band:price=2,divergence=reverse_kl", "band", "price=2,divergence=reverse_kl", []),
    ("band:price=1,divergence=some/where/mine.py:far", "band", "price=1,divergence=mine.py:far",
     ["some/where/mine.py"]),
    ("some/where/mine.py:careful:alpha=0.5", "mine.py:careful", "alpha=0.5",
     ["some/where/mine.py"]),
]  # fmt: skip


@pytest.mark.parametrize(("method", "name", "knob", "files"), LABELS)
def test_a_method_has_a_name_a_knob_and_files(method, name, knob, files) -> None:
    assert label(method) == (name, knob)
    assert files_of(method) == [Path(file) for file in files]


def test_a_grid_makes_what_its_journal_lacks_and_sums_it(tmp_path: Path) -> None:
    grid, made = Grid([Config("a", 2), Config("b", 2, batch=2)], prompts=3, repeats=2), []

    def record(job) -> dict:
        made.append(job.key)
        return {"tokens": 6, "seconds": 1.0 + job.repeat}

    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        part = {key: job for key, job in grid.jobs.items() if job.repeat == 0}
        for key, job in part.items():
            journal.add(key, record(job))
    assert made == list(part)
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        results = dict(grid.fill(record, journal))
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        assert journal.results == results  # all of it is on disk
    # a call for nothing warms each line up, as its untimed decodes are there already
    warmed, rest = made[len(part) : len(part) + 2], made[len(part) + 2 :]
    assert {key.split("|")[0] for key in warmed} == {"a", "b"}
    assert list(part) + rest == list(grid.jobs) == list(results)
    made.clear()
    grid.fill(record)
    assert made == list(grid.jobs)  # repeats that are metered come first: nothing is warmed up
    own = grid.runs(results)[grid.lines[0]]
    assert (own.total("tokens"), own.ratio("tokens", "seconds")) == (18, 6)
    assert own.speeds.tolist() == [3, 2] and list(map(len, own.timed)) == [3, 3]


def test_repeats_that_are_all_timed_or_all_metered_stand_for_the_others() -> None:
    for metered, repeats in ((0, 2), (2, 0)):
        grid = Grid([Config("a", 2)], 1, repeats, metered)
        (own,) = grid.runs(grid.fill(lambda job: {"tokens": job.repeat, "seconds": 1.0})).values()
        assert own.total("tokens") == 1 and own.speeds.tolist() == [0, 1]
