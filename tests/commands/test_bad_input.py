"""Bad input of every command: exit code 2, one line that names what is wrong, and no file."""

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cactus_theory.base import terminal

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "cactus": "cactus_theory.cli",
    "solvers": "solvers.__main__",
    "sim": "simulations.__main__",
    "figures": "paper_figures.__main__",
}
Q, P = [0.2, 0.2, 0.6], [0.45, 0.45, 0.1]
ROWS = {
    "q": Q,
    "p": P,
    "bad": [0.5, 0.5, 0.5],
    "rounded": [[0.5, 0.5], [0.3333333, 0.6666]],
    "logits": [3.0, -1.0],
    "short": [0.5, 0.5],
    "batch": [P, Q],
    "three": [P, P, P],
}
PAIR = f"--target {ROOT}/simulations/pair/target --draft {ROOT}/simulations/pair/draft"
NAMES = {
    "TRACE": f"{ROOT}/simulations/data/trace",
    "SHIPPED": f"{ROOT}/simulations/data/rows.npz",
    "PAIR": PAIR,
    "HEAD": f"{ROOT}/simulations/pair/head",
    "MODELS": "--target x --draft x",
    "DECODE": f"generate {PAIR} --prompt x --policy speculative",
    "ALONE": f"generate --target {ROOT}/simulations/pair/target --prompt x",
    "GENERATE": "generate --target no --draft no --prompt x --policy",
    "TUNE": "tune --nats 1",
    "COUNTED": "--observed 0.5,0.4,0.3,0.2",
    "THROUGHPUT": "throughput --out out",
}
# names in capitals stand for the words above
CASES = """
cactus solve q.npy p.npy --delta -1 | delta: must lie in [0, inf]; got -1.0
cactus solve q.npy missing.npy --delta 1 | missing.npy
cactus solve nofile.npz --delta 1 | target: no such file; got 'nofile.npz'
cactus solve q.npy p.safetensors --delta 1 | p.safetensors: the suffix must be one of .npy,
cactus solve no.npy p.npy --delta 1 --csv x.txt | --csv: must end in .csv
cactus solve bad.npy p.npy --delta 1 | sum to 1 within 1e-09 (torch.float64); the row
cactus solve rounded.npy rounded.npy --delta 1 | sums (normalise=True; on the command line --no
cactus solve logits.npy logits.npy --delta 1 | did you mean logits?
cactus solve logits.npy logits.npy --delta 1 --normalise | from -1 to 3
cactus solve q.npy p.npy --delta 1 --logits --normalise | at most one
cactus solve q.npy --delta 1 | a .npz with target_probs and draft_probs (or target
cactus solve lone.npz --delta 1 | lone.npz alone
cactus solve q.npy p.npy --frontier --out x.npy | --out: must not be given with --frontier
cactus solve q.npy p.npy --frontier --divergence renyi:a=2 | one-to-one price to be pooled
cactus solve q.npy p.npy --pooled --delta 1 --support free | --support: must be one of target
cactus solve no.npy p.npy --delta 1 --csv no/x.csv | --csv: must be a writable file
cactus solve no.npy p.npy --delta 1 --out taken.npy | Is a directory
cactus solve TRACE --price 1 --logits | logits: must not be given with
cactus solve . --price 1 | must be the folder of a trace; it has no manifest.json
cactus audit q.npy p.npy --policy no.py:x | no such file; got 'no.py'
cactus audit q.npy p.npy --policy cactuss | 'cactuss'
cactus audit q.npy p.npy --policy band --policy typical | must be given once; got band and typical
cactus audit TRACE x.npy --policy typical | draft: must not be given with
cactus GENERATE typical | no
cactus GENERATE cactus:delta=1 --policy speculative | must be given once; got cactus:delta=1 and spe
cactus DECODE --device cuda:99 | device: must be a device of this machine; got cuda:99
cactus DECODE --device meta | device: must be a device of this machine; got meta
cactus DECODE --tuned no.json | at most one may be given; got both
cactus generate MODELS --prompt x --tuned no.json --verifier block | --verifier: must not be given
cactus ALONE --policy band:price=1 | --policy: must be given with --draft
cactus ALONE --num-draft-tokens 3 | --num-draft-tokens: must be given with --draft
cactus ALONE --draft exit | draft: must say how many layers, as exit:20; got 'exit'
cactus ALONE --draft ngram:size=4 | ngram takes whole numbers for longest and shortest
cactus ALONE --draft ./ngrm | or one of ngram, ngram:longest=4, exit:20 (the target's first
cactus generate --target no --prompts text.jsonl --system kind | --system: must be given with --chat
cactus generate --target no --prompts chat.jsonl --system kind | of the system, as has --system
cactus TUNE --trace no --cost-ratio 1 | no such folder
cactus TUNE --trace no --cost-ratio 1 --batch 0 | batch: must be an integer of at least 1
cactus TUNE --trace no --cost-ratio 1 --cycles 0 | cycles: must be an integer of at least 1
cactus TUNE --trace no --cost-ratio 1 --temperature 2 | --temperature: a trace has its own
cactus TUNE --trace no --cost-ratio 1 --chat | --chat: must be given with --target
cactus expect --trace no --ignored x | --ignored: must be given with --target
cactus generate MODELS --prompt x --siblings 0 | --siblings: must be an integer of at least 1
cactus TUNE --trace no --cost-ratio 1 --out x.txt | --out: must end in .json
cactus TUNE --trace no --cost-ratio 1 --out no/t.json | --out: must be a writable file; No such file
cactus TUNE --cost-ratio 1 | --trace: must be given without models
cactus TUNE --trace no | --target, --cost-ratio: exactly one must be given; got none
cactus TUNE PAIR --trace no | --target: must not be given with --trace
cactus TUNE PAIR | --prompts: must be given with --target
cactus TUNE PAIR --prompts no | --prompts: must be a readable
cactus expect | --trace, or --target, --draft and --prompts: must be given
cactus expect --target x | --draft: must be given with --target
cactus expect --trace TRACE --target x | --target: must not be given with --trace
cactus expect --trace TRACE --rounds 5 | --rounds: must come with
cactus expect --trace TRACE --metrics x --rounds 5 | --rounds: must not be given with --metrics
cactus expect --trace TRACE --drafted 5 | --drafted: must come with
cactus expect --trace TRACE COUNTED | --rounds: must say
cactus expect MODELS --prompts x COUNTED --rounds 99 | --draft-mode: must say how the engine drafts
cactus expect MODELS --prompts x --cycles 0 | --cycles: must be an integer of at least 1
cactus expect --trace TRACE --max-new-tokens 9 | a trace has its own
cactus expect --trace TRACE --temperature 1 | a trace has its own
cactus expect --trace TRACE COUNTED --rounds 200 --answers 0 | answers: must lie
cactus expect --trace TRACE --dtype float16 | --dtype: must be given with --target
cactus expect --trace TRACE --revision main | --revision: must be given with --target
cactus expect --trace TRACE --device cuda | --device: must be given with --target
cactus expect --target no --draft ngram --prompts no --draft-mode sampled | --draft-mode: ngram look
solvers optimal q.npy absent.npy --delta 0.1 | absent.npy: must be a readable file
solvers optimal q.npy short.npy --delta 0.1 | short.npy: vocabulary must equal
solvers optimal batch.npy three.npy --delta 1 | three.npy: shape must broadcast
solvers optimal q.npy --delta 0.1 --token 7 | token: must lie in [0, 2]
solvers optimal q.npy p.npy --delta 1 --token 0 | draft: must not be given
solvers optimal q.npy p.npy --sequence --delta 1 --divergence renyi:a=2 | summed
solvers design q.npy p.npy --protect 1,x | --protect: must be numbers
solvers design q.npy p.npy --cap x=1 | --cap: must read RATIO, or TOKEN=RATIO
solvers design q.npy p.npy --cap 0.5 | no row meets all of
solvers block absent.npy --price 1 | absent.npy::target: only .npz
solvers | PROGRAM
solvers guess | invalid choice: 'guess'
solvers optimal q.npy p.npy | --delta
solvers optimal q.npy p.npy --delta x | invalid float value
solvers optimal q.npy --delta 1 --token 1 --sequence | not allowed with
solvers optimal q.npy --delta 1 --sequence --support free | not allowed
cactus trace MODELS --prompts no --out file/t | --out: must be a writable
cactus compare SHIPPED --policy band --csv taken.csv | Is a directory: taken
cactus compare nowhere --policy speculative | target: no such file; got 'nowhere'
cactus trace --target x --prompts q.npy --out t | --draft: must be given; got none
sim THROUGHPUT --baselines vllm | --baselines: must be among
sim THROUGHPUT --policy cactuss | cactuss
sim THROUGHPUT --batch 0 | --batch: must be at least 1
sim THROUGHPUT --policy typical --verifier block | --verifier: one must be able to
sim THROUGHPUT --draft HEAD --baselines hf_assisted | --baselines: hf_assisted takes a draft model
sim all --only nothing --out out | --only: must be among acceptance_kl, answers, 
sim demo --num-prompts 1 --policy bandd --out out | 'bandd'
sim gpu-check --device cpu devise --out out | PIECE: must be among compile, laws, verify,
sim smollm --out . | --out: must be a new folder or one of a model
figures acceptence --out out | must be one of acceptance_kl
figures overspend --data . --out out | overspend.csv
"""


