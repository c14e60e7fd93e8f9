"""Known faults of engines, simulated: what each would count on a trace, or in a decode of a pair.

A fault is one entry of FAULTS. Where rows suffice it changes what the verifier is shown: the
signature is then exact given a healthy decode's rows, at the places where that one's rounds start;
a decode with the fault in it has its own places and texts. Where the draft's passes are wrong only
a decode tells (:class:`Misled`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cactus_theory.base import defaults
from cactus_theory.decoding.drafters import Drafter, ModelDrafter
from cactus_theory.decoding.drafters._base import DraftContext, Drafting
from cactus_theory.decoding.drafters.model import ModelDrafting
from cactus_theory.decoding.models import text_config
from cactus_theory.policies import Policy
from cactus_theory.policies._policy import normalised_or, one_hot
from cactus_theory.traces.expect import Expectation, expect
from cactus_theory.traces.trace import Trace
from cactus_theory.verify.block import Block
from cactus_theory.verify.chain import Chain
from cactus_theory.verify.contract import VerdictLaw, Verifier, find_verifier
from cactus_theory.verify.draft import Assignment, Draft, Verdict


@dataclass(frozen=True)
class Misled(ModelDrafter):
    """Draft with ``model`` by passes over another input than the text so far.

    ``unseen`` is how many of the last tokens are not fed: the row is that of a slot before.
    ``from_round`` lets drafted tokens' positions begin at 0. ``lost`` is how many tokens a refusal
    costs a cache, which is fed at the positions of its slots. ``whole`` ignores a sliding window.
    """

    unseen: int = 0
    from_round: bool = False
    lost: int = 0
    whole: bool = False

    @classmethod
    def without_window(cls, model: Any, greedy: bool) -> "Misled | None":
        """Return a drafter without the model's sliding window; None for a model that has none."""
        window = getattr(text_config(model), "sliding_window", None)
        return cls(model, greedy, whole=True) if window else None

    def begin(self, setting: DraftContext) -> Drafting:
        """Return this drafter at work on one decode."""
        return MisledDrafting(setting, self)


class MisledDrafting(ModelDrafting):
    """Such a drafter at work: one whole pass a token and text."""

    def __init__(self, setting: DraftContext, drafter: Misled) -> None:
        super().__init__(setting, drafter.model, drafter.greedy)
        self.drafter, self.lost = drafter, [set[int]() for _ in range(setting.texts.batch)]
        self.drafted_from = [(length, 0) for length in setting.texts.lengths]

    def fed(self, row: int, offset: int) -> tuple[list[int], list[int]]:
        """Return which tokens of a text a pass is shown, and at which positions."""
        length, lost = self.texts.lengths[row], self.lost[row]
        places = [place for place in range(length + offset) if place not in lost]
        places = places[: max(len(places) - self.drafter.unseen, 1)]
        if self.drafter.from_round:
            return places, [*range(length), *range(offset)]
        return places, list(range(len(places)))

    @torch.inference_mode()
    def _step(self, offset: int, draft_lengths: Sequence[int], coin: Tensor) -> Tensor:
        """Draw a token; rows are padded behind, where no token of theirs looks."""
        model, texts = self.drafter.model, self.texts
        if not offset:
            self.drafted_from = list(zip(texts.lengths, draft_lengths, strict=True))
        fed = [self.fed(row, offset) for row in range(texts.batch)]
        last = torch.tensor([len(places) - 1 for places, _ in fed])
        width = int(last.max()) + 1
        ids, positions = torch.zeros(2, texts.batch, width, dtype=torch.int64, device=texts.device)
        for row, (places, row_positions) in enumerate(fed):
            ids[row, : len(places)] = texts.prefix(row, offset)[0, places]
            positions[row, : len(places)] = torch.tensor(row_positions)
        options: dict[str, Any] = {}
        if self.drafter.whole:
            least = torch.finfo(model.dtype).min
            barred = torch.full((1, 1, width, width), least, dtype=model.dtype)
            options["attention_mask"] = barred.triu(1).to(texts.device)
        self.calls += 1
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **options).logits
        row = logits[torch.arange(texts.batch), last][:, None].clone()
        return self.draw(row, offset, draft_lengths, coin)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().keep(rows)
        self.lost = [self.lost[row] for row in rows]
        self.drafted_from = [self.drafted_from[row] for row in rows]

    def settle(self) -> None:
        """Note what a faulty cache loses after a refusal: the last tokens but the newest."""
        if not self.drafter.lost:
            return
        for row, (before, drafted) in enumerate(self.drafted_from):
            length, lost = self.texts.lengths[row], self.lost[row]
            if length - before <= drafted:
                places = [place for place in range(length - 1) if place not in lost]
                lost |= set(places[-self.drafter.lost :])


