"""Compiled loops over rows: their formulas, the same laws without numba, caches, threads."""

import math
import os
import runpy
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.divergences import list_divergences
from cactus_theory.optimum.band_row import (
    CURVES,
    BudgetRow,
    PricedBand,
    PricedRow,
    curve_of,
)
from cactus_theory.optimum.band_row import loops as compiled_loops
from cactus_theory.optimum.bands import Bands
from cactus_theory.optimum.boxes import FREE
from tests.amounts import amount
from tests.rows import pair

pytest.importorskip("cactus_theory.optimum.row_edges", exc_type=ImportError)  # needs numba
loops = compiled_loops()
ROOT = Path(__file__).resolve().parents[2]
# relative, of formulas of a few float64 operations; f near 1 is a difference of rounded terms
FORMULA, NEAR_ONE = 1e-12, 1e-14
SPECS = [kind.name for kind in CURVES] + ["alpha:a=0.5", "alpha:a=3", "alpha:a=-1.5"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_compiled_formulas_are_those_of_the_class(spec):
    f = ct.divergence(spec)
    c, a = curve_of(f)
    at_zero = float(f.centred_slope(torch.zeros((), dtype=torch.float64)))
    assert loops.slope_of(c, a, 0.0) == pytest.approx(at_zero, rel=FORMULA)
    for t in (1e-6, 0.03, 0.999, 1.0, 1.5, 40.0, 1e5):
        at = torch.tensor(t, dtype=torch.float64)
        slope, value = float(f.centred_slope(at)), float(f.centred(at))
        assert loops.slope_of(c, a, t) == pytest.approx(slope, rel=FORMULA, abs=NEAR_ONE)
        assert loops.value_of(c, a, t) == pytest.approx(value, rel=1e-9, abs=NEAR_ONE)
        for step in (0.01, 0.6, 30.0):
            lower = float(f.ratio_at(f.slope(at) - step))
            found = loops.lower_of(c, a, step, t)
            assert found == pytest.approx(lower, rel=1e-9, abs=1e-300)
            if 0 < lower < t and step < 1:
                fall = float(
                    f.curvature(at) / f.curvature(torch.tensor(lower, dtype=torch.float64))
                )
                assert loops.fall_of(a, t, found) == pytest.approx(fall, rel=1e-9)


def test_every_smooth_registered_divergence_is_compiled_and_no_subclass():
    smooth = {ct.divergence(name) for name in list_divergences() if name not in ("alpha", "renyi")}
    smooth = {kind for kind in smooth if kind.generator is kind and kind.smooth}
    assert {type(kind) for kind in smooth} == set(CURVES)
    own = type("Own", (type(ct.divergence("kl")),), {})
    assert curve_of(own()) is None and curve_of(ct.divergence("total_variation")) is None


SCRIPT = """
import sys, warnings, torch
hidden = sys.argv[1]
if hidden == "numba":
    sys.modules["numba"] = None
if hidden == "cache":  # as where no folder can be written
    import numba.core.caching
    numba.core.caching.CacheImpl._locator_classes = []
import cactus_theory as ct
assert "numba" not in sys.modules or hidden != "none"  # it loads with the first row
source = torch.Generator().manual_seed(1)
q, p = (torch.randn(2, 4, 60, generator=source, dtype=torch.float64) * 2).softmax(-1)
ids = p[:3].multinomial(1, generator=source).T
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for spec in ("price=1", "price=0.7,divergence=reverse_kl", "delta=0.1", "price=1,head=0.2"):
        rule = ct.policy("band:" + spec)
        print(*ct.emitted_law(rule, q, p).flatten().tolist())
        for verify in (ct.verify_chain, ct.verify_block):
            coins = torch.full((1, 3), 0.9), torch.full((1,), 0.6)
            found = verify(rule, q[None], p[None, :3], ids, coins=coins)
            print(*found.output_token_ids.flatten().tolist())
print(len(said), *{str(one.message).split(" (")[0] for one in said})
"""


def test_laws_are_the_same_without_numba_and_without_a_cache():
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT, hidden], text=True, capture_output=True)
        for hidden in ("none", "numba", "cache")[: amount(2, 3)]
    ]
    assert not any(run.returncode for run in runs), [run.stderr for run in runs]
    *whole, said = zip(*(run.stdout.splitlines() for run in runs), strict=True)
    for line in whole:
        numbers = [list(map(float, text.split())) for text in line]
        assert numbers[1] == pytest.approx(numbers[0], abs=1e-12)
        assert numbers[2:] in ([], [numbers[0]])
    assert said == ("0", "1 numba does not load", "0")[: len(said)]


