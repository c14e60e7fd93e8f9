import pytest

pytest.importorskip("transformers")
pytest.importorskip("cvxpy")

from simulations.__main__ import main  # noqa: E402
from simulations.common.results import read_csv  # noqa: E402
from simulations.figures.design_example import OUT, closing_tokens, punctuation  # noqa: E402
from tests.amounts import THOROUGH  # noqa: E402

# the command itself takes seconds
FILES = ["written", "committed"] if THOROUGH else ["committed"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("design") / "design_example.csv"
    arguments = [
        "table",
        "design-example",
        "--num-prompts",
        "2",
        "--points",
        "1",
        "--out",
        str(path),
    ]
    assert main(arguments) == 0
    return read_csv(path)


@pytest.mark.parametrize("file", FILES)
def test_every_rule_is_kept_and_every_point_proved(request, file):
    rows = read_csv(OUT)[0] if file == "committed" else request.getfixturevalue("written")[0]
    ceilings = {"protected": 1.0, "capped": 1.5, "free": float("inf")}
    designed = [row for row in rows if (row["kind"], row["design"]) == ("token", "cap")]
    assert {row["role"] for row in designed} == set(ceilings)
    for row in designed:
        assert float(row["h"]) <= ceilings[row["role"]] * float(row["q"]) * (1 + 1e-9)
    curves = [row for row in rows if row["kind"] == "curve"]
    for row in curves:
        assert float(row["kl"]) <= float(row["delta"]) + 1e-7
        assert abs(float(row["gap"])) <= 1e-6 and row["proof"] == "dual bound"
        assert float(row["acceptance"]) >= float(row["lossless"]) - 1e-6


@pytest.mark.skipif(not THOROUGH, reason="runs the command; run by make test-thorough")
def test_the_command_is_written_down(written):
    assert written[1]["command"] == (
        "python -m simulations table design-example --points 1 --num-prompts 2"
    )


def test_which_tokens_are_protected_and_which_capped():
    names = [" the", ".", "\n   ", "_", " x=", "!", "<end>", ", "]
    protected = closing_tokens(names, 6)
    assert protected == [1, 2, 5, 6]
    assert punctuation(names, protected) == [3, 7]


def test_a_row_that_is_not_there_is_one_line(capsys, tmp_path):
    arguments = ["--num-prompts", "1", "--row", "999", "--out", str(tmp_path / "x.csv")]
    assert main(["table", "design-example", *arguments]) == 2
    assert "row: must be from 0 to" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