# usual default truncation of engines
USUAL_TOP_K = 50
USUAL_TOP_P = 0.95
# other temperatures that engines are often at: 1 where it is ignored, 0 where drafts must be greedy
TEMPERATURES = (0.0, 0.3, 0.6, 0.8, 1.0)
Change = Callable[["Rows"], "Rows"]


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

    These are a decode that is ``tempered``, ``random`` (no temperature of 0) or ``limited`` (its
    trace says how long texts may be), ``sampled`` or ``deterministic`` drafts, the ``block``
    verifier, rows after whole drafts (``bonus``), not tokens drawn from them.
    A ``draft`` is a drafter that has the fault, of a model and whether it is greedy; None if that
    model cannot. Entries whose names differ behind a space are one fault.
    """

    name: str
    says: str
    thread: str  # issue that reports it
    needs: str = ""
    rows: Change | None = None
    replacement: Verifier | None = None  # the verifier used instead
    draft: Callable[[Any, bool], Drafter | None] | None = None
    temperature: float | None = None  # the temperature of both models instead
    short_ends: bool = False  # see expect
    resamples: bool = False  # tokens are drawn otherwise: no verifier alone can decode with it
    check_first: str = ""  # no fault if the engine was asked for it: the flag that says so

    @property
    def kind(self) -> str:
        """Return the name that entries of one fault share."""
        return self.name.partition(" ")[0]

    @property
    def decodes(self) -> bool:
        """Return whether a decode of the models can have it."""
        own_models = self.draft is not None or self.temperature is not None
        return own_models or not (self.resamples or self.short_ends)

    def verifier(self, verifier: Verifier, temperature: float) -> Verifier | None:
        """Return the verifier with the fault; None if it is not the verifier's."""
        if self.rows is None:
            return self.replacement
        return Planted(verifier, self.name, self.rows, temperature)

    def decoding_verifier(self, verifier: Verifier, temperature: float) -> Verifier:
        """Return the verifier of a decode with the fault, healthy where the models have it."""
        if self.draft is not None or self.temperature is not None:
            return verifier
        return self.verifier(verifier, temperature) or verifier


class Planted(Verifier):
    """A verifier that gets changed rows."""

    def __init__(self, verifier: Verifier, name: str, change: Change, temperature: float) -> None:
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


def _raw(rows: Tensor, temperature: float) -> Tensor:
    return rows.double().log().mul(temperature).softmax(-1)


def _cut(rows: Tensor) -> Tensor:
    """Return rows cut to their USUAL_TOP_K likeliest tokens."""
    least = rows.topk(min(USUAL_TOP_K, rows.shape[-1]), -1).values[..., -1:]
    return normalised_or(torch.where(rows >= least, rows, 0.0).double(), rows.double())


def _top_p(rows: Tensor, share: float = USUAL_TOP_P) -> Tensor:
    """Return rows cut to the fewest tokens that have this share of the mass."""
    mass, order = rows.double().sort(descending=True, stable=True)
    before = mass.cumsum(-1) - mass
    kept = torch.where(before < share, mass, 0.0)
    return normalised_or(torch.zeros_like(mass).scatter(-1, order, kept), rows.double())


