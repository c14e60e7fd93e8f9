"""Write the tables of README and the pages of results from committed CSV.

Above a table stand machine, version and day, and a link to the CSV, whose head is the command that
wrote every number. The lines between ``<!-- measured NAME -->`` and ``<!-- /measured -->`` are
replaced; a test compares them with the CSV.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..common.grid import at, method
from ..common.inputs import DATA, PAIR, ROOT
from ..common.results import read_csv, write_text

# a table in a page: the line with its name (the README's has none), the table, the last line
BLOCK = re.compile(r"(<!-- measured ?(\w*) -->\n).*?(<!-- /measured -->)", re.DOTALL)
# levels in nats a token, and families below, in the table of the tuner's choices
SHORT_LEVELS = ("0.02", "0.05", "0.1")
LOSSLESS = ("speculative", "chain")
SHORT_FAMILIES = (
    ("cactus:delta", "chain"), ("lenience:lenience", "chain"), ("band:price", "chain"),
    ("band:price", "block"),
)  # fmt: skip
# three digits that count; a share of all
SMALL, SHARE = ".3g", ".0%"
# suffixes of a value and its interval's ends
ENDS = "", "_low", "_high"
LARGE = "throughput_134m_long.csv"
RESULTS = "paper_figures/results"
Row = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that the pages lie in")


def run(args: argparse.Namespace) -> int:
    texts = {args.root / name: filled(args.root, name) for name in PAGES}
    for page, text in texts.items():
        write_text(page, text)
        print(page)
    return 0


def filled(root: Path, name: str) -> str:
    """Return the text of a page with the tables as the committed CSV have them.

    Raises ValueError for a page that does not hold each of its tables once.
    """
    text, tables = (root / name).read_text(encoding="utf-8"), PAGES[name]
    if sorted(table for _, table, _ in BLOCK.findall(text)) != sorted(tables):
        asked = ", ".join(f"<!-- measured {table}".strip() for table in tables)
        raise ValueError(f"--root: {name} must hold once each: {asked}")
    return BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]](DATA)}{found[3]}", text)


# column of a table of ``answers`` → head, digits, and whether with its interval
COMPARED = {
    "tokens_per_second": ("tokens/s", 1, False), "over_plain": ("× plain", 2, True),
    "over_lossless": ("× lossless", 2, True), "tokens_per_call": ("tokens a call", 2, False),
    "kl_per_token": ("metered", 4, False), "tokens_per_answer": ("tokens an answer", 0, False),
    "seconds_per_answer": ("seconds an answer", 1, True), "score": ("score", 2, True),
    "seconds_per_right": ("seconds a right answer", 1, False),
}  # fmt: skip


def compared(data: Path) -> str:
    """Return the README's table: policies at equal nats on whole answers of a real model."""
    rows, notes = _read(data / "answers.csv", "paper_figures/data")
    known = {column: own for column, own in COMPARED.items() if column in rows[0]}
    lines = [
        (
            row["level"] if float(row["level"]) else "0 (lossless)",
            _method(row | {"verifier": ""}),
            f"{row['verifier']}, {row['num_draft_tokens']}" if row["verifier"] else "–",
            *(_span(row, column, digits) if wide else _number(row[column], digits)
              if float(row[column] or 1) else "0" for column, (_, digits, wide) in known.items()),
        )
        for row in rows
    ]  # fmt: skip
    head = ["set for, nats a token", "policy", "verifier, K", *(own[0] for own in known.values())]
    title = (
        "SmolLM2-135M-Instruct and its head, one text at a time, temperature 1, answers of at most "
        f"256 tokens; {rows[0]['prompts']} prompts, in brackets 90 % over resampled ones"
    )
    return _table(title, notes, head, lines, medians=False)


def _span(row: Row, column: str, digits: int) -> str:
    middle, low, high = (_number(row[f"{column}{end}"], digits) for end in ENDS)
    return f"{middle} ({low}–{high})" if low else middle


def tuned(data: Path) -> str:
    """Return the measured speed of the tuner's choice of each family on the shipped pair.

    Settings were chosen by predicted speed, on other texts, so that no speed is the best of many.
    """
    rows, notes = _read(data / "tune.csv")
    rows = [row for row in rows if row["batch"] == "1"]
    plain = next(row for row in rows if row["family"] == "plain")
    lines = [_tuned_line(plain, plain)]
    for level in ("0", *SHORT_LEVELS):
        for family, verifier in SHORT_FAMILIES if level != "0" else (LOSSLESS,):
            kinds = [row for row in rows if (row["family"], row["verifier"]) == (family, verifier)
                     and row["level"] == (level if level != "0" else SHORT_LEVELS[0])]  # fmt: skip
            best = max(kinds, key=lambda row: float(row["predicted_speed"]))
            lines.append(_tuned_line(best, plain))
    head = ("set for, nats a token", "policy", "verifier, K", "tokens/s (90 % over repeats)",
            "× plain", "tokens a call", "metered")  # fmt: skip
    title = "One text at a time, the shipped pair, prompts unseen"
    return _table(title, notes, head, lines)


