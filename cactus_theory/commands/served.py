"""``cactus-theory served``: do an engine's tokens follow the law that the engine claims?

Reads answers of any engine, one per line, and computes the target's rows along them. No draft, no
counter and no reference answers are needed. The file may grow, and the verdict may be read at any
time. Exit code 1: the tokens have another law; 3: too few tokens to detect most faults.
"""

import argparse
import math
import sys
import textwrap
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.base import defaults
from cactus_theory.base.names import MODES
from cactus_theory.base.tables import print_json, print_table, width_of_terminal
from cactus_theory.base.terminal import Progress
from cactus_theory.commands.flags import (
    add_chat,
    add_cuts,
    add_models,
    add_policy,
    add_threads,
    one_policy,
    refuse,
    rendering,
)
from cactus_theory.commands.inputs import given_cuts
from cactus_theory.commands.models import loaded
from cactus_theory.commands.plot import COLOURS, INK, settings, write_picture
from cactus_theory.decoding.options import DecodeOptions
from cactus_theory.decoding.truncation import WHOLE
from cactus_theory.served.alternatives import EDGE, Claim, alternatives
from cactus_theory.served.answers import Answer, Log, Reader, read_answer
from cactus_theory.served.evidence import ALPHA, Evidence, paired
from cactus_theory.traces.log import identity