def _likeliest(rows: Tensor) -> Tensor:
    """Return the rows of a greedy choice."""
    return one_hot(rows.argmax(-1), rows).double()


def _reheated(rows: Rows, temperature: float) -> Rows:
    """Return rows at another temperature of both models."""

    def other(own: Tensor) -> Tensor:
        return _raw(own, rows.temperature / temperature) if temperature else _likeliest(own)

    p = None if rows.p is None else other(rows.p)
    return replace(rows, q=other(rows.q), p=p, sampled=p)


def _greedy(rows: Rows) -> Rows:
    return replace(rows, p=None, sampled=None if rows.p is None else _likeliest(rows.p))


def _shifted(rows: Rows, step: int) -> Rows:
    places = torch.arange(rows.q.shape[1])
    return replace(rows, q=rows.q[:, (places + step).clamp(0, len(places) - 1)])


def _reported_raw(rows: Rows) -> Rows:
    return rows if rows.p is None else replace(rows, p=_raw(rows.p, rows.temperature))


FAULTS = (
    Fault(
        "greedy-drafts",
        "the draft takes its likeliest token, as vLLM's does unless it is told otherwise",
        *("vllm-project/vllm#16899", "sampled random", _greedy),
        draft=lambda model, greedy: ModelDrafter(model, True),
        check_first="--draft-mode greedy",
    ),
    Fault(
        "sampled-drafts",
        "the draft samples its tokens",
        *("vllm-project/vllm#35461", "deterministic random"),
        draft=lambda model, greedy: ModelDrafter(model, False),
        check_first="--draft-mode sampled",
    ),
    *(
        Fault(
            f"both-temperature {temperature:g}",
            "both models are at another temperature: a default of the engine or of the model, or "
            "one that is ignored",
            *("Pushkinist/rMLX#519", "random"),
            rows=partial(_reheated, temperature=temperature),
            temperature=temperature,
            resamples=True,
            check_first=f"--temperature {temperature:g}",
        )
        for temperature in TEMPERATURES
    ),
    Fault(
        "short-ends",
        "at the end of a text fewer tokens are drafted, and its rounds are counted as if not",
        *("ggml-org/llama.cpp#24536", "limited"),
        short_ends=True,
        check_first="--drafted N",
    ),
    Fault(
        "law-before-temperature",
        "the draft samples after its temperature and reports its law before it",
        *("huggingface/transformers#47932", "sampled tempered", _reported_raw),
    ),
    Fault(
        "law-before-top-k",
        f"the draft samples from its {USUAL_TOP_K} likeliest tokens and reports its whole row",
        *("huggingface/transformers#47932", "sampled"),
        rows=lambda rows: replace(rows, sampled=None if rows.p is None else _cut(rows.p)),
        resamples=True,
    ),
    Fault(
        "no-draft-law",
        "sampled tokens are verified as if the draft were deterministic",
        *("vllm-project/vllm#40149", "sampled", lambda rows: replace(rows, p=None)),
    ),
    Fault(
        "rows-late",
        "a drafted token is verified with the target's row after it",
        *("mlx-node/mlx-node#11", "bonus", lambda rows: _shifted(rows, 1)),
    ),
    Fault(
        "rows-early",
        "a drafted token is verified with the target's row of the one before it",
        *("NVIDIA/TensorRT-LLM#15098", "", lambda rows: _shifted(rows, -1)),
    ),
    Fault(
        "target-temperature",
        "the target's rows lack the temperature that the draft's have",
        *("vllm-project/vllm#42744", "tempered"),
        rows=lambda rows: replace(rows, q=_raw(rows.q, rows.temperature)),
    ),
    Fault(
        "draft-temperature",
        "the draft's rows lack the temperature that the target's have",
        *("z-lab/dflash#74", "sampled tempered"),
        rows=lambda rows: replace(raw := _reported_raw(rows), sampled=raw.p),
        resamples=True,
    ),
    Fault(
        "target-top-k",
        f"the target's rows alone are cut to {USUAL_TOP_K} tokens",
        *("vllm-project/vllm#42802", "", lambda rows: replace(rows, q=_cut(rows.q))),
    ),
    Fault(
        "target-top-p",
        f"the target's rows alone are cut to {USUAL_TOP_P:g} of their mass",
        *("vllm-project/vllm#56724", "", lambda rows: replace(rows, q=_top_p(rows.q))),
    ),
    Fault(
        "block-by-token",
        "drafts that should be verified as a whole are verified token by token",
        *("vllm-project/vllm-ascend#7807", "block"),
        replacement=Chain(),
    ),
    Fault(  # as if of one law: a token is accepted wherever its coin could be 0
        "coin-zero",
        "every acceptance coin is 0, and whatever is possible is accepted",
        *("vllm-project/vllm-ascend#13730", "", lambda rows: replace(rows, p=rows.q[:, :-1])),
    ),
    Fault(
        "beyond-the-block",
        "K is beyond the draft's block, and its slots are off by what does not fit",
        "vllm-project/vllm#41834",
        draft=partial(Misled, unseen=1),
    ),
    Fault(
        "positions-by-index",
        "drafted tokens' positions count from the round's start, not the text's",
        "vllm-project/vllm#26498, looks like #51009",
        draft=partial(Misled, from_round=True),
    ),
    Fault(
        "context-lost",
        "every refusal costs the draft's cache two tokens that it never sees again",
        "lablup/mlxcel#994",
        draft=partial(Misled, lost=2),
    ),
    Fault(
        "window-as-full",
        "a draft with a sliding window attends to everything",
        "vllm-project/vllm#40898",
        draft=Misled.without_window,
    ),
)

