"""Values learned and blocks compared as a user does it: files, resuming, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from cactus_theory.policies._knobs import read_values  # noqa: E402
from cactus_theory.traces import Trace, learn_values, replay, save_trace  # noqa: E402
from cactus_theory.traces.estimate import tokens_at  # noqa: E402
from simulations import blocks  # noqa: E402
from simulations.__main__ import main  # noqa: E402
from simulations.blocks import REFERENCE, Family, certain_families, families  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from tests.amounts import THOROUGH  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "simulations" / "data" / "trace"
LEARN = "--num-draft-tokens 2 --cycles 4 --prices 1 2 --knots 0.5 1".split()
TABLE = ("table", "blocks")
LEVEL = 0.03
BLOCKS = f"--num-draft-tokens 2 --levels {LEVEL}".split()


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> Path:
    """Return a file that the command made."""
    file = tmp_path_factory.mktemp("values") / "own.json"
    assert main(["values", str(EXAMPLE), *LEARN, "--out", str(file)]) == 0
    return file


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let families have two knob values on either side of the level; fewer of them if in haste."""
    monkeypatch.setattr(blocks, "DELTAS", (1e-4, 0.03))
    monkeypatch.setattr(blocks, "BUDGETS", (0.005, 0.4))
    monkeypatch.setattr(blocks, "PRICES", (8.0, 0.45))
    monkeypatch.setattr(blocks, "VALUED_PRICES", (20.0, 1.0))
    monkeypatch.setattr(blocks, "families", taken)


def taken(values: list[Path]) -> list[Family]:
    """Return all families, or those without a budget."""
    return [family for family in families(values) if THOROUGH or "delta" not in family.name]


def test_values_are_written_with_what_made_them(values: Path, capsys) -> None:
    expected = learn_values(
        Trace.open(EXAMPLE), num_draft_tokens=2, cycles=4, prices=[1, 2], knots=[0.5, 1]
    )
    assert read_values(str(values)) == expected
    origin = json.loads(values.read_text())["made"]
    assert origin["command"] == (
        "python -m simulations values trace --num-draft-tokens 2 --cycles 4 --prices 1 2 "
        "--knots 0.5 1"
    )
    assert (origin["trace"], origin["cycles"]) == ("trace", 4)
    assert str(Path.home()) not in values.read_text()
    assert main(["values", str(EXAMPLE), *LEARN, "--out", str(values)]) == 0
    assert "2 prices, up to 1 tokens to follow" in capsys.readouterr().out


def test_blocks_are_compared_and_taken_up(values: Path, few, tmp_path, capsys, monkeypatch) -> None:
    out, published = tmp_path / "out", tmp_path / "blocks.csv"
    arguments = [*TABLE, str(EXAMPLE), *BLOCKS, "--values", str(values)]
    flags = ["--out", str(out), "--publish", str(published)]
    assert main([*arguments, *flags]) == 0
    first = capsys.readouterr().out
    written, notes = read_csv(out / "blocks.csv")
    assert published.read_bytes() == (out / "blocks.csv").read_bytes()
    assert notes["command"] == (
        "python -m simulations table blocks trace --values own.json --num-draft-tokens 2 "
        f"--levels {LEVEL}"
    )
    assert (notes["trace"], notes["cycles"], notes["texts"]) == ("trace", "68", "11")
    known = taken([values])
    names = {level: [r["family"] for r in written if float(r["kl_per_token"]) == level]
             for level in (0.0, LEVEL)}  # fmt: skip
    assert names[0.0] == [family.name for family in known if family.lossless]
    assert names[LEVEL] == [family.name for family in known if not family.lossless]
    check_numbers(written, known)
    journal = (out / "journal.jsonl").read_text()
    assert len(journal.splitlines()) == 1 + sum(len(family.policies) for family in known)

    monkeypatch.setattr(blocks, "replay", lambda *_, **__: pytest.fail("replayed again"))
    assert main([*arguments, "--out", str(out)]) == 0
    assert capsys.readouterr().out == first
    assert (out / "journal.jsonl").read_text() == journal
    cut = journal[: journal.rindex('{"job"') + 40]  # as a kill leaves it
    (out / "journal.jsonl").write_text(cut)
    missing = []
    monkeypatch.setattr(blocks, "replay", lambda *a, **k: missing.append(a) or replay(*a, **k))
    assert main([*arguments, "--out", str(out)]) == 0
    assert len(missing) == 1 and capsys.readouterr().out == first
    assert (out / "journal.jsonl").read_text() == journal