# default --slack, nats per token by which the evidence is lowered: with this slack, tokens of
# bfloat16 rows raised no more alarms than tokens of exact rows (paper_figures/results/served.md)
SLACK = 5e-4
SHOWN, WIDEST = 5, 100
CODES = {"off": 1, "as claimed": 0, "too little": 3}
WORDS = {
    "off": "OFF",
    "as claimed": "as claimed so far",
    "too little": "cannot say: too few tokens to see most faults",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("answers", metavar="ANSWERS.jsonl", help="a line an answer: prompt_token_ids, token_ids "
        "(or prompt, text); temperature, top_p, top_k, policy where no flag says it")  # fmt: skip
    add_models(parser, required=True)
    add_policy(parser)
    text = "how the engine drafts: the draft's likeliest token (greedy: vLLM's default)"
    add("--draft-mode", choices=MODES, help=f"{text}, or a sampled one (default)")
    text = "that is claimed (%(default)g)"
    add("--temperature", type=float, default=defaults.TEMPERATURE, help=text)
    add_cuts(parser)
    add_chat(parser)
    add("--control", metavar="FILE", help="answers of the same engine to the same prompts without "
        "speculation: a paired test, which no rounding of the target's rows can fool")  # fmt: skip
    text = "what was read so far: the same command goes on with the lines appended since"
    add("--state", metavar="FILE.json", help=text)
    text = "risk of an alarm about a healthy engine, ever (%(default)g)"
    add("--alpha", type=float, default=ALPHA, help=text)
    add("--slack", type=float, default=SLACK, metavar="NATS", help="nats a token that rounding may "
        "give an alternative (%(default)g: bfloat16 kernels; 0: rows are exact)")  # fmt: skip
    text = "nats by which rounding may move a token across a cut; one farther beyond is proof"
    add("--edge", type=float, default=EDGE, metavar="NATS", help=f"{text} (%(default)g)")
    add("--plot", metavar="FILE", help="draw the evidence against the tokens: .png, .pdf, .svg")
    add_threads(parser)
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; return 0 (as claimed), 1 (off) or 3 (too few tokens)."""
    check.number("--alpha", args.alpha, 0, 1, open_low=True)
    check.number("--slack", args.slack, 0)
    check.number("--edge", args.edge, 0, open_low=True)
    check.finite("--temperature", args.temperature, 0)
    claim = Claim(args.temperature, given_cuts(args) or WHOLE, one_policy(args) or defaults.POLICY)
    if not claim.lossless and args.draft is None:
        raise ValueError(f"--draft: must be given with --policy {claim.policy}, whose law needs it")
    if not claim.lossless and args.draft_mode is None:
        rule = f"must be given with --policy {claim.policy}, whose law depends on it"
        raise ValueError(f"--draft-mode: {rule}; got none")
    if args.draft is None:
        refuse(args, ("draft_mode", "draft_top_k", "draft_top_p"), "must be given with --draft")
    if args.control:
        refuse(args, ("state",), "must not be given with --control, whose pairs are read at once")
    for name in filter(None, (args.answers, args.control)):
        if not Path(name).is_file():
            raise FileNotFoundError(f"ANSWERS.jsonl: no such file; got {name!r}")
    how = rendering(args)
    pair = loaded(args)
    claim = replace(claim, ends=tuple(sorted(DecodeOptions(max_new_tokens=1).ends(pair.target))))
    table = alternatives(pair.draft is not None)
    reader = Reader(pair, args.draft_mode == "greedy", table, args.edge)
    setting = {
        "target": identity(pair.target), "dtype": pair.dtype, "draft_mode": args.draft_mode,
        "draft": None if pair.draft is None else identity(pair.draft),
        "claim": repr(claim), "alpha": args.alpha, "slack": args.slack, "edge": args.edge,
        "alternatives": [one.name for one in table], "prompts": repr(how),
    }  # fmt: skip
    names = tuple(one.name for one in table)

    def read(line: int, text: bytes) -> Answer:
        known = pair.tokenizer, reader.vocab, how
        answer = read_answer(line, text, claim, *known, trust_code=args.trust_code)
        if not answer.claim.lossless and pair.draft is None:
            raise ValueError(f"its policy {answer.claim.policy} needs --draft")
        return answer

    def log_of(path: str, state: str | None) -> tuple[Log, dict[tuple[int, ...], list[Any]]]:
        """Read a file's new lines; return the log and, with --control, ln Π r/h by prompt.

        There is one product for each answer and alternative, over the answer's tokens: r is the
        token's probability under the alternative, h under the claim.
        """
        log = Log.opened(state, setting, Evidence(names, args.slack, args.alpha))
        progress = Progress("bytes read", Path(path).stat().st_size)
        sums = defaultdict[tuple[int, ...], list[Any]](list)
        for answer, factors in log.go_on(path, read, reader, state, progress.update):
            if args.control:
                sums[tuple(answer.prompt)].append(factors.sum(0))
        return log, sums

    log, ours = log_of(args.answers, args.state)
    record = _record(log, table)
    if args.control:
        record |= {"control": _paired(ours, *log_of(args.control, None), args.alpha)}
    if args.plot:
        _draw(args.plot, log.evidence)
    if args.json:
        print_json(record)
    else:
        _show(record, log)
    code = CODES[record["verdict"]]
    return 1 if record.get("control", {}).get("off") else code


def _paired(
    ours: dict[tuple[int, ...], list[Any]], log: Log, controls: dict[Any, list[Any]], alpha: float
) -> dict[str, Any]:
    """Return the paired test of an engine's answers and of its answers without speculation.

    The n-th answers to the same prompt are a pair. ``log`` and ``controls`` are of the answers
    without speculation; the dictionaries are as ``log_of`` makes them.
    """
    arms = ((answers, controls.get(prompt, ())) for prompt, answers in ours.items())
    pairs = [pair for both in arms for pair in zip(*both, strict=False)]
    if not pairs:
        raise ValueError("--control: must answer prompts of ANSWERS.jsonl; got none of them")
    logs = paired(*np.array(pairs).transpose(1, 0, 2))  # from (pairs, arms, M) to two arrays
    top = float(logs.max())
    test = {"pairs": len(pairs), "log_evidence": float(logs[-1]), "largest_log_evidence": top}
    return test | {"off": top >= -math.log(alpha), "left_out": log.left_out}


def _record(log: Log, table: Any) -> dict[str, Any]:
    """Return the verdict and all numbers that are printed."""
    evidence, needed = log.evidence, log.evidence.needed()
    by_evidence = np.argsort(-evidence.own, kind="stable")  # most evidence first
    lines = [
        {
            "alternative": table[i].name, "log_evidence": float(evidence.own[i]),
            "nats_per_token": float(evidence.growth[i]) / max(evidence.tokens, 1),
            "grown": float(evidence.grown[i]),
            "more_tokens": float(needed[i]), "says": table[i].says, "thread": table[i].thread,
        }
        for i in by_evidence
    ]  # fmt: skip
    return {
        "verdict": evidence.verdict, "answers": evidence.answers, "tokens": evidence.tokens,
        "log_evidence": evidence.log, "largest_log_evidence": evidence.top,
        "limit": evidence.limit, "off": evidence.off, "impossible": evidence.impossible,
        "alpha": evidence.alpha, "slack": evidence.slack, "edge": log.setting["edge"],
        "nats_at_least": max(evidence.nats.bound(evidence.alpha), 0.0), "alternatives": lines,
        "left_out": log.left_out, "skipped": log.skipped, "empty": log.empty,
        "encoded": log.encoded, "unfinished": log.unfinished, "claim": log.setting["claim"],
    }  # fmt: skip


def _show(record: dict[str, Any], log: Log) -> None:
    for line, reason in record["left_out"]:
        print(f"line {line} is left out: {reason}", file=sys.stderr)
    if (more := record["skipped"] - len(record["left_out"])) > 0:
        print(f"{more} more lines are left out", file=sys.stderr)
    if record["unfinished"]:
        print("the last line is not whole yet and is read later", file=sys.stderr)
    where, alpha = record["off"], record["alpha"]
    print(f"{WORDS[record['verdict']]}: {record['tokens']} tokens of {record['answers']} answers")
    if (odd := record["impossible"]) is not None:
        token = f"line {odd['line']}, token {odd['token']} (id {odd['id']})"
        beyond = f"one that the claim never emits, {odd['beyond']:.3g} nats beyond its cut"
        right = f"if the target's rows are right to {record['edge']:g} nats"
        print(f"{token} is {beyond}: proof, {right}")
    now, most = _big(record["log_evidence"]), _big(record["largest_log_evidence"])
    rare = f"ever reaches {1 / alpha:g} with probability {alpha:g} at most"
    print(f"evidence {now}, at most {most} so far; a healthy engine {rare}")
    if where is not None:
        print(f"it passed {1 / alpha:g} in line {where['line']}, after {where['tokens']} tokens")
    if record["answers"]:
        print()
        _table(record, log.evidence)
        off = f"{record['nats_at_least']:.4f} nats a token off the claim on average"
        print(f"\nthe engine is at least {off} ({100 * (1 - alpha):g} %, whenever this is read)")
    if record["encoded"]:
        encoded = f"{record['encoded']} answers had no token_ids and were encoded from their text"
        lost = "the end token, and tokens that the engine split otherwise, are lost"
        print(f"{encoded}: {lost}; this evidence is no guarantee")
    if (control := record.get("control")) is not None:
        verdict = "another law than" if control["off"] else "nothing against the law of"
        most = _big(control["largest_log_evidence"])
        other = f"the same engine without speculation (evidence {most} at most)"
        print(f"{control['pairs']} pairs with the control arm: {verdict} {other}")


def _table(record: dict[str, Any], evidence: Evidence) -> None:
    """Print the alternatives with most evidence, then those that more tokens would show."""
    differing = [line for line in record["alternatives"] if line["nats_per_token"] > 0]
    cells = []
    for line in differing[:SHOWN]:
        nats, more = f"{line['nats_per_token']:.4f}", _count(line["more_tokens"])
        cells.append([line["alternative"], _big(line["log_evidence"]), nats, more])
    heads = ["alternative", "evidence", "nats a token off", "more tokens would show it"]
    print_table(heads, cells, (0,))
    if record["verdict"] != "off" or not differing:
        # what one of M alternatives has to reach for their mean to reach the limit
        needed = evidence.limit + math.log(len(evidence.names))
        later = [line for line in differing if line["grown"] < needed]
        names = ", ".join(
            f"{line['alternative']} ({_count(line['more_tokens'])})" for line in later
        )
        said = f"so many tokens show {len(differing) - len(later)} of {len(differing)} alternatives"
        if later:
            said += f"; not yet (more tokens): {names}"
        print("\n" + textwrap.fill(said, width_of_terminal(WIDEST)))
        return
    first = differing[0]
    thread = f" ({first['thread']})" if first["thread"] else ""
    print(f"likeliest: {first['says']}{thread}; another fault may look the same")


def _count(tokens: float) -> str:
    if tokens == 0:
        return "shown"
    return f"{math.ceil(tokens)}" if tokens < 1e9 else "–"


def _big(log: float) -> str:
    """Return e^log as text, also where it overflows a float."""
    power = log / math.log(10)
    return f"{math.exp(log):.3g}" if abs(power) < 6 else f"1e{power:+.0f}"


def _draw(path: str, evidence: Evidence) -> None:
    """Plot the evidence, of all and of the three leading alternatives, against the tokens read."""
    import matplotlib
    from matplotlib.figure import Figure

    # columns: tokens, evidence, evidence for each alternative; from natural logarithms to powers
    # of 10, after a first point without tokens
    curve = np.array([[0.0] * (2 + len(evidence.names)), *evidence.curve])
    curve[:, 1:] /= math.log(10)
    with matplotlib.rc_context(settings()):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, alternative in enumerate(np.argsort(-evidence.own, kind="stable")[:3]):
            look: Any = {"color": COLOURS[number], "lw": 1, "label": evidence.names[alternative]}
            axes.plot(curve[:, 0], curve[:, 2 + alternative], **look)
        axes.plot(curve[:, 0], curve[:, 1], color=INK, lw=2, label="evidence: mean of all")
        limit: Any = {"color": INK, "ls": ":", "lw": 1, "label": f"{1 / evidence.alpha:g}"}
        axes.axhline(evidence.limit / math.log(10), **limit)
        axes.set_ylim(bottom=max(curve[:, 1].min() - 1, -6))
        axes.set_xlabel("tokens read")
        axes.set_ylabel("evidence, powers of 10")
        axes.legend(frameon=False, fontsize=7.5)
        write_picture(path, figure)