def _tuned_line(row: Row, plain: Row) -> Sequence[str]:
    lossy, speed = float(row["measured_kl"]) > 0, float(row["measured_speed"])
    return (
        row["level"] if lossy else "0 (lossless)", f"`{row['policy'].split(',')[0]}`",
        "–" if row is plain else f"{row['verifier']}, {row['num_draft_tokens']}",
        _span(row, "measured_speed", 0), f"{speed / float(plain['measured_speed']):.2f}",
        _number(row["measured_tokens_per_call"], 2),
        _number(row["measured_kl"], SMALL) if lossy else "0",
    )  # fmt: skip


def throughput(data: Path, name: str = "throughput.csv", batch: str = "1") -> str:
    rows, notes = _read(data / name)
    kinds: dict[str, Row] = {}
    for row in (row for row in rows if row["batch"] == batch):
        best = kinds.setdefault(_method(row), row)
        if float(row["tokens_per_second"]) > float(best["tokens_per_second"]):
            kinds[_method(row)] = row
    head = (
        "method", "K", "tokens/s", "× plain", "tokens a call", "emitted KL a token",
        "largest row KL",
    )  # fmt: skip
    lines = [
        (_method(row), row["num_draft_tokens"].removeprefix("0"),
         *_cells(row, tokens_per_second=0, speedup_over_plain=2, tokens_per_call=2,
                 emitted_kl_per_token=SMALL, largest_row_kl=SMALL))
        for row in kinds.values()
    ]  # fmt: skip
    texts = "one text" if batch == "1" else f"{batch} texts"
    cost = f"; {notes['cost']}" if "cost" in notes else ""
    title = f"Decoding {texts}, every method at its fastest K, picked on these texts{cost}"
    return _table(title, notes, head, lines)


def blocks(data: Path) -> str:
    """Return tokens per call over the band token by token, of every family, at equal emitted KL."""
    tables = []
    for name, pair in (("blocks.csv", "shipped pair"), ("blocks_stories.csv", "stories pair")):
        rows, notes = _read(data / name)
        rows = [row for row in rows if row["num_draft_tokens"] == "8"]
        cells: dict[tuple[str, float], str] = {}
        for row in rows:
            ratio, error = _number(row["ratio"], 3), _number(row["ratio_se"], 3)
            tokens = _number(row["tokens_per_call"], 2)
            cells[row["family"], float(row["kl_per_token"])] = f"{tokens}, {ratio} ± {error}"
        levels = sorted({float(row["kl_per_token"]) for row in rows})
        families = dict.fromkeys(row["family"] for row in rows)
        lines = [[f"`{name}`", *(cells.get((name, kl), "") for kl in levels)] for name in families]
        head = ("K = 8", *("lossless" if not kl else f"{kl:g} nats a token" for kl in levels))
        what = "Tokens a call, and over the band token by token ± one standard error over texts"
        title = f"{what}, {pair}, {notes['cycles']} cycles"
        tables.append(_table(title, notes, head, lines, medians=False))
    return "".join(tables)


def answers(data: Path) -> str:
    stories, notes = _read(data / "answers_stories.csv")
    python, python_notes = _read(data / "answers_python.csv")
    usual = ("method", "emitted KL a token", "raised off the head, of 1,000", "answers")
    told = {"emitted_kl_per_token": SMALL, "raised_off_head_per_1000": 1}
    lengths = [
        (_method(row), *_cells(row, **told), row["answers"], _number(row["mean_length"], 1),
         _within(row, "length_ratio"), _error(row["length_ratio_se_given_prompts"]),
         *_cells(row, cut=SHARE, calls_per_answer=1))
        for row in stories
    ]  # fmt: skip
    scores = [
        (_method(row), *_cells(row, **told), row["answers"], _number(row["score"], SHARE),
         _within(row, "score_difference"),
         " to ".join(filter(None, _cells(row, allowed_low=SHARE, allowed_high=SHARE))))
        for row in python
    ]  # fmt: skip
    head = (*usual, "tokens an answer", "× lossless", "to these prompts", "cut off",
            "calls an answer")  # fmt: skip
    title = "Lengths of whole answers, stories pair; ± one standard error over prompts"
    first = _table(title, notes, head, lengths, medians=False)
    head = (*usual, "that parse", "minus lossless", "allowed by the nats")
    title = "Completions whose whole lines ast.parse takes, shipped pair; ± as above"
    return first + _table(title, python_notes, head, scores, medians=False)