# the largest file that the process may write, as on a full disk; a command of cactus_theory
COMMAND = """
import resource, sys, tempfile
tempfile.gettempdir()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from cactus_theory.cli import main
sys.exit(main(sys.argv[2:]))
"""


def changed(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16  # of an entry, a byte of its machine code
    path.write_bytes(b"" if damage == "empty" else content)


@pytest.mark.thorough
def test_a_damaged_cache_and_a_full_disk_cost_time_alone(tmp_path: Path):
    """The same numbers, one warning; what was damaged is made anew."""
    (tmp_path / "rows.npz").write_bytes((ROOT / "simulations/data/rows.npz").read_bytes())
    asked = ["audit", str(tmp_path / "rows.npz"), "--policy", "band:price=1", "--json"]
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "OMP_NUM_THREADS": "1"}

    def run(most: int = -1, **more: str) -> tuple[str, int]:
        command = [sys.executable, "-c", COMMAND, str(most), *asked]
        done = subprocess.run(command, capture_output=True, text=True, env=env | more)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("Warning") == done.stderr.count("numba's cache in")
        return done.stdout, done.stderr.count("numba's cache in")

    whole, said = run()
    assert not said and whole
    for kind, damage in (("nbc", "changed"), ("nbi", "empty"), ("nbc", "empty")):
        files = [*(tmp_path / "kept").rglob(f"*.{kind}")]
        assert len(files) > 5
        for path in files:
            changed(path, damage)
        assert [run(), run()] == [(whole, 1), (whole, 0)]
    assert run(1000, NUMBA_CACHE_DIR=str(tmp_path / "full")) == (whole, 1)


# a loop of our own: compiled as all others
LOOP = """
from cactus_theory.optimum.passes import compiled

@compiled
def twice(x):
    return 2.0 * x
"""


def test_a_damaged_entry_is_compiled_anew_and_said_once(tmp_path: Path, monkeypatch):
    from numba import config

    from cactus_theory.optimum.passes import _Entries

    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(_Entries, "said", False)

    def found() -> tuple[float, int, int]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            twice = runpy.run_path(str(tmp_path / "loop.py"))["twice"]
            (number, *_), stats = (twice(1.5), twice(1.5)), twice.stats
        hits = sum(stats.cache_hits.values())
        return number, hits, len(said)

    runpy.run_path(str(tmp_path / "loop.py"))["twice"](np.ones(3))
    (of_arrays,) = (tmp_path / "kept").rglob("*.nbc")
    assert found() == (3.0, 0, 0)
    (of_numbers,) = {*of_arrays.parent.glob("*.nbc")} - {of_arrays}
    of_numbers.write_bytes(of_arrays.read_bytes())  # as an index does of which a byte changed
    assert found() == (3.0, 0, 1) and found() == (3.0, 1, 0)
    of_numbers.unlink()
    for kind, damage in (("nbc", "changed"), ("nbc", "empty"), ("nbi", "empty")):
        (path,) = (tmp_path / "kept").rglob(f"*.{kind}")
        changed(path, damage)
        assert found() == (3.0, 0, 0)
        assert found() == (3.0, 1, 0)
    for path in (tmp_path / "kept").rglob("*.nb?"):  # nothing may be written
        path.unlink()
        path.mkdir()
    assert found() == (3.0, 0, 0)


def test_threads_solve_rows_at_once():
    q, p = pair(64, 300, seed=3)
    rule = ct.policy("band:price=1")
    alone = rule.emitted(q, p)
    with ThreadPoolExecutor(8) as pool:
        for law in pool.map(lambda _: rule.emitted(q, p), range(24)):
            assert torch.equal(law, alone)


def test_a_budget_of_float32_rows_with_zeros_is_that_of_float64_rows():
    q, p = (row.numpy().astype(np.float32) for row in pair(20, 9, seed=1, kinds=("zeros", "zeros")))
    f = ct.divergence("reverse_kl")
    for rows in zip(q, p, strict=True):
        narrow, wide = (
            BudgetRow(*(row.astype(kind) for row in rows), f, 0.05)
            for kind in (np.float32, np.float64)
        )
        assert not narrow.upper_exceeds(math.inf) and not wide.upper_exceeds(math.inf)
        assert (narrow.scale, narrow.upper) == (wide.scale, wide.upper)