def called(words: str, names: dict[str, str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """Return a program's ``main`` and its words, those in capitals replaced by what they name."""
    for _ in range(2):  # a name may stand for words with others
        words = re.sub(r"[A-Z]{4,}", lambda found: names[found[0]], words)
    program, *asked = words.split()
    return importlib.import_module(PROGRAMS[program]).main, asked


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows of all kinds, an empty file, and folders named as files."""
    folder = tmp_path_factory.mktemp("desk")
    for name, rows in ROWS.items():
        np.save(folder / f"{name}.npy", np.array(rows))
    np.savez(folder / "lone.npz", target=np.array(Q), other=np.array(P))
    (folder / "file").touch()
    (folder / "text.jsonl").write_text('{"prompt": "x"}')
    chat = [{"role": role, "content": "x"} for role in ("system", "user")]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": chat}))
    for name in ("taken.csv", "taken.npy"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_bad_input_is_one_line(desk: Path, case: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(terminal, "FIRST_LINE_S", 999.0)  # a slow machine shows progress
    before = {path: path.stat().st_mtime_ns for path in desk.rglob("*")}
    words, said = case.split(" | ")
    main, asked = called(words, NAMES)
    try:
        status = main(asked)
    except SystemExit as left:  # of argparse
        status = left.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and err.count(os.linesep) == 1 and said in err, err
    assert {path: path.stat().st_mtime_ns for path in desk.rglob("*")} == before