def _within(row: Row, column: str) -> str:
    error = _error(row[f"{column}_se"])
    return f"{_number(row[column], 3)} {error}" if error else ""


def _error(error: str) -> str:
    return f"± {float(error):.3f}" if error else ""


def decode(data: Path) -> str:
    lines: list[Sequence[str]] = []
    origins = []
    for name in ("bench_decode.csv", "bench_decode_stories.csv"):
        rows, notes = _read(data / name)
        origins.append(notes["origin"])
        speed = {row["job"]: float(row["tokens_per_second"]) for row in rows}
        assisted = speed["Hugging Face assisted generation"]
        pair = "shipped" if rows[0]["target"] == "target" else rows[0]["target"]
        lines += [
            (
                pair, row["job"], _number(row["tokens_per_second"], 0),
                f"{speed[row['job']] / assisted:.2f}", f"{speed[row['job']] / speed['plain']:.2f}",
                _number(row["tokens_per_call"], 2), _number(row["outside_forward"], SHARE),
                _number(row["meter_share"], SHARE) if "meter on" in row["job"] else "",
            )
            for row in rows
        ]  # fmt: skip
    head = (
        "pair", "K = 4", "tokens/s", "× assisted", "× plain", "tokens a call",
        "outside the models", "meter",
    )  # fmt: skip
    notes |= {"origin": ", ".join(origins)}
    return _table("The loop beside Hugging Face's", notes, head, lines)


def theory(data: Path) -> str:
    rows, notes = _read(data / "bench_theory.csv")
    lines = [
        (row["job"], _number(row["milliseconds_per_row"], 2), row["note"].split(";")[0])
        for row in rows
    ]
    return _table("Closed forms, milliseconds a row", notes, ("job", "ms", ""), lines)


def verify(data: Path) -> str:
    rows, notes = _read(data / "bench_verify.csv")
    kinds = list(dict.fromkeys(row["draft"] for row in rows))
    lines = []
    for job in dict.fromkeys(row["job"] for row in rows):
        own = [row for kind in kinds for row in rows if (row["draft"], row["job"]) == (kind, job)]
        cells = [cell for row in own for cell in _cells(
            row, milliseconds=1, times_faster_than_dense=1, softmaxes=2)]  # fmt: skip
        lines.append((job, *cells))
    head = ("B = 8, K = 8, V = 151,936", *(f"{k}: {x}" for k in kinds for x in (
        "ms", "× faster than dense", "in softmaxes",
    )))  # fmt: skip
    return _table("One verification step, float32", notes, head, lines)


def gpu(data: Path) -> str:
    """Return the tables of a GPU: one verification beside its floor, rounds beside their passes."""
    verify, notes = _read(data / "gpu_verify.csv")
    decode, decode_notes = _read(data / "gpu_decode.csv")
    widest = max(verify, key=lambda row: int(row["drafted"]))["drafted"]
    timed = {(at(row["policy"], row["verifier"]), row["batch"]): row for row in verify
             if row["drafted"] == widest}  # fmt: skip
    sizes = sorted({batch for _, batch in timed}, key=int)
    largest = [timed[name, sizes[-1]] for name in dict.fromkeys(name for name, _ in timed)]
    lines = []
    for row in largest:
        name = at(row["policy"], row["verifier"])
        share = float(row["floor_us"]) / float(row["kernel_us"])
        took = [_number(timed[name, batch]["kernel_us"], 0) for batch in sizes]
        lines.append((f"`{name}`", *took, f"{share:.0%}", _number(row["torch_us"], 0)))
    head = ("policy", *(f"µs, B = {batch}" for batch in sizes), "of a copy's speed there",
            "µs in torch there")  # fmt: skip
    shape = f"K = {widest}, V = {int(verify[0]['vocabulary']):,}"
    softmax = _number(largest[0]["softmax_us"], 0)
    title = f"One verification of bfloat16 logits, {shape}; a softmax of the target's {softmax} µs"
    first = _table(title, _on_device(notes), head, lines)
    plain = {row["batch"]: row for row in decode
             if row["policy"] == "plain" and row["loop"].startswith("device")}  # fmt: skip
    passes = {row["batch"]: row["round_ms"] for row in decode if row["loop"] == "passes alone"}
    rounds = [
        (_method(row | {"method": row["policy"]}), row["batch"],
         "one graph a round" if row["loop"].startswith("device") else "host",
         _number(row["tokens_per_second"], 0),
         *(f"{one / plain_one:.2f}" for one, plain_one in
           zip(_speeds(row), _speeds(plain[row["batch"]]), strict=True)),
         _number(row["emitted_kl_per_token"], SMALL), _number(row["tokens_per_call"], 2),
         _number(row["round_ms"], 1), _number(row["over_passes"], 2))
        for row in decode if row["policy"]
    ]  # fmt: skip
    head = ("method", "batch", "launched as", "tokens/s", "× plain", "× plain, rounds alone",
            "KL a token", "tokens a call", "ms a round", "over its passes")  # fmt: skip
    alone = " and ".join(f"{_number(passes[b], 1)} ms at batch {b}" for b in passes)
    title = f"Costs of {decode[0]['target']} + {decode[0]['draft']}, law of the shipped pair, K = 5"
    second = _table(f"{title}; its passes alone {alone}", _on_device(decode_notes), head, rounds,
                    medians=False)  # fmt: skip
    return first + second


