"""Write the tables of the pages of results from committed CSV.

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
from ..common.results import SMALL, Column, number, read_csv, write_text

# a table in a page: the line with its name, the table, the last line
BLOCK = re.compile(r"(<!-- measured (\w+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
# levels in nats a token, and families below, in the table of the tuner's choices
SHORT_LEVELS = ("0.02", "0.05", "0.1")
LOSSLESS = ("speculative", "chain")
SHORT_FAMILIES = (
    ("cactus:delta", "chain"), ("lenience:lenience", "chain"), ("band:price", "chain"),
    ("band:price", "block"),
)  # fmt: skip
SHARE = ".0%"  # of all
# columns of whole answers: head → field, with its standard error
ANSWERS = {
    "tokens a call": "tokens_per_call", "× lossless": "over_lossless", "× lenience": "over_first",
    "nats a token": "nats", "less likely under the target, nats a token": "surprise",
}  # fmt: skip
RESULTS = "paper_figures/results"
Row = Mapping[str, Any]


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
        asked = ", ".join(f"<!-- measured {table}" for table in tables)
        raise ValueError(f"--root: {name} must hold once each: {asked}")
    return BLOCK.sub(lambda found: f"{found[1]}{tables[found[2]](DATA)}{found[3]}", text)


def whole_answers(data: Path) -> str:
    """Return the table of policies at equal nats on whole answers, all prompts together."""
    every, notes = _read(data / "answers.csv")
    rows = [row for row in every if row["which"] == "all"]
    title = (
        "SmolLM2-135M-Instruct and its head, temperature 1, K = 2, token by token, answers of at "
        f"most 1,024 tokens to {rows[0]['prompts']} prompts; ± one standard error over prompts"
    )
    return _table(title, notes, rows, [
        Column("policy", lambda row: f"`{row['policy']}`"), *map(_measured, ANSWERS.items()),
        Column("tokens an answer", "tokens_per_answer", 0), Column("that ended", "ended", SHARE),
    ], medians=False)  # fmt: skip


def by_category(data: Path) -> str:
    """Return the table of the same run by category of the prompts, one category a row."""
    every, notes = _read(data / "answers.csv")
    categories: dict[str, dict[str, Row]] = {}
    for row in every:
        if row["which"] not in ("all", "complete"):
            categories.setdefault(row["which"], {})[_short(row["policy"])] = row
    # rows of a category are in the order of the run, and lossless decoding is the first
    lossless, *lossy = next(iter(categories.values()))
    within = lambda name, column: lambda row: _within(column, categories[row["which"]][name])  # noqa: E731
    rows = [own[lossless] for own in categories.values()]
    return _table("By category of the prompts; ± as above", notes, rows, [
        Column("category", lambda row: row["which"]), Column("prompts", lambda row: row["prompts"]),
        Column("tokens a call, lossless", within(lossless, "tokens_per_call")),
        *(Column(f"{name}, × lossless", within(name, "over_lossless")) for name in lossy),
        Column("nats a token, band", within("band", "nats")),
        Column("tokens an answer, lossless", "tokens_per_answer", 0),
    ], medians=False)  # fmt: skip


def _short(policy: str) -> str:
    name, _, knobs = policy.partition(":")
    return name + ", tilted" * ("tilt=" in knobs)


def _measured(item: tuple[str, str]) -> Column:
    head, column = item
    return Column(head, partial(_within, column))


def _level(level: str, lossy: bool) -> str:
    return level if lossy else "0 (lossless)"


def _way(row: Row) -> str:
    return f"{row['verifier']}, {row['num_draft_tokens']}"


def tuned(data: Path) -> str:
    """Return the measured speed of the tuner's choice of each family on the shipped pair.

    Settings were chosen by predicted speed, on other texts, so that no speed is the best of many.
    """
    rows, notes = _read(data / "tune.csv")
    rows = [row for row in rows if row["batch"] == "1"]
    plain = next(row for row in rows if row["family"] == "plain")
    best = [plain]
    for level in ("0", *SHORT_LEVELS):
        for family, verifier in SHORT_FAMILIES if level != "0" else (LOSSLESS,):
            kind = family, verifier, level if level != "0" else SHORT_LEVELS[0]
            kinds = [row for row in rows if (row["family"], row["verifier"], row["level"]) == kind]
            best.append(max(kinds, key=lambda row: float(row["predicted_speed"])))
    lossy = lambda row: float(row["measured_kl"]) > 0  # noqa: E731
    return _table("One text at a time, the shipped pair, prompts unseen", notes, best, [
        Column("set for, nats a token", lambda row: _level(row["level"], lossy(row))),
        Column("policy", lambda row: f"`{row['policy'].split(',')[0]}`"),
        Column("verifier, K", lambda row: "–" if row is plain else _way(row)),
        Column("tokens/s (90 % over repeats)", "measured_speed", 0, interval=True),
        Column("× plain", lambda row: _ratio(row, plain, "measured_speed")),
        Column("tokens a call", "measured_tokens_per_call", 2),
        Column("metered", lambda row: number(row["measured_kl"], SMALL) if lossy(row) else "0"),
    ])  # fmt: skip


def _ratio(row: Row, rival: Row, name: str) -> str:
    return f"{float(row[name]) / float(rival[name]):.2f}"


def blocks(data: Path) -> str:
    """Return tokens per call over the band token by token, of every family, at equal emitted KL."""
    tables = []
    for name, pair in (("blocks.csv", "shipped pair"), ("blocks_stories.csv", "stories pair")):
        rows, notes = _read(data / name)
        rows = [row for row in rows if row["num_draft_tokens"] == "8"]
        cells: dict[tuple[str, float], str] = {}
        for row in rows:
            ratio, error = number(row["ratio"], 3), number(row["ratio_se"], 3)
            tokens = number(row["tokens_per_call"], 2)
            cells[row["family"], float(row["kl_per_token"])] = f"{tokens}, {ratio} ± {error}"
        levels = sorted({float(row["kl_per_token"]) for row in rows})
        families = {row["family"]: row for row in rows}.values()
        what = "Tokens a call, and over the band token by token ± one standard error over texts"
        title = f"{what}, {pair}, {notes['cycles']} cycles"
        tables.append(_table(title, notes, families, [
            Column("K = 8", lambda row: f"`{row['family']}`"),
            *(Column("lossless" if not kl else f"{kl:g} nats a token",
                     lambda row, kl=kl, cells=cells: cells.get((row["family"], kl), ""))
              for kl in levels),
        ], medians=False))  # fmt: skip
    return "".join(tables)


def _within(column: str, row: Row) -> str:
    error = _error(row[f"{column}_se"])
    return f"{number(row[column], 3)} {error}" if error else ""


def _error(error: str) -> str:
    return f"± {float(error):.3f}" if error else ""


def theory(data: Path) -> str:
    rows, notes = _read(data / "bench_theory.csv")
    return _table("Closed forms, milliseconds a row", notes, rows, [
        Column("job", lambda row: row["job"]), Column("ms", "milliseconds_per_row", 2),
        Column("", lambda row: row["note"].split(";")[0]),
    ])  # fmt: skip


def verify(data: Path) -> str:
    rows, notes = _read(data / "bench_verify.csv")
    jobs: dict[str, dict[str, Row]] = {}
    for row in rows:
        jobs.setdefault(row["job"], {})[row["draft"]] = row
    cells = (Column("ms", "milliseconds", 1), Column("in softmaxes", "softmaxes", 2),
             Column("× faster than dense", "times_faster_than_dense", 1))  # fmt: skip
    columns = [Column("B = 8, K = 8, V = 151,936", lambda row: row["job"])]
    for kind in dict.fromkeys(row["draft"] for row in rows):
        columns += [Column(f"{kind}: {own.head}",
                           lambda row, own=own, kind=kind: own.text(jobs[row["job"]][kind]))
                    for own in (cells[0], cells[2], cells[1])]  # fmt: skip
    firsts = [next(iter(own.values())) for own in jobs.values()]
    return _table("One verification step, float32", notes, firsts, columns)


def gpu(data: Path) -> str:
    """Return the tables of a GPU: one verification beside its floor, rounds beside their passes."""
    verify, notes = _read(data / "gpu_verify.csv")
    decode, decode_notes = _read(data / "gpu_decode.csv")
    name = lambda row: at(row["policy"], row["verifier"])  # noqa: E731
    widest = max(verify, key=lambda row: int(row["drafted"]))["drafted"]
    timed = {(name(row), row["batch"]): row for row in verify if row["drafted"] == widest}
    sizes = sorted({batch for _, batch in timed}, key=int)
    largest = [timed[own, sizes[-1]] for own in dict.fromkeys(own for own, _ in timed)]
    shape = f"K = {widest}, V = {int(verify[0]['vocabulary']):,}"
    softmax = number(largest[0]["softmax_us"], 0)
    title = f"One verification of bfloat16 logits, {shape}; a softmax of the target's {softmax} µs"
    first = _table(title, _on_device(notes), largest, [
        Column("policy", lambda row: f"`{name(row)}`"),
        *(Column(f"µs, B = {size}",
                 lambda row, size=size: number(timed[name(row), size]["kernel_us"], 0))
          for size in sizes),
        Column("of a copy's speed there",
               lambda row: f"{float(row['floor_us']) / float(row['kernel_us']):.0%}"),
        Column("µs in torch there", "torch_us", 0),
    ])  # fmt: skip
    loops = [row for row in decode if row["loop"].startswith("device")]
    plain = {row["batch"]: row for row in loops if row["policy"] == "plain"}
    passes = {row["batch"]: row["round_ms"] for row in decode if row["loop"] == "passes alone"}
    alone = " and ".join(f"{number(passes[b], 1)} ms at batch {b}" for b in passes)
    title = f"Costs of {decode[0]['target']} + {decode[0]['draft']}, law of the shipped pair, K = 5"
    of_rounds = lambda row: float(row["tokens_per_call"]) / float(row["round_ms"])  # noqa: E731
    rounds = [row for row in decode if row["policy"]]
    title += f"; its passes alone {alone}"
    return first + _table(title, _on_device(decode_notes), rounds, [
        Column("method", _decoded_by),
        Column("batch", lambda row: row["batch"]),
        Column("launched as", lambda row: "one graph a round" if row in loops else "host"),
        Column("tokens/s", "tokens_per_second", 0),
        Column("× plain", lambda row: _ratio(row, plain[row["batch"]], "tokens_per_second")),
        Column("× plain, rounds alone",
               lambda row: f"{of_rounds(row) / of_rounds(plain[row['batch']]):.2f}"),
        Column("KL a token", "emitted_kl_per_token"), Column("tokens a call", "tokens_per_call", 2),
        Column("ms a round", "round_ms", 1), Column("over its passes", "over_passes", 2),
    ], medians=False)  # fmt: skip


def _decoded_by(row: Row) -> str:
    own = method({**row, "method": row["policy"]})
    return "plain, this loop" if own == "plain" else f"`{own}`"


def _on_device(notes: Mapping[str, str]) -> Mapping[str, str]:
    return {**notes, "machine": f"{notes['device']}, Triton {notes['triton']}"}


def shipped(pair: Path) -> str:
    report = json.loads((pair / "report.json").read_text(encoding="utf-8"))
    overlap = report["overlap_on_target_samples"]["mean"]
    title = f"The shipped pair: Σ min(p, q) is {overlap:.3f} along the target's own samples"
    origin = "[command](../../simulations/pair/report.json)"
    notes = report | {"torch": report["versions"]["torch"], "origin": origin}

    def seen(row: Any, key: str) -> float:
        runs = report["training"].items()
        return sum(run[key] for stage, run in runs if stage.startswith(row["model"]))

    models = [
        {"model": name, "parameters": report["parameters"][name]}
        | report["held_out"][name]
        | json.loads((pair / name / "config.json").read_text(encoding="utf-8"))
        for name in ("target", "draft")
    ]
    return _table(title, notes, models, [
        Column("model", lambda row: row["model"]),
        Column("layers × width", lambda row: "{num_hidden_layers} × {hidden_size}".format(**row)),
        Column("parameters", lambda row: f"{row['parameters'] / 1e6:.2f} M"),
        Column("tokens seen", lambda row: f"{seen(row, 'tokens') / 1e6:.1f} M"),
        Column("trained in", lambda row: f"{seen(row, 'seconds') / 60:.0f} min"),
        Column("nats a held-out token", "nats_per_token", 3),
        Column("bits a held-out byte", "bits_per_byte", 3),
    ], medians=False)  # fmt: skip


def _read(path: Path, folder: str = "../data") -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return a CSV's rows, and its head with ``origin``: a link to it in ``folder``, of a page."""
    rows, notes = read_csv(path)
    commit = f" of commit {notes['of_commit']}" if "of_commit" in notes else ""
    return rows, notes | {"origin": f"[command]({folder}/{path.name}){commit}"}


def _table(
    title: str,
    notes: Mapping[str, Any],
    rows: Iterable[Row],
    columns: Sequence[Column],
    medians: bool = True,
) -> str:
    origin = f"{notes['origin']}; {notes['machine']}, torch {notes['torch']}, {notes['date']}"
    lines = [[own.head for own in columns], ["---"] * len(columns)]
    lines += [[own.text(row) for own in columns] for row in rows]
    cells = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"\n**{title}** ({origin}{'; medians' * medians})\n\n{cells}\n"


PAGES: Mapping[str, Mapping[str, Callable[[Path], str]]] = {
    f"{RESULTS}/answers.md": {"chain": whole_answers, "tasks": by_category},
    f"{RESULTS}/shipped-pair.md": {"shipped": lambda _: shipped(PAIR), "tuned": tuned},
    f"{RESULTS}/blocks.md": {"blocks": blocks},
    f"{RESULTS}/steps.md": {"theory": theory, "verify": verify},
    f"{RESULTS}/gpu.md": {"gpu": gpu},
}