# kinds that are no fault where they were asked for
CHECKED_FIRST = frozenset(fault.kind for fault in FAULTS if fault.check_first)


def visible_faults(trace: Trace, verifier: Verifier) -> list[Fault]:
    """Return the faults that can show in decodes as a trace was logged in."""
    header, sampled = trace.header, trace.manifest.total("draft_rows") > 0
    present = {
        "tempered": header.temperature not in (0.0, 1.0),
        "random": header.temperature > 0,
        "limited": "max_new_tokens" in header.details,
        "sampled": sampled,
        "deterministic": not sampled,
        "block": isinstance(verifier, Block),
        "bonus": not header.bonus_drawn,
    }
    return [
        fault
        for fault in FAULTS
        if all(present[word] for word in fault.needs.split())
        and fault.temperature != header.temperature
    ]


def row_signatures(
    source: Trace | str | Path,
    policy: str | Policy = defaults.POLICY,
    verifier: str | Verifier = defaults.VERIFIER,
    *,
    num_draft_tokens: int | None = None,
    on_fault: Callable[[str], Any] = str,
) -> dict[str, Expectation]:
    """Return the expected acceptance under each fault that a healthy trace's rows determine.

    ``on_fault`` is called with the name of each one that is done.

    Raises
    ------
    ValueError, NotImplementedError
        As :func:`cactus_theory.traces.expect`.
    """
    verifier, signatures = find_verifier(verifier), {}
    trace = Trace.open(source) if isinstance(source, str | Path) else source
    for fault in visible_faults(trace, verifier):
        faulty = fault.verifier(verifier, trace.header.temperature)
        if faulty is not None or fault.short_ends:
            signatures[fault.name] = expect(
                trace,
                policy,
                faulty or verifier,
                num_draft_tokens=num_draft_tokens,
                short_ends=fault.short_ends,
            )
            on_fault(fault.name)
    return signatures