def _speeds(row: Mapping[str, str]) -> tuple[float, float]:
    """Return tokens a second, and tokens a millisecond of rounds: without the prefill."""
    return float(row["tokens_per_second"]), float(row["tokens_per_call"]) / float(row["round_ms"])


def _on_device(notes: Mapping[str, str]) -> Mapping[str, str]:
    return {**notes, "machine": f"{notes['device']}, Triton {notes['triton']}"}


def shipped(pair: Path) -> str:
    report = json.loads((pair / "report.json").read_text(encoding="utf-8"))
    lines = []
    for name in ("target", "draft"):
        config = json.loads((pair / name / "config.json").read_text(encoding="utf-8"))
        held_out = report["held_out"][name]
        stages = [run for stage, run in report["training"].items() if stage.startswith(name)]
        lines.append(
            (
                name, f"{config['num_hidden_layers']} × {config['hidden_size']}",
                f"{report['parameters'][name] / 1e6:.2f} M",
                f"{sum(run['tokens'] for run in stages) / 1e6:.1f} M",
                f"{sum(run['seconds'] for run in stages) / 60:.0f} min",
                f"{held_out['nats_per_token']:.3f}", f"{held_out['bits_per_byte']:.3f}",
            )
        )  # fmt: skip
    overlap = report["overlap_on_target_samples"]["mean"]
    title = f"The shipped pair: Σ min(p, q) is {overlap:.3f} along the target's own samples"
    head = (
        "model", "layers × width", "parameters", "tokens seen", "trained in",
        "nats a held-out token", "bits a held-out byte",
    )  # fmt: skip
    origin = "[command](../../simulations/pair/report.json)"
    notes = report | {"torch": report["versions"]["torch"], "origin": origin}
    return _table(title, notes, head, lines, medians=False)


def _read(path: Path, folder: str = "../data") -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return a CSV's rows, and its head with ``origin``: a link to it in ``folder``, of a page."""
    rows, notes = read_csv(path)
    commit = f" of commit {notes['of_commit']}" if "of_commit" in notes else ""
    return rows, notes | {"origin": f"[command]({folder}/{path.name}){commit}"}


def _table(
    title: str,
    notes: Mapping[str, Any],
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    medians: bool = True,
) -> str:
    origin = f"{notes['origin']}; {notes['machine']}, torch {notes['torch']}, {notes['date']}"
    rule = ["---"] * len(head)
    rows = [f"| {' | '.join(line)} |" for line in (head, rule, *lines)]
    return f"\n**{title}** ({origin}{'; medians' * medians})\n\n" + "\n".join(rows) + "\n"


def _method(row: Row) -> str:
    baselines = {
        "plain": "plain, this loop",
        "hf_plain": "Hugging Face `generate`",
        "hf_assisted": "Hugging Face assisted",
    }
    return baselines.get(row["method"], f"`{method(row)}`")


def _number(text: str, digits: int | str) -> str:
    """Return a cell in so many digits, or in a format; nothing for an empty one."""
    return (
        format(float(text), f",.{digits}f" if isinstance(digits, int) else digits) if text else ""
    )


def _cells(row: Row, **columns: int | str) -> list[str]:
    return [_number(row[name], digits) for name, digits in columns.items()]


PAGES: Mapping[str, Mapping[str, Callable[[Path], str]]] = {
    "README.md": {"": compared},
    f"{RESULTS}/cost-134m.md": {
        "large": partial(throughput, name=LARGE),
        "large_batch": partial(throughput, name=LARGE, batch="8"),
    },
    f"{RESULTS}/shipped-pair.md": {"tuned": tuned, "throughput": throughput},
    f"{RESULTS}/blocks.md": {"blocks": blocks},
    f"{RESULTS}/lengths.md": {"answers": answers},
    f"{RESULTS}/hugging-face.md": {"decode": decode},
    f"{RESULTS}/steps.md": {"theory": theory, "verify": verify},
    f"{RESULTS}/gpu.md": {"gpu": gpu},
    f"{RESULTS}/models.md": {"shipped": lambda _: shipped(PAIR)},
}  # fmt: skip
