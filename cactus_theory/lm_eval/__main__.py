"""Score tasks of lm-evaluation-harness by a policy and by lossless drafting, on the same items.

``python -m cactus_theory.lm_eval --model_args target=DIR,draft=DIR,policy=band:price=1 --tasks …``.
A task is a generative task of the harness, or a file of local prompts: ``gsm8k=FILE.jsonl`` or
``ifeval=FILE.jsonl``, scored by checks of our own. Answers are sampled at temperature 1 unless
--model_args gives another: with greedy search, the harness' default, a row has only one token,
and a band changes nothing.
Printed beside the score are the meter's nats, and McNemar's exact p against lossless answers.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cactus_theory.base.terminal import ends_quietly, importing, interrupted, one_line

with importing("python -m cactus_theory.lm_eval"):
    import numpy as np

    from cactus_theory.base import arguments as check
    from cactus_theory.base.prompts import prompts_of
    from cactus_theory.base.significance import items_needed, mcnemar
    from cactus_theory.base.tables import print_json, shown, text_table
    from cactus_theory.lm_eval.tasks import TASKS, floor

LOSSLESS = "speculative"
NAMES = (
    "target", "draft", "policy", "num_draft_tokens", "verifier", "temperature", "seed", "dtype",
    "device", "batch_size",
)  # fmt: skip
HEADS = {
    "task": "task", "metric": "metric", "items": "items", "score": "score",
    "lossless": "lossless", "right_alone": "right\nalone", "wrong_alone": "wrong\nalone",
    "p": "p", "items_needed": "items\nneeded", "differ": "other\nanswers",
}  # fmt: skip
Row = dict[str, Any]


def parsed(text: str, known: Sequence[str]) -> dict[str, str]:
    """Parse ``target=DIR,policy=band:price=1,hold=eos`` into a dictionary.

    A part that does not begin with a ``known`` name belongs to the value before. Raises ValueError
    if the first part does not begin with a ``known`` name.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name in known:
            values[name] = value
        elif not values:
            raise ValueError(f"--model_args: must begin with one of {', '.join(known)}; got {part}")
        else:
            values[list(values)[-1]] += f",{part}"
    return values


class Docs(list[Row]):
    """The items of a task, with the part of a dataset's interface that the harness uses."""

    features = {"prompt": str, "columns": dict}


