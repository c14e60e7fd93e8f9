"""Medians, intervals and costs, on records whose answer is known."""

from pathlib import Path

import pytest

from simulations.__main__ import main
from simulations.common.grid import Config, Grid
from simulations.throughput import table
from simulations.throughput.table import rows

QUALITY = {"log_likelihood": [-2.0], "lengths": [8], "ended": [True]}


def made_up(seconds: dict[str, list[float]]) -> list[dict]:
    lines = [Config("plain", 0, 1), Config("speculative", 4, 1)]
    grid = Grid(lines, prompts=1, repeats=len(seconds["plain"]) - 1)
    results = grid.fill(
        lambda job: {"seconds": seconds[job.config.method][job.repeat], "tokens": 8} | QUALITY
    )
    return rows(grid.runs(results))


def test_ratios_are_medians_of_runs_made_side_by_side() -> None:
    plain, drafted = made_up({"plain": [9.0, 1.0, 2.0, 4.0], "speculative": [9.0, 0.5, 1.0, 4.0]})
    assert plain["speedup_over_plain"] == 1
    assert drafted["speedup_over_plain"] == 2
    assert plain["tokens_per_second"] == 4 and plain["tokens_per_second_max"] == 8
    assert drafted["target_nats_per_token"] == 2


def test_settings_stand_beside_the_faster_plain_decoding_and_their_rivals(tmp_path) -> None:
    found = tmp_path / "settings.csv"
    found.write_text(
        "# command: made up\nlevel,family,policy,verifier,num_draft_tokens\n"
        "0.0,speculative,speculative,block,3\n0.05,cactus:delta,cactus:delta=0.001,chain,4\n"
        "0.05,band:price,band:price=1,chain,5\n0.1,band:price,band:price=0.5,block,6\n"
    )
    settings = table.settings_of(found)
    assert settings[3][0] == Config("band:price=0.5", 6, 1, "block")
    lines = [Config("plain", 0, 1), Config("hf_plain", 0, 1), *(line for line, _ in settings)]
    seconds = dict(
        zip([line.method for line in lines], (4.0, 3.0, 2.0, 1.5, 1.0, 0.5), strict=True)
    )
    grid = Grid(lines, prompts=1, repeats=3)

    def record(job) -> dict:
        kept = {"seconds": seconds[job.config.method], "tokens": 12} | QUALITY
        if job.config.method == "hf_plain":
            return kept
        kept |= {"row_calls": 6, "parts": [0.1, 0.3, 0.0, 0.0], "meter": 0.5}
        return kept | ({"kl": 0.6} if job.config.width else {})

    plain, lossless, cactus, band, block = table.beside_plain(
        grid.runs(grid.fill(record)), settings, 0
    )
    assert (plain["family"], plain["tokens_per_second"], plain["over_passes"]) == (
        "hf_plain",
        4,
        None,
    )
    assert lossless["over_plain"] == 1.5 and lossless["over_lossless"] == 1
    assert (band["over_plain"], band["over_lossless"], band["over_cactus"]) == (3, 2, 1.5)
    assert band["over_cactus_low"] == band["over_cactus_high"] == 1.5
    assert block["over_cactus"] is None and cactus["over_cactus"] == 1
    assert band["tokens_per_call"] == 2 and band["emitted_kl_per_token"] == pytest.approx(0.05)
    assert band["over_passes"] == pytest.approx((1.0 + 0.5) / 0.4)


def test_a_file_of_settings_runs_no_code(tmp_path) -> None:
    found = tmp_path / "settings.csv"
    found.write_text("level,family,policy,verifier,num_draft_tokens\n0.1,mine,my.py:rule,chain,3\n")
    with pytest.raises(ValueError, match="my.py"):
        table.settings_of(found)


def test_the_interval_of_equal_repeats_is_a_point_and_a_wild_one_does_not_move_it() -> None:
    equal = [9.0] + [2.0] * 9
    plain, drafted = made_up({"plain": equal, "speculative": [*equal[:-1], 200.0]})
    assert plain["tokens_per_second_low"] == plain["tokens_per_second_high"] == 4
    assert drafted["tokens_per_second_low"] == 4 and drafted["tokens_per_second_min"] == 0.04


def test_costs_come_from_metered_repeats_and_speed_from_the_others() -> None:
    line = Config("band:price=2", 4, 2)
    grid = Grid([line], prompts=4, repeats=3, metered=2)

    def record(job) -> dict:
        metered = job.repeat < 2
        kept = {"seconds": 50.0 if metered else 2.0, "tokens": 8} | QUALITY
        cost = {"kl": 0.5 + job.repeat, "largest_row_kl": 0.25 * job.group}
        return kept | cost if metered else kept

    (row,) = rows(grid.runs(grid.fill(record)))
    assert row["tokens_per_second"] == 4
    assert row["emitted_kl_per_token"] == pytest.approx((0.5 + 0.5 + 1.5 + 1.5) / 32)
    assert row["largest_row_kl"] == 0.25
    assert row.keys() == dict.fromkeys(table.COLUMNS).keys()


HEAD = "level,family,policy,verifier,num_draft_tokens\n"
LINE = "0.05,band:price,band:price=1,block,4\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ", line 1: must have a column level, between commas; got ''"),
        (HEAD, ", line 1: must have lines below it; got none"),
        (
            "# date: x\n" + HEAD.replace("policy", "rule") + LINE,
            ", line 2: must have a column",
        ),
        ((HEAD + LINE).replace(",", ";"), "got 'level;family;policy;verifier;num_draft_tokens'"),
        (HEAD + "\n" + LINE + "0.05,band\n", ", line 4: must have 5 cells"),
        (HEAD + LINE.replace("4", "4,9"), ", line 2: must have 5 cells"),
        (HEAD + LINE.replace("0.05", "low"), ", line 2, column level: must"),
        (HEAD + LINE.replace("0.05", "nan"), ", line 2, column level: must"),
        (HEAD + LINE.replace("4", "0"), ", line 2, column num_draft_tokens: K: must be a whole"),
        (HEAD + LINE.replace("4", "four"), ", line 2, column num_draft_tokens: K: must be a"),
        (HEAD + LINE.replace("price=1", "prize=1"), ", line 2, column policy: "),
        (HEAD + LINE.replace("block", "blocks"), ", line 2, column verifier: "),
        (HEAD + LINE.replace("band:price=1", "top_k:k=2"), ", line 2, column verifier: "),
        ("level,\xe9".encode("latin-1"), ": must be a CSV in UTF-8; "),
    ],
)
def test_a_file_of_settings_that_is_none_starts_no_decode(text, said, tmp_path, capsys) -> None:
    path = tmp_path / "s.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    asked = ["throughput", "--target", "nothing", "--settings", str(path), "--out"]
    assert main([*asked, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{path}{said}" in error or (f"{path}, line" in error and said in error)
    assert error.count("\n") == 1


def test_a_file_of_settings_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes(b"\xef\xbb\xbf" + (HEAD + LINE).encode())
    ((line, row),) = table.settings_of(tmp_path / "s.csv")
    assert (line.width, line.verifier, row["level"]) == (4, "block", "0.05")
