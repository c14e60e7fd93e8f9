"""What ``cactus-theory expect`` prints: positions, what was counted against them, noise floors."""

from collections.abc import Sequence
from typing import Any

from cactus_theory._tables import print_table

LEGEND = "99 % intervals that hold together; all coins are integrated out, errors are "
OF_PROMPTS = "those of these prompts' texts"
OF_ANY = "of prompts like these (of these, and smaller, from two texts a prompt on)"
ASSUMED = """\
This compares an engine that decodes the same prompts to as many tokens with the same temperature,
cuts, K and way of drafting: see to that, no counter shows it. Errors of counts are rough."""
Line = dict[str, Any]


def header_of(trace: Any, found: Any) -> Line:
    """Return what was decoded, and the numbers that have no position."""
    tokens, product = found.tokens_per_call, found.product_of_means
    low, high = found.intervals([tokens, *found.accepted, *found.if_reached])[0]
    header = {
        "policy": found.replay.policy,
        "verifier": found.replay.verifier,
        "num_draft_tokens": found.replay.num_draft_tokens,
        "temperature": trace.header.temperature,
        "drafts": "greedy" if trace.manifest.total("draft_rows") == 0 else "sampled",
        "rounds": int(found.rounds),
        "texts": found.texts,
        "texts_of_prompts": bool(found.strata.any()),
        "tokens_per_call": tokens.value,
        "tokens_per_call_low": low,
        "tokens_per_call_high": high,
        "accepted_per_call": found.replay.accepted_per_call.value,
    }
    if product is not None:
        less = product - tokens
        header |= {
            "product_of_means": product.value,
            "product_difference": less.value,
            "product_difference_se": found.error(less),
        }
    return header


def lines_of(found: Any) -> list[Line]:
    width = len(found.accepted)
    spans = found.intervals([found.tokens_per_call, *found.accepted, *found.if_reached])[1:]
    columns = zip(found.accepted, found.if_reached, spans[:width], spans[width:], strict=True)
    return [
        {
            "position": place,
            "accepted": both.value,
            "accepted_low": span[0],
            "accepted_high": span[1],
            "if_reached": own.value,
            "if_reached_low": other[0],
            "if_reached_high": other[1],
        }
        for place, (both, own, span, other) in enumerate(columns, 1)
    ]


def show(lines: Sequence[Line], header: Line) -> None:
    print(
        "{policy}, {verifier}, K = {num_draft_tokens}, {drafts} drafts, temperature "
        "{temperature:g}: {rounds} rounds of {texts} texts".format(**header)
    )
    heads = ["position", "reached and accepted", "accepted if reached"]
    cells = [
        [str(line["position"]), _span(line, "accepted"), _span(line, "if_reached")]
        for line in lines
    ]
    print_table(heads, cells, ())
    print(
        f"tokens a call {_span(header, 'tokens_per_call')}, of them drafted "
        f"{header['accepted_per_call']:.4f}"
    )
    if "product_of_means" in header:
        print(
            "product of mean acceptances {product_of_means:.4f}: {product_difference:+.4f} "
            "±{product_difference_se:.4f} of the mean of products above".format(**header)
        )
    print(LEGEND + (OF_PROMPTS if header["texts_of_prompts"] else OF_ANY))


def _span(line: Line, name: str) -> str:
    low, high = line[f"{name}_low"], line[f"{name}_high"]
    return f"{line[name]:.4f} ({low:.4f} to {high:.4f})"


def show_compared(compared: Any, by_rows: bool) -> None:
    heads = ["position", "expected if reached", "observed", "off by", "in errors", ""]
    cells = [
        [
            str(gap.position) if gap.position else "tokens a call",
            f"{gap.expected:.4f} ±{gap.expected_error:.4f}",
            f"{gap.observed:.4f} ±{gap.observed_error:.4f}",
            f"{gap.observed - gap.expected:+.4f}",
            f"{gap.errors:+.1f}",
            "OFF" if gap.off else "",
        ]
        for gap in compared.gaps
    ]
    print()
    print_table(heads, cells, ())
    for line in _said(compared, by_rows):
        print(line)
    print(ASSUMED)


def _said(compared: Any, by_rows: bool) -> list[str]:
    """Return the verdict in a few lines."""
    from cactus_theory.traces import FAULTS

    if not compared.alarm:
        said = ["as expected: nothing is off"]
    else:
        said = ["not as expected: looks like"] + [
            f"  {own.name}: {own.says} ({own.thread})"
            for name in compared.named
            for own in FAULTS
            if own.name == name
        ]
        if not compared.named:
            said = ["not as expected, and like none of the known faults"]
        if by_rows:
            left = ", ".join(own.name for own in FAULTS if own.draft is not None)
            said.append(f"not tried, as they need both models: {left}")
    if compared.alike:
        said.append(f"would look healthy here: {', '.join(compared.alike)}")
    return said


def compared_json(compared: Any) -> Line:
    return vars(compared) | {"gaps": [vars(gap) for gap in compared.gaps]}


def show_floors(floors: Sequence[Any]) -> None:
    """Print what each dtype's wide passes change."""
    heads = ["dtype", "KL a token (nats)", "±", "rows"]
    cells = [
        [own.dtype, f"{own.kl_per_token:.3g}", f"{own.standard_error:.2g}", str(own.rows)]
        for own in floors
    ]
    print_table(heads, cells, (0,))
    print(
        f"the target's rows of passes over {floors[0].width} tokens against passes over one, on "
        "this machine: budgets below that are rounding"
    )
