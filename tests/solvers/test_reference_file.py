"""The stored programs are those that the writer would store again, and writing is safe."""

import json

import numpy as np
import pytest

from cactus_theory.divergences import EXAMPLES
from solvers import __main__ as command_line
from solvers import reference
from tests.amounts import some
from tests.test_reference import FILE

# answers of another solver version may differ in digits that no test relies on
AGAIN = 1e-7


@pytest.mark.parametrize("spec", some(EXAMPLES, 3))
def test_the_stored_cases_are_reproduced(spec):
    fresh = list(reference.cases(spec))
    with np.load(FILE) as stored:
        of_spec = stored["divergence"] == spec
        assert len(fresh) == of_spec.sum()
        for name in ("target_probs", "draft_probs", "delta"):
            rows = np.array([getattr(case, name) for case in fresh])
            np.testing.assert_allclose(rows, stored[name][of_spec], rtol=1e-12, atol=1e-15)
        for name in ("acceptance", "raised"):
            values = [getattr(case, name) for case in fresh]
            np.testing.assert_allclose(values, stored[name][of_spec], rtol=0, atol=AGAIN)
        for name in ("family", "support", "vocabulary", "token"):
            assert [getattr(case, name) for case in fresh] == stored[name][of_spec].tolist()


def test_nonzero_entries_are_large_enough_for_a_solver():
    for case in reference.cases("kl"):
        for row in (case.target_probs, case.draft_probs):
            assert row[row > 0].min() >= reference.SMALLEST
            assert row.sum() == pytest.approx(1, abs=1e-12)


def test_the_command_writes_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "tables", lambda: small_tables("total_variation"))
    path = tmp_path / "new" / "some.npz"
    assert command_line.main(["reference", "--out", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["file"], row["cases"], row["bytes"]) == (str(path), 20, path.stat().st_size)
    with np.load(path, allow_pickle=False) as file:
        assert set(file["divergence"]) == {"total_variation"}
        assert str(file["command"]) == "python -m solvers reference"
    assert [entry.name for entry in path.parent.iterdir()] == ["some.npz"]


def small_tables(spec, real=reference.tables):
    return real((spec,))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "some.npz"
    reference.write(path, {"x": np.ones(2)})
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        reference.write(path, {"x": np.zeros(3)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.npz"]


def test_equal_tables_give_equal_bytes(tmp_path):
    for name in ("a.npz", "b.npz"):
        reference.write(tmp_path / name, {"x": np.arange(3.0), "note": np.array("text")})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
