"""What ``cactus-theory expect`` prints: positions, what was counted against them, noise floors."""

from collections.abc import Mapping, Sequence
from typing import Any

from cactus_theory._tables import print_table

LEGEND = "99 % intervals that hold together; all coins are integrated out, errors are "
OF_PROMPTS = "those of these prompts' texts"
OF_ANY = "of prompts like these (of these, and smaller, from two texts a prompt on)"
ASSUMED = """\
This compares an engine that decodes the same prompts to as many tokens with the same temperature,
cuts, K and way of drafting: see to that, no counter shows it. Errors of counts are rough."""
Line = dict[str, Any]


def payload(trace: Any, found: Any) -> Line:
    """Return what was decoded, the numbers that have no position, and a line for each position."""
    tokens, product, width = found.tokens_per_call, found.product_of_means, len(found.accepted)
    spans = found.intervals([tokens, *found.accepted, *found.if_reached])
    content = {
        "policy": found.replay.policy,
        "verifier": found.replay.verifier,
        "num_draft_tokens": width,
        "temperature": trace.header.temperature,
        "drafts": "sampled" if trace.manifest.total("draft_rows") else "greedy",
        "rounds": int(found.rounds),
        "texts": found.texts,
        "errors_of_these_prompts": bool(found.strata.any()),
        "accepted_per_call": found.replay.accepted_per_call.value,
    } | _span("tokens_per_call", tokens, spans[0])
    if product is not None:
        less = product - tokens
        content |= {"product_of_means": product.value, "product_difference": less.value}
        content["product_difference_se"] = found.error(less)
    columns = zip(found.accepted, spans[1:], found.if_reached, spans[1 + width :], strict=False)
    content["positions"] = [
        {"position": place} | _span("accepted", *own[:2]) | _span("if_reached", *own[2:])
        for place, own in enumerate(columns, 1)
    ]
    return content


def _span(name: str, own: Any, span: tuple[float, float]) -> Line:
    return {name: own.value, f"{name}_low": span[0], f"{name}_high": span[1]}


def show(tables: Mapping[str, Line], by: str | None, compared: Any, by_rows: bool) -> None:
    """Print a table for all texts and for each group, and the comparison if there is one."""
    for value, own in tables.items():
        _show_one(own, f"\n{by} = {value}: " * bool(value))
    print(LEGEND + (OF_PROMPTS if tables[""]["errors_of_these_prompts"] else OF_ANY))
    if compared is not None:
        _show_compared(compared, by_rows)


def _show_one(own: Line, title: str) -> None:
    print(
        title
        + "{policy}, {verifier}, K = {num_draft_tokens}, {drafts} drafts, temperature "
        "{temperature:g}: {rounds} rounds of {texts} texts".format(**own)
    )
    cells = [
        [str(line["position"]), _interval(line, "accepted"), _interval(line, "if_reached")]
        for line in own["positions"]
    ]
    print_table(["position", "reached and accepted", "accepted if reached"], cells, ())
    print(f"tokens a call {_interval(own, 'tokens_per_call')}, ", end="")
    print("{accepted_per_call:.4f} of them drafted".format(**own))
    if "product_of_means" in own:
        print(
            "product of mean acceptances {product_of_means:.4f}, off by {product_difference:+.4f} "
            "±{product_difference_se:.4f}".format(**own)
        )


def _interval(line: Line, name: str) -> str:
    return f"{line[name]:.4f} ({line[f'{name}_low']:.4f} to {line[f'{name}_high']:.4f})"


def _show_compared(compared: Any, by_rows: bool) -> None:
    """Print every gap and the verdict."""
    from cactus_theory.traces.faults import FAULTS

    heads = ["position", "expected if reached", "observed", "off by", "in errors", ""]
    cells = [
        [
            str(gap["position"] or "tokens a call"),
            "{expected:.4f} ±{expected_error:.4f}".format(**gap),
            "{observed:.4f} ±{observed_error:.4f}".format(**gap),
            f"{gap['observed'] - gap['expected']:+.4f}",
            f"{gap['errors']:+.1f}",
            "OFF" * gap["off"],
        ]
        for gap in compared.gaps
    ]
    print()
    print_table(heads, cells, ())
    named = [own for name in compared.named for own in FAULTS if own.name == name]
    if not compared.alarm:
        print("as expected: nothing is off")
    else:
        print("not as expected; it looks like" if named else "not as expected, nor any known fault")
        for own in named:
            print(f"  {own.name}: {own.says} ({own.thread})")
        if by_rows:
            left = ", ".join(own.name for own in FAULTS if own.draft is not None)
            print(f"not tried, as they need both models: {left}")
    if compared.alike:
        print(f"would look healthy here: {', '.join(compared.alike)}")
    print(ASSUMED)


def show_floors(floors: Sequence[Line]) -> None:
    """Print what each dtype's wide passes change."""
    cells = [
        [
            own["dtype"],
            f"{own['kl_per_token']:.3g} ±{own['standard_error']:.1g}",
            str(own["rows"]),
        ]
        for own in floors
    ]
    print_table(["dtype", "KL a token (nats)", "rows"], cells, (0,))
    print(
        f"the target's rows of passes over {floors[0]['width']} tokens against passes over one, on "
        "this machine: a smaller budget is less than rounding"
    )
