import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.base.files import write_whole
from cactus_theory.base.rows import load_rows, save_rows

ROOT = Path(__file__).resolve().parents[2]
WRITES = re.compile(
    r"""open\([^)]*["'][wax]b?\+?["']|\.write_(?:text|bytes)\(|\bnp\.save|\.to_csv\(|\.savefig\("""
    r"|json\.dump\(|torch\.save\(|save_file\(|\.save_pretrained\("
)
# what writes otherwise than by write_whole, and why a kill cannot leave half of a result there
OTHERWISE = {
    "cactus_theory/base/rows.py": "np.save into memory, for write_whole",
    "cactus_theory/vllm/accounts.py": "appends one line a request",
    "cactus_theory/base/files.py": "write_whole itself",
    "cactus_theory/commands/plot.py": "into memory",
    "paper_figures/_style.py": "imports nothing of the library: to another name, then renamed",
    "simulations/common/journal.py": "appends lines; a half-written one is cut off",
    "simulations/common/results.py": "into memory",
    "simulations/gpu_check/command.py": "what a piece prints: no result",
    "simulations/smollm.py": "a folder of its own, renamed once it is whole",
    "simulations/all_tables.py": "appends what commands print: no result",
    "simulations/price_travels.py": "to another name, then renamed",
    "simulations/train/fit.py": "a work folder that every run writes again",
    "simulations/train/pair.py": "a work folder that every run writes again",
}


def test_results_are_there_whole_or_not_at_all():
    """Every file that is written goes through write_whole, or is listed with a reason."""
    folders = ("cactus_theory", "solvers", "simulations", "paper_figures")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if WRITES.search(path.read_text(encoding="utf-8"))
    }
    assert found == OTHERWISE.keys()


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """A name that is given before the content is written down may be of nothing after a crash."""
    steps, fsync, replace = [], os.fsync, os.replace

    def spied_fsync(handle):
        steps.append(("on the disk", os.fstat(handle).st_size))
        fsync(handle)

    def spied_replace(old, new):
        steps.append(("named", Path(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    path = tmp_path / "rows.bin"
    write_whole(path, b"0123456789")
    assert steps == [("on the disk", 10), ("named", path)]
    assert path.read_bytes() == b"0123456789" and list(tmp_path.iterdir()) == [path]


ROWS = np.array([[0.25, 0.75, 0.0], [0.5, 0.125, 0.375]])


def written(tmp_path, suffix, **arrays):
    """Return a file of arrays; of the formats without names, of the last one."""
    path, rows = tmp_path / f"rows{suffix}", list(arrays.values())[-1]
    if suffix == ".npy":
        np.save(path, rows)
    elif suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.write_text(json.dumps(np.asarray(rows).tolist()))
    return str(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".json"])
def test_every_format_gives_the_rows_back_and_a_missing_file_is_named(tmp_path, suffix):
    for rows in (ROWS, ROWS[0]):
        loaded = load_rows(written(tmp_path, suffix, rows=rows))
        assert loaded.dtype == np.float64
        np.testing.assert_array_equal(loaded, rows)
    with pytest.raises(OSError, match="absent.*no such file"):
        load_rows(str(tmp_path / f"absent{suffix}"))
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(OSError, match="folder.*is a directory"):
        load_rows(str(tmp_path / f"folder{suffix}"))


def test_floats_keep_their_dtype_and_integers_become_float64(tmp_path):
    for given, dtype in ((np.float32, np.float32), (np.int64, np.float64), (">f8", np.float64)):
        rows = ROWS.round().astype(given)
        loaded = load_rows(written(tmp_path, ".npy", rows=rows))
        assert loaded.dtype == dtype and loaded.dtype.isnative
        np.testing.assert_array_equal(loaded, rows)


def test_a_name_picks_one_array_of_several(tmp_path):
    path = written(tmp_path, ".npz", target=ROWS, draft=ROWS[0])
    np.testing.assert_array_equal(load_rows(f"{path}::draft"), ROWS[0])
    with pytest.raises(ValueError, match=r"name one of .*target.* after '::'; got no name"):
        load_rows(path)
    with pytest.raises(ValueError, match=r"after '::'; got 'verifier'"):
        load_rows(f"{path}::verifier")
    with pytest.raises(ValueError, match="only .npz holds"):
        load_rows(written(tmp_path, ".npy", rows=ROWS) + "::rows")


def test_logits_become_a_float64_softmax_of_a_finite_maximum(tmp_path):
    logits = np.array([[1000.0, 1000.0, -np.inf], [0.0, np.log(3.0), -1e4]], np.float64)
    loaded = load_rows(written(tmp_path, ".npy", rows=logits), logits=True)
    np.testing.assert_allclose(loaded, [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], atol=1e-15)
    half = load_rows(written(tmp_path, ".npy", rows=np.zeros((2, 7), np.float16)), logits=True)
    assert half.dtype == np.float64
    np.testing.assert_allclose(half.sum(-1), 1.0, atol=1e-15)
    for bad in (np.nan, np.inf, -np.inf):
        path = written(tmp_path, ".npy", rows=np.array([[0.0, 0.0], [bad, bad]]))
        with pytest.raises(ValueError, match="finite maximum"):
            load_rows(path, logits=True)


@pytest.mark.parametrize(
    "suffix, text, message",
    [
        (".json", "[[0.5, 0.5], [1.0]]", "equal lengths"),
        (".json", '{"rows": [1]}', r"at least one token; got shape \(\)"),
        (".json", "0.5", "at least one token"),
        (".json", "[]", "at least one token"),
        (".json", '["a", "b"]', "must hold numbers"),
        (".json", "[true, false]", "must hold numbers"),
        (".json", "[1.0, null]", "must hold numbers"),
        (".csv", "0.5,0.5", r"suffix must be one of .*\.npy"),
    ],
)
def test_wrong_contents_name_the_rule(tmp_path, suffix, text, message):
    path = tmp_path / f"rows{suffix}"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_rows(str(path))
    assert str(path) in str(caught.value)


def test_saved_rows_come_back(tmp_path):
    path = str(tmp_path / "rows.npy")
    save_rows(path, ROWS)
    np.testing.assert_array_equal(load_rows(path), ROWS)
    with pytest.raises(ValueError, match="suffix must be .npy"):
        save_rows(str(tmp_path / "rows.csv"), ROWS)
    with pytest.raises(OSError, match="must be a writable file; No such file"):
        save_rows(str(tmp_path / "absent" / "rows.npy"), ROWS)
