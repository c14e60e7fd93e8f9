"""The page to play with computes the package's numbers, in a browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import cactus_theory as ct

SITE = Path(__file__).resolve().parents[2] / "simulations" / "site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
# a browser without a screen, sandbox, network and profile of its own
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# both sides bisect to the last bits; sums of twelve terms and roots are what is left
SAME = 1e-9
ROWS, TOKENS = 12, 12
PAGE = """<pre id="out"></pre><script src="play.js"></script><script>
out.textContent = JSON.stringify({cases}.map(c => Play[c.rule](c.q, c.p, ...c.knobs)));
</script>"""


def spec_of(rule: str, knobs: list) -> str:
    if rule != "band":
        return f"{rule}:{'delta' if rule == 'cactus' else 'lenience'}={knobs[0]}"
    price, head, held = knobs
    boxes = f",head={head}" * (head > 0) + f",hold={'+'.join(map(str, held))}" * bool(held)
    return f"band:price={price}{boxes}"


def cases() -> list[dict]:
    draw, found = np.random.default_rng(3), []
    for number in range(ROWS):
        q, p = draw.dirichlet([0.5] * TOKENS), draw.dirichlet([0.5] * TOKENS)
        q, p = (row + 1e-12 for row in (q, p)) if number % 2 else (q, p)
        q, p = q / q.sum(), p / p.sum()
        rules = [("cactus", [delta]) for delta in (1e-4, 0.1, 3.0)]
        rules += [("lenience", [ell]) for ell in (0.9, 0.2)]
        rules += [("band", [price, 0, []]) for price in (0.1, 1.0, 7.0)]
        rules += [("band", [0.5, 0.3, []]), ("band", [0.5, 0, [1, 4]])]
        found += [{"q": list(q), "p": list(p), "rule": rule, "knobs": own} for rule, own in rules]
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_computes_the_packages_numbers(tmp_path) -> None:
    asked = cases()
    shutil.copy(SITE / "play.js", tmp_path)
    (tmp_path / "page.html").write_text(PAGE.format(cases=json.dumps(asked)), "utf-8")
    profile, page = f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()
    command = [str(BROWSER), *QUIET, profile, "--dump-dom", page]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    written = re.search(r'<pre id="out">(.*?)</pre>', shown, flags=re.S)
    assert written, shown
    answers = json.loads(html.unescape(written[1]))
    assert len(answers) == len(asked)
    for case, answer in zip(asked, answers, strict=True):
        q, p, policy = (np.array(case["q"]), np.array(case["p"]),
                        ct.policy(spec_of(case["rule"], case["knobs"])))  # fmt: skip
        law = np.asarray(ct.emitted_law(policy, q, p))
        assert np.allclose(answer["h"], law, rtol=0, atol=SAME), policy.spec
        found = ct.audit(policy, q, p)
        assert answer["acceptance"] == pytest.approx(float(found.acceptance), abs=SAME)
        kl = float(np.sum(law * np.log(np.where(law > 0, law / q, 1.0))))
        assert answer["kl"] == pytest.approx(kl, abs=SAME)


def test_the_pages_controls_are_those_that_its_script_reads() -> None:
    script, page = ((SITE / name).read_text("utf-8") for name in ("play.js", "play.md"))
    read = set(re.findall(r'find\("(\w+)"\)', script)) | {"noise", "by", "price", "delta", "head"}
    assert read == set(re.findall(r'data-play="(\w+)"', page))
    assert "http" not in script