def local_task(name: str, file: str, limit: int) -> dict[str, Any]:
    """Return the harness' description of a local task: the prompts of a file, and our score."""
    task = TASKS[check.one_of("--tasks", name, tuple(TASKS))]
    docs = Docs(
        {"prompt": prompt.text, "columns": task.checked(prompt.columns, prompt.place)}
        for prompt in prompts_of(file)
    )

    def score(doc: Mapping[str, Any], answers: Sequence[str]) -> Row:
        return {"right": float(task.right(doc["columns"], answers[0]))}

    return {
        "task": name, "custom_dataset": lambda **_: {"test": docs}, "test_split": "test",
        "output_type": "generate_until", "doc_to_text": lambda doc: doc["prompt"],
        "doc_to_target": "",
        "process_results": score, "generation_kwargs": {"until": [], "max_gen_toks": limit},
        "metric_list": [{"metric": "right", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line; flags have the harness' names."""
    add = parser.add_argument
    add("--model_args", required=True, metavar="NAME=VALUE,…",
        help=f"{', '.join(NAMES)}; the first two must be there")  # fmt: skip
    add("--tasks", nargs="+", required=True, metavar="TASK", help="or gsm8k=FILE, ifeval=FILE")
    add("--limit", type=int, help="items of a task; default: all")
    add("--max_gen_toks", type=int, default=256, help="of local tasks (%(default)s)")
    add("--num_fewshot", type=int, help="as the task has it")
    add("--apply_chat_template", action="store_true", help="prompts are a user's turn")
    add("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Decode with the policy and losslessly, print scores, nats and tests; return 0."""
    asked = parsed(args.model_args, NAMES)
    if missing := [name for name in NAMES[:2] if name not in asked]:
        raise ValueError(f"--model_args: must name a {missing[0]}; got {args.model_args}")
    tasks: list[Any] = []
    for task in args.tasks:
        name, equals, file = task.partition("=")
        tasks.append(local_task(name, file, args.max_gen_toks) if equals else name)
    by_policy = {policy: _evaluated(asked | {"policy": policy}, tasks, args)
                 for policy in (asked.get("policy", LOSSLESS), LOSSLESS)}  # fmt: skip
    (policy, (model, own)), *lossless = by_policy.items()
    samples = lossless[0][1][1] if lossless else own
    rows = [row for task in own for row in compared(task, own[task], samples[task])]
    spent = {name: one.spent for name, (one, _) in by_policy.items()}
    if args.json:
        return print_json({"policy": policy, "spent": spent, "tasks": rows})
    cells = [[shown(row[name]) for name in HEADS] for row in rows]
    print(text_table([*HEADS.values()], cells, f"{policy} beside lossless drafting"))
    for name, numbers in spent.items():
        told = (f"{shown(value)} {words}" for words, value in numbers.items())
        print(f"{name}: {', '.join(told)}".replace("_", " "))
    for description in tasks:
        if not isinstance(description, str):  # a local task, whose right answers are at hand
            made = sorted(samples[description["task"]], key=lambda sample: sample["doc_id"])
            answers = [sample["resps"][0][0] for sample in made]
            items = description["custom_dataset"]()["test"][: len(answers)]
            right = TASKS[description["task"]].right
            print(floor(lambda item, text: right(item["columns"], text), items, answers))  # noqa: B023
    for asked_for in sorted(model.overruled):
        print(f"tasks ask for {asked_for}; answers are at temperature {model.temperature:g}, as "
              "greedy search leaves one token, and a band changes nothing there")  # fmt: skip
    return 0


def _evaluated(asked: Mapping[str, str], tasks: Sequence[Any], args: argparse.Namespace) -> Any:
    """Run the tasks; return the model with its readings, and the harness' samples by task."""
    from cactus_theory.lm_eval.model import Cactus

    model = Cactus(**asked)  # type: ignore[arg-type]
    result = check.optional_module("lm_eval", "eval").simple_evaluate(
        model, tasks=[*tasks], limit=args.limit, num_fewshot=args.num_fewshot,
        apply_chat_template=args.apply_chat_template, bootstrap_iters=0,
    )  # fmt: skip
    assert result is not None
    return model, result["samples"]


def compared(task: str, own: Sequence[Row], lossless: Sequence[Row]) -> list[Row]:
    """Return a row for every numerical metric of a task.

    A row has the means of the policy and of lossless drafting, the items needed to tell them apart,
    and how many answers differ; for a metric of 0 and 1 also McNemar's test.
    """
    rows: list[Row] = []
    theirs = {(sample["doc_id"], sample["filter"]): sample for sample in lossless}
    pairs = [(sample, theirs[sample["doc_id"], sample["filter"]]) for sample in own]
    differ = len({a["doc_id"] for a, b in pairs if a["resps"] != b["resps"]})
    kinds = [(kind, metric) for a, _ in pairs for kind in [a["filter"]] for metric in a["metrics"]]
    for kind, metric in dict.fromkeys(kinds):
        values = [(a[metric], b[metric]) for a, b in pairs if a["filter"] == kind]
        if all(isinstance(value, int | float) for pair in values for value in pair):
            row = {"task": task, "metric": f"{metric}, {kind}", "items": len(values)}
            rows.append(row | _tested(np.array(values, dtype=float)) | {"differ": differ})
    return rows


def _tested(pairs: Any) -> Row:
    row: Row = dict(zip(("score", "lossless"), pairs.mean(0).tolist(), strict=True))
    row |= dict.fromkeys(("right_alone", "wrong_alone", "p"))
    differences = pairs[:, 0] - pairs[:, 1]
    if np.isin(pairs, (0, 1)).all():
        better, worse = int((differences > 0).sum()), int((differences < 0).sum())
        row |= {"right_alone": better, "wrong_alone": worse, "p": mcnemar(better, worse)}
    count, error = len(pairs), float(differences.std())
    row["items_needed"] = items_needed(differences.mean().item(), error / count**0.5, count)
    return row


@ends_quietly
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code, which is 2 after an error of one line."""
    parser = argparse.ArgumentParser(
        prog="python -m cactus_theory.lm_eval", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except KeyboardInterrupt:
        return interrupted(parser.prog)
    except (ValueError, TypeError, RuntimeError, OSError, ModuleNotFoundError) as error:
        print(f"{parser.prog}: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