def check_numbers(written: list[dict], known: list) -> None:
    """Hold some cells to replays made here."""
    for name in (REFERENCE, "soft_band:price, block"):
        family = next(own for own in known if own.name == name)
        row = next(own for own in written if own["family"] == name)
        own = [
            replay(EXAMPLE, policy, family.verifier, num_draft_tokens=2)
            for policy in family.policies
        ]
        assert float(row["tokens_per_call"]) == pytest.approx(tokens_at(own, LEVEL).value)
        assert (float(row["ratio"]) == 1) == (name == REFERENCE)
        assert (float(row["ratio_se"]) == 0) == (name == REFERENCE)


@pytest.fixture(scope="module")
def certain(tmp_path_factory) -> Path:
    """Return the example as if its drafter had been certain of its tokens."""
    example = Trace.open(EXAMPLE)
    texts: dict[int, list] = {}
    for cycle in example:
        texts.setdefault(cycle.text, []).append(replace(cycle, draft_probs=None))
    folder = tmp_path_factory.mktemp("certain") / "trace"
    save_trace(folder, texts.values(), vocab_size=example.header.vocab_size, num_draft_tokens=4)
    return folder


def test_looking_ahead_along_certain_drafts_is_worth_tokens(certain, few, tmp_path, capsys) -> None:
    level = "0.05"
    arguments = [*TABLE, str(certain), "--num-draft-tokens", "4", "--levels", level]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    written, notes = read_csv(tmp_path / "blocks.csv")
    tokens = {row["family"]: float(row["tokens_per_call"]) for row in written}
    assert list(tokens) == [knobs.name for knobs in certain_families()]
    ahead, alone = (tokens[f"soft_band:{knobs}price, block"] for knobs in ("", "ahead=False,"))
    # a certain draft ends at its first refusal under either verifier
    assert alone == pytest.approx(tokens[REFERENCE])
    assert ahead > alone
    assert json.loads(notes["trace_made"])["num_draft_tokens"] == 4
    capsys.readouterr()
    assert main([*arguments, "--values", "own.json", "--out", str(tmp_path)]) == 2
    assert "--values: certain drafts are known to their end" in capsys.readouterr().err


def test_other_values_do_not_go_into_the_same_journal(
    values, few, tmp_path, capsys, monkeypatch
) -> None:
    lossless, file = replay(EXAMPLE, "speculative", num_draft_tokens=2), tmp_path / "own.json"
    file.write_text(values.read_text())
    arguments = [
        "table",
        "blocks",
        str(EXAMPLE),
        *BLOCKS,
        "--out",
        str(tmp_path / "out"),
        "--values",
    ]
    monkeypatch.setattr(blocks, "replay", lambda *_, **__: lossless)
    assert main([*arguments, str(file)]) == 0
    capsys.readouterr()
    file.write_text(file.read_text().replace('"format": 1', '"format":  1'))
    assert main([*arguments, str(file)]) == 2
    error = capsys.readouterr().err
    assert "journal.jsonl belongs to a run with another own.json" in error
    assert "name another folder or delete it" in error
    assert len(error) < 400 and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TABLE, "nowhere"], "must be the folder of a trace; no such folder"),
        (
            [*TABLE, str(EXAMPLE), "--num-draft-tokens", "5"],
            "from 1 to the 4 logged; got 5",
        ),
        (
            [*TABLE, str(EXAMPLE), "--num-draft-tokens", "0"],
            "from 1 to the 4 logged; got 0",
        ),
        (
            [*TABLE, str(EXAMPLE), "--num-draft-tokens", "2", "--values", "no.json"],
            "no.json",
        ),
        (["values", "nowhere"], "must be the folder of a trace; no such folder"),
        (["values", str(EXAMPLE), "--prices", "2", "1"], "prices that do not rise"),
        (["values", str(EXAMPLE), "--prices", "0"], "prices: must lie in (0, inf]; got 0"),
        (["values", str(EXAMPLE), "--knots", "0.5"], "knots that do not rise"),
        (["values", str(EXAMPLE), "--num-draft-tokens", "0"], "num_draft_tokens: must be"),
        (["values", str(EXAMPLE), "--divergence", "total_variation"], "smooth generator"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("build/*.json"))


def test_a_bad_file_of_values_is_told_before_anything_is_replayed(
    few, tmp_path, capsys, monkeypatch
) -> None:
    bad, other = tmp_path / "bad.json", tmp_path / "other" / "bad.json"
    bad.write_text('{"format": 7}')
    monkeypatch.setattr(blocks, "replay", lambda *_, **__: pytest.fail("replayed"))
    arguments = [
        "table",
        "blocks",
        str(EXAMPLE),
        *BLOCKS,
        "--out",
        str(tmp_path / "out"),
        "--values",
    ]
    for files, message in (
        ([bad], "must say format 1; got 7"),
        ([bad, other], "--values: files must have different names; got bad.json bad.json"),
    ):
        assert main([*arguments, *map(str, files)]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1
