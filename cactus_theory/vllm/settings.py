"""Settings of a server from its environment, and which of them one request may change.

======================  ===================================================================
``CACTUS_POLICY``       spec of the policy, such as ``band:price=2.0``; unset or empty: the
                        server is left as it is
``CACTUS_POLICIES``     others that a request may name: ``gentle=band:price=4; fast=band:price=1``
``CACTUS_VERIFIER``     ``chain`` (default) or ``block``
``CACTUS_DIVERGENCE``   what the meter reads, such as ``kl`` (default) or ``renyi:a=2``
``CACTUS_METER``        ``off``, or n: one verified row in n is measured, chosen at random
                        (default 16; 1: all of them)
``CACTUS_CAP``          nats of KL that an answer may spend per token, at every length it may
                        end at; ``inf``: only where its request sets one
``CACTUS_READINGS``     ``log``, or a file: a line of each request's own numbers at its end
                        (see :mod:`cactus_theory.vllm.requests`); every row is measured
``CACTUS_TRACE``        a folder: rounds of requests are written there, as traces that ``tune``
                        and ``replay`` read (see :mod:`cactus_theory.vllm.recorder`); unset: none
``CACTUS_TRACE_BYTES``  the most bytes of all that lies in that folder, 1e9 by default
``CACTUS_MARGIN``       of the logits processor alone: logits that a greedy request gives up
======================  ===================================================================

Another variable that begins with ``CACTUS_`` stops the start, whether a policy is set or not, and
so does one of these without a policy, or ``CACTUS_TRACE_BYTES`` without a folder: settings that
nobody would read. Those of the project's tests (``CACTUS_THEORY_…``) and the ones
that Kubernetes makes of a service named cactus are left alone.

A request may name one of them in ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``),
``{"cactus": "gentle"}``, or ``speculative``, which is lossless, and lower its cap,
``{"cactus_cap": 0.01}``; see :mod:`cactus_theory.vllm.admission`. Nothing here imports torch before
a policy is asked for.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cactus_theory.divergences import Divergence
    from cactus_theory.policies import Policy
    from cactus_theory.verify import Verifier

POLICY, POLICIES, VERIFIER = "CACTUS_POLICY", "CACTUS_POLICIES", "CACTUS_VERIFIER"
DIVERGENCE, METER = "CACTUS_DIVERGENCE", "CACTUS_METER"
CAP, READINGS = "CACTUS_CAP", "CACTUS_READINGS"
MARGIN, TRACE, TRACE_BYTES = "CACTUS_MARGIN", "CACTUS_TRACE", "CACTUS_TRACE_BYTES"
NAMES = (POLICY, POLICIES, VERIFIER, DIVERGENCE, METER, CAP, READINGS, TRACE, TRACE_BYTES, MARGIN)
PREFIX = "CACTUS_"
OF_OTHERS = re.compile(r"CACTUS_(THEORY_.*|(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?)")
ARGUMENT, CAP_ARGUMENT = "cactus", "cactus_cap"  # keys of ``extra_args``
SPECULATIVE = "speculative"  # what every request may ask for
OFFERED = re.compile(r"\s*([A-Za-z0-9_.-]{1,40})\s*=\s*(\S.*?)\s*", flags=re.S)
LOG = "log"
MOST_MARGIN = 1e6  # largest margin, in logits
TRACED = 1e9  # most bytes of a trace folder, by default
MEASURED = 16  # one verified row in so many is measured: a large row costs a batch's verification
LONGEST_LINE = 1000  # most characters of a refusal


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    policy: "Policy"  # of every request that names none
    verifier: "Verifier"
    divergence: "Divergence"
    meter: int = MEASURED  # one verified row in so many is measured; 0: none
    policies: Mapping[str, "Policy"] = field(default_factory=dict)  # what a request may name
    cap: float | None = None  # nats a token of an answer; inf: only where a request sets one
    readings: str = ""  # ``log`` or a file for the numbers of single requests
    trace: str = ""  # folder of traces
    trace_bytes: float = TRACED
    margin: float = 0.0  # logits that greedy requests give up; the logits processor alone


def check_names(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for a variable whose name nobody reads, such as ``CACTUS_VERIFER``."""
    for name in environ:
        begins = name.upper().startswith(PREFIX)
        if begins and name not in NAMES and not OF_OTHERS.fullmatch(name):
            raise ValueError(f"{name}: must be one of {', '.join(NAMES)}")