def test_a_token_that_a_float32_target_excludes_is_not_raised():
    q, p = np.array([1.0, 0.0], np.float32), np.array([0.5, 0.5], np.float32)
    row = ct.policy("band:price=1").row(q, p)
    row.upper_exceeds(math.inf)
    assert row.raised(1, q[1], p[1]) == 0 == row.law_at(1, q, p)


@pytest.mark.parametrize("spec", SPECS)
def test_a_compiled_search_within_a_budget_ends_by_itself(spec):
    """A row that is given up is solved once more in torch: the same edges, many times as slow."""
    f, generator = ct.divergence(spec), torch.Generator().manual_seed(4)
    for delta in (1e-4, 0.05, 1.0):
        q, p = torch.randn(2, 300, generator=generator, dtype=torch.float64).mul(0.7).softmax(-1)
        cost = (q * f.centred(p / q)).numpy()
        ends = float((p / q).min()), float((p / q).max())
        row = q.numpy(), p.numpy(), cost, False, curve_of(f), delta, 1.0, 1.0, ends, FREE
        assert loops.edges_within(*row)[2]


@pytest.mark.parametrize("before", [0, 512, 1000])
def test_a_draw_at_a_sum_takes_the_next_token(before):
    """Within a block of tokens that are added up at once, and at the end of one."""
    q = torch.cat([torch.zeros(before), torch.tensor([0.25, 0.0, 0.25, 0.5])]).double().numpy()
    drawn = [loops.draw_left(q, q[:0], 1.0, draw) - before for draw in (0.0, 0.25, 0.5, 0.75)]
    assert drawn == [0, 2, 3, 3]
    ends = torch.tensor([0.5] + [0.0] * 511 + [0.5]).double().numpy()
    assert loops.draw_left(ends, ends[:0], 1.0, 0.5) == 512


@pytest.mark.parametrize("spec", ["kl", "reverse_kl", "jensen_shannon"])
@pytest.mark.parametrize("price", [1e-3, 1e-300])
def test_one_row_and_a_batch_have_one_law_at_the_end_of_the_path(spec, price):
    """Where a token of 1e-300 is to rise to the draft's 0.5."""
    q, p = torch.tensor([[1.0, 1e-300], [0.5, 0.5]], dtype=torch.float64)
    rule = ct.policy(f"band:price={price},divergence={spec}")
    law = rule.emitted(q, p)
    best = ct.optimal_acceptance(q, p, price=price, divergence=spec)
    assert torch.allclose(law, best.target, rtol=1e-12, atol=0)
    assert law.tolist() == pytest.approx([0.5, 0.5])
    row = rule.row(q.numpy(), p.numpy())
    assert row.upper_exceeds(1e299) and not row.upper_exceeds(math.inf)


@pytest.mark.parametrize("price", [0.3, 2.0])
def test_a_token_below_normal_numbers_is_written_no_higher(price):
    """Where nothing else is cut, too, and the upper edge is infinite."""
    q = torch.tensor([[0.5, 0.3, 0.2, 1e-310]], dtype=torch.float64)
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64)
    law = Bands(ct.divergence("kl"), price=price).laws(q, p)
    assert float(law[0, 3]) <= 1e-310 and float(law.sum()) == pytest.approx(1)


def test_a_search_keeps_the_edges_that_it_has_found():
    """At this row the bracket is a last bit wide when Newton's step is 0: Σ h is 1 to rounding."""
    q = np.array([0.1930218242585036, 0.0, 0.10346648408623904, 0.23383919112736257])
    q = np.append(q, [0.4696725005278948, 0.0])
    p = np.array([0.010072677655387842, 0.0435213987519015, 0.23625767894705327])
    p = np.append(p, [0.3262547961281069, 0.11920754671308603, 0.2646859018044643])
    row = PricedRow(q, p, PricedBand(ct.divergence("alpha:a=3"), 0.1), 0.8157190635451506)
    row.write(q, p, law := np.empty(6))
    assert law.sum() == pytest.approx(1, abs=1e-14)


def test_a_row_by_itself_on_a_path_passes_what_its_own_ratio_allows():
    """Of P = 1 in its band, g is P times that: g/q of a raised token is below P b."""
    q, p, alive = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3]), 0.25
    rule = ct.policy("band:price=1,per_row=True")
    row = rule.row(q, p, alive)
    row.upper_exceeds(math.inf)
    level = row.ratio_of(1, 0.3, 0.5) * 0.5 / 0.3  # g/q
    assert level < 1
    for share, passes in ((0.9, True), (1.1, False)):
        fresh = rule.row(q, p, alive)
        sure = fresh.exceeds(1, share * level)
        assert not sure or passes  # unread or not, nothing above g/q is passed
