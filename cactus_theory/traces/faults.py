"""Known faults of engines: what each would count on a trace, from the rows alone.

A fault is a line of FAULTS: what it changes of what the verifier is shown. Its counts are exact
given a healthy decode's rows, at the places where that one's rounds start; a decode with the fault
in it has its own places and texts. Faults of a draft's passes, which only a decode shows, are not
among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.policies import FixedTarget, Policy
from cactus_theory.policies._policy import one_hot
from cactus_theory.policies._tilt import colder
from cactus_theory.policies.reshaped import Truncated
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import VerdictLaw, Verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict

# usual default truncation of engines
USUAL_TOP_K, USUAL_TOP_P = Truncated(top_k=50), Truncated(top_p=0.95)
# other temperatures that engines are often at: 1 where it is ignored, 0 where drafts must be greedy
TEMPERATURES = (0.0, 0.3, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Rows:
    """The rows given to a verifier: target q, draft p (None for deterministic drafts).

    ``sampled`` is the law that tokens come from, where a fault makes it another than was logged.
    """

    q: Float[Tensor, "batch K1 vocab"]
    p: Float[Tensor, "batch K vocab"] | None
    temperature: float
    sampled: Float[Tensor, "batch K vocab"] | None = None


@dataclass(frozen=True)
class Fault:
    """A fault of an engine; ``needs`` are words for the decodes in which it can show.

    These are a decode that is ``tempered`` or ``random`` (no temperature of 0), ``sampled`` drafts,
    the ``block`` verifier. Entries whose names differ behind a space are one fault.
    """

    name: str
    rows: Callable[[Rows], Rows]
    says: str
    thread: str  # issue that reports it
    needs: str = ""
    check_first: str = ""  # no fault if the engine was asked for it: the flag that says so
    temperature: float | None = None  # of both models: no fault where it is the trace's
    verifier: Verifier | None = None  # used instead

    @property
    def kind(self) -> str:
        """Return the name that entries of one fault share."""
        return self.name.partition(" ")[0]

    def planted(self, verifier: Verifier, temperature: float) -> Verifier:
        """Return the verifier with the fault."""
        return Planted(self.verifier or verifier, self.name, self.rows, temperature)


class Planted(Verifier):
    """A verifier that gets changed rows."""

    def __init__(
        self, verifier: Verifier, name: str, change: Callable[[Rows], Rows], temperature: float
    ) -> None:
        self.verifier, self.change, self.temperature = verifier, change, temperature
        self.name = f"{verifier.spec} with {name}"  # type: ignore[misc]

    def check(self, policy: Policy) -> None:
        """Raise as the verifier without the fault does."""
        self.verifier.check(policy)

    def verify(
        self, assigned: Assignment, target_probs: Tensor, draft: Draft, accept: Tensor, draw: Tensor
    ) -> Verdict:
        """Return the verdict on the changed rows."""
        shown = self.change(Rows(target_probs, draft.probs, self.temperature))
        shown_draft, q = replace(draft, probs=shown.p), shown.q.to(target_probs.dtype)
        return self.verifier.verify(assigned, q, shown_draft, accept, draw)

    def law(self, assigned: Assignment, target_probs: Tensor, draft: Draft) -> VerdictLaw:
        """Return the law, with an ``alive`` whose mean over logged drafts is that over faulty ones.

        A block's own averages over what follows a token, drawn as is reported: where it is not,
        the tail of ``stop`` of the whole draft is taken. Where tokens come from another law than
        was logged they are weighted, up to the token or as a whole.
        """
        shown = self.change(Rows(target_probs, draft.probs, self.temperature))
        law = self.verifier.law(assigned, shown.q, replace(draft, probs=shown.p))
        drawn = draft.probs if shown.sampled is None else shown.sampled
        by_prefix = shown.p is drawn or isinstance(self.verifier, Chain)
        alive = law.alive if by_prefix else law.stop.flip(-1).cumsum(-1).flip(-1)
        if shown.sampled is not None and draft.probs is not None:
            ratio = (shown.sampled / draft.probs).gather(-1, draft.token_ids[..., None])[..., 0]
            weight = ratio.cumprod(-1) if by_prefix else ratio.prod(-1, keepdim=True)
            alive = torch.cat([alive[:, :1], alive[:, 1:] * weight], -1)
        return replace(law, alive=alive)


def cut(rows: Tensor, by: FixedTarget) -> Tensor:
    """Return the rows that are sampled in place of these."""
    return by.target(rows.double(), rows)


def heated(rows: Tensor, factor: float) -> Tensor:
    """Return rows at so many times their temperature; 0 is the greedy choice."""
    return (
        colder(rows.double(), 1 / factor - 1) if factor else one_hot(rows.argmax(-1), rows).double()
    )


def _reheated(rows: Rows, temperature: float) -> Rows:
    by = temperature / rows.temperature
    p = None if rows.p is None else heated(rows.p, by)
    return replace(rows, q=heated(rows.q, by), p=p, sampled=p)


def _greedy(rows: Rows) -> Rows:
    return replace(rows, p=None, sampled=None if rows.p is None else heated(rows.p, 0))


def _shifted(rows: Rows, step: int) -> Rows:
    places = torch.arange(rows.q.shape[1], device=rows.q.device)
    return replace(rows, q=rows.q[:, (places + step).clamp(0, len(places) - 1)])


def _reported_raw(rows: Rows) -> Rows:
    return rows if rows.p is None else replace(rows, p=heated(rows.p, 1 / rows.temperature))


FAULTS = (
    Fault("greedy-drafts", _greedy,
          "the draft takes its likeliest token, as vLLM's does unless it is told otherwise",
          "vllm-project/vllm#16899", "sampled random", "--draft-mode greedy"),
    *(Fault(f"both-temperature {heat:g}", partial(_reheated, temperature=heat),
            "both models are at another temperature: a default of the engine or of the model, or "
            "one that is ignored",
            "Pushkinist/rMLX#519", "random", f"--temperature {heat:g}", heat)
      for heat in TEMPERATURES),
    Fault("law-before-temperature", _reported_raw,
          "the draft samples after its temperature and reports its law before it",
          "huggingface/transformers#47932", "sampled tempered"),
    Fault("law-before-top-k",
          lambda rows: replace(rows, sampled=None if rows.p is None else cut(rows.p, USUAL_TOP_K)),
          f"the draft samples from its {USUAL_TOP_K.top_k} likeliest tokens and reports them all",
          "huggingface/transformers#47932", "sampled"),
    Fault("no-draft-law", lambda rows: replace(rows, p=None),
          "sampled tokens are verified as if the draft were deterministic",
          "vllm-project/vllm#40149", "sampled"),
    Fault("rows-late", lambda rows: _shifted(rows, 1),
          "a drafted token is verified with the target's row after it",
          "mlx-node/mlx-node#11"),
    Fault("rows-early", lambda rows: _shifted(rows, -1),
          "a drafted token is verified with the target's row of the one before it",
          "NVIDIA/TensorRT-LLM#15098"),
    Fault("target-temperature", lambda rows: replace(rows, q=heated(rows.q, 1 / rows.temperature)),
          "the target's rows lack the temperature that the draft's have",
          "vllm-project/vllm#42744", "tempered"),
    Fault("draft-temperature", lambda rows: replace(raw := _reported_raw(rows), sampled=raw.p),
          "the draft's rows lack the temperature that the target's have",
          "z-lab/dflash#74", "sampled tempered"),
    Fault("target-top-k", lambda rows: replace(rows, q=cut(rows.q, USUAL_TOP_K)),
          f"the target's rows alone are cut to {USUAL_TOP_K.top_k} tokens",
          "vllm-project/vllm#42802"),
    Fault("target-top-p", lambda rows: replace(rows, q=cut(rows.q, USUAL_TOP_P)),
          f"the target's rows alone are cut to {USUAL_TOP_P.top_p:g} of their mass",
          "vllm-project/vllm#56724"),
    Fault("block-by-token", lambda rows: rows,
          "drafts that should be verified as a whole are verified token by token",
          "vllm-project/vllm-ascend#7807", "block", verifier=Chain()),
    # as if of one law: a token is accepted wherever its coin could be 0
    Fault("coin-zero", lambda rows: replace(rows, p=rows.q[:, :-1]),
          "every acceptance coin is 0, and whatever is possible is accepted",
          "vllm-project/vllm-ascend#13730"),
)  # fmt: skip

# kinds that are no fault where they were asked for
CHECKED_FIRST = frozenset(fault.kind for fault in FAULTS if fault.check_first)


def visible_faults(trace: Trace, verifier: Verifier) -> list[Fault]:
    """Return the faults that can show in decodes as a trace was logged in."""
    header, sampled = trace.header, trace.manifest.total("draft_rows") > 0
    present = {
        "tempered": header.temperature not in (0.0, 1.0),
        "random": header.temperature > 0,
        "sampled": sampled,
        "block": isinstance(verifier, Block),
    }
    return [
        fault
        for fault in FAULTS
        if all(present[word] for word in fault.needs.split())
        and fault.temperature != header.temperature
    ]


def with_faults(trace: Trace, verifier: Verifier) -> dict[str, Verifier]:
    """Return the verifier, named "", and with each fault that can show, by the fault's name."""
    heat, faults = trace.header.temperature, visible_faults(trace, verifier)
    return {"": verifier} | {fault.name: fault.planted(verifier, heat) for fault in faults}
