"""The page to play with computes the package's numbers, in a browser or else under node."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from tests.amounts import amount

SITE = Path(__file__).resolve().parents[2] / "simulations" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ENGINE = next(filter(None, map(shutil.which, (*BROWSERS, "node"))), "")
# a browser without a screen, sandbox, network and profile of its own
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# both sides bisect to the last bits; sums of twelve terms and roots are what is left
SAME = 1e-9
ROWS, TOKENS, NATS = amount(4, 12), 12, (0.003, 0.05)
# what a rule emits by its knobs or by the nats that it spends, and a token of it by the coins
ASKED = """JSON.stringify(CASES.map(({q, p, rule, by, coins}) => {
  const at = (...knobs) => Play[rule](q, p, ...knobs);
  const law = by.length ? at(...by) : Play.spending(at, by, ...Play.RANGES[rule]);
  return {...law, ...Play.emit(law, p, () => coins.shift())};
}))"""
PAGE = '<pre id="out"></pre><script src="play.js"></script><script>out.textContent = {}</script>'


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
        rules += [(rule, nats) for nats in NATS for rule in ("band", "cactus", "lenience")]
        row = {"q": list(q), "p": list(p)}
        found += [
            row | {"rule": rule, "by": by, "coins": list(draw.random(3))} for rule, by in rules
        ]
    return found


def answers(asked: list[dict], folder: Path) -> list[dict]:
    script = ASKED.replace("CASES", json.dumps(asked))
    shutil.copy(SITE / "play.js", folder)
    (folder / "page.html").write_text(PAGE.format(script), "utf-8")
    profile, page = f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()
    command, program = [ENGINE, *QUIET, profile, "--dump-dom", page], ""
    if Path(ENGINE).name == "node":
        command, program = [ENGINE], f"{(SITE / 'play.js').read_text('utf-8')}console.log({script})"
    settings = {"check": True, "capture_output": True, "text": True, "timeout": 120}
    shown = subprocess.run(command, input=program, **settings).stdout
    return json.loads(html.unescape(re.sub('.*<pre id="out">|</pre>.*', "", shown, flags=re.S)))


@pytest.mark.skipif(not ENGINE, reason="neither Chromium nor node is installed")
def test_the_page_computes_the_packages_numbers(tmp_path) -> None:
    asked = cases()
    for case, answer in zip(asked, answers(asked, tmp_path), strict=True):
        q, p, rule, by = np.array(case["q"]), np.array(case["p"]), case["rule"], case["by"]
        knobs = by if isinstance(by, list) else [answer["knob"], 0, []]
        policy = ct.policy(spec_of(rule, knobs))
        law = np.asarray(ct.emitted_law(policy, q, p))
        kl = np.sum(law * np.log(np.where(law > 0, law / q, 1.0))) if by is knobs else by
        due = {"h": law, "acceptance": ct.audit(policy, q, p).acceptance, "kl": kl}
        due |= {"raised": np.max(law / q)}
        if rule == "band":
            if not any(knobs[1:]) and answer["acceptance"] < 1 - SAME:  # h = p has many edges
                knob = {"price": by[0]} if by is knobs else {"delta": by}
                best = ct.optimal_acceptance(q, p, **knob)
                due |= {"a": best.lower, "b": best.upper, "price": best.price}
            drafted, accept, drawn = case["coins"]
            n = int(np.searchsorted(p.cumsum(), drafted * p.sum(), side="right"))
            rows = torch.from_numpy(q).expand(1, 2, -1), torch.from_numpy(p)[None, None]
            coins = torch.tensor([[accept]]), torch.tensor([drawn])
            step = ct.verify_chain(policy, *rows, torch.tensor([[n]]), coins=coins)
            due |= {"drafted": n, "chance": min(1, law[n] / p[n]), "kept": step.num_accepted}
            due |= {"token": step.output_token_ids[0, 0]}
        for name, number in due.items():
            assert np.allclose(answer[name], number, SAME, SAME), (policy.spec, name)


def test_the_pages_controls_are_those_that_its_script_reads() -> None:
    script, page = ((SITE / name).read_text("utf-8") for name in ("play.js", "play.md"))
    read = set(re.findall(r'find\("(\w+)"\)', script)) | {"noise", "by", "price", "delta", "head"}
    assert read == set(re.findall(r'data-play="(\w+)"', page))
    assert "http" not in script