def read(environ: Mapping[str, str] = os.environ, *, by_bias: bool = False) -> Settings | None:
    """Return the settings of the environment, None if it names no policy and nothing else.

    ``by_bias`` is for the logits processor: it decides without loss where no policy is asked for,
    by policies that are a bias whoever verifies, and keeps no accounts. ValueError, in one line:
    the variable, what it must be (every valid name), and its value.
    """
    check_names(environ)
    text = {name: environ.get(name, "").strip() for name in NAMES}
    for name, of in [*((name, POLICY) for name in NAMES), (TRACE_BYTES, TRACE)]:
        if text[name] and not text[of]:
            lossless = " (speculative is lossless)" if of == POLICY else ""
            raise ValueError(f"{name}: does nothing without {of}; set that{lossless}, or unset it")
    spec = text[POLICY] or ("speculative" if by_bias else "")
    if not spec:
        return None
    from cactus_theory.base.arguments import number
    from cactus_theory.divergences import divergence
    from cactus_theory.policies import policy
    from cactus_theory.vllm.bias import check_policy

    verifier = named(VERIFIER, _chain_or_block, text[VERIFIER] or "chain")
    cap = number(CAP, text[CAP], 0) if text[CAP] else None
    if by_bias:
        refuse_accounts(text[CAP], text[READINGS], text[TRACE])

    def checked(spec: str) -> "Policy":
        rule = policy(spec).at_ends(())  # no tokenizer is known here
        if by_bias:
            check_policy(rule)
            return rule
        named(VERIFIER, verifier.check, rule)
        if cap is not None:
            named(CAP, _check_ledger, rule, cap)
        return rule

    return Settings(
        policy=named(POLICY, checked, spec),
        verifier=verifier,
        divergence=named(DIVERGENCE, divergence, text[DIVERGENCE] or "kl"),
        meter=_meter(text[METER], text[READINGS]),
        policies=named(POLICIES, _offered, text[POLICIES], checked),
        cap=cap,
        readings=_readings(text[READINGS]),
        trace=_folder(text[TRACE]),
        trace_bytes=number(TRACE_BYTES, text[TRACE_BYTES] or TRACED, 0),
        margin=number(MARGIN, text[MARGIN] or 0.0, 0, MOST_MARGIN),
    )


def refuse_accounts(cap: Any, readings: Any, trace: Any) -> None:
    """Raise ValueError where accounts of single requests are asked for: only runner V1 has them."""
    for name, given in ((CAP, cap), (READINGS, readings), (TRACE, trace)):
        if given:
            raise ValueError(
                f"{name}: is kept by model runner V1 alone; set VLLM_USE_V2_MODEL_RUNNER=0"
            )


def _chain_or_block(name: str) -> "Verifier":
    from cactus_theory.base.arguments import one_of
    from cactus_theory.verify import find_verifier

    return find_verifier(one_of("verifier", name, ("chain", "block")))


def _meter(text: str, readings: str) -> int:
    if readings:
        if text not in ("", "1"):
            raise ValueError(f"{METER}: must be 1 or unset beside {READINGS}; got {text!r}")
        return 1
    if text.lower() in ("off", "0"):
        return 0
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{METER}: must be off or a whole number; got {text!r}")
    return int(text) if text else MEASURED


def _offered(text: str, checked: Callable[[str], "Policy"]) -> dict[str, "Policy"]:
    """Return the policies of a list, by name: ``gentle=band:price=4; fast=band:price=1``."""
    policies: dict[str, Policy] = {}
    for part in filter(str.strip, text.split(";")):
        line = OFFERED.fullmatch(part)
        if line is None:
            raise ValueError(f"must be name=spec, with ; between two; got {part.strip()!r:.60}")
        name, spec = line.groups()
        if name in policies or name == SPECULATIVE:
            raise ValueError(f"{name}: must be named once, and {SPECULATIVE} is there anyway")
        policies[name] = named(name, checked, spec)
    return policies


def _check_ledger(policy: "Policy", cap: float) -> None:
    from cactus_theory.decoding.ledger import Ledger

    Ledger(policy, min(cap, 1.0))


def _readings(text: str) -> str:
    if text and text != LOG:
        named(READINGS, Path(text).open, "a").close()
    return text


def _folder(text: str) -> str:
    if text:
        named(TRACE, lambda: Path(text).mkdir(mode=0o700, parents=True, exist_ok=True))
        if not os.access(text, os.W_OK | os.X_OK):
            raise ValueError(f"{TRACE}: must be a folder to write to; got {text!r:.60}")
    return text


def named(name: str, function: Any, *arguments: Any) -> Any:
    """Call a function, and name the setting in what it raises for it, in one short line."""
    try:
        return function(*arguments)
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{name}: {message[:LONGEST_LINE]}") from None
