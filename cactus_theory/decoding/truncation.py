"""Top-k and top-p truncation of rows, after the temperature, for target and draft separately.

Engines differ in whether they also cut the draft's rows. vLLM's model runner V1 draws drafts from
whole rows (vLLM issue 56724). Hugging Face cuts the rows of both models (by transformers issue
47932, verification then reads the draft's rows before the cuts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.rows import checked_logits
from cactus_theory.decoding.drafters import as_drafter
from cactus_theory.decoding.drafters.interface import DraftContext, Drafter, Drafting
from cactus_theory.decoding.probabilities import Warp, checked_temperature
from cactus_theory.decoding.processors import Processors
from cactus_theory.decoding.text import Texts


@dataclass(frozen=True)
class Cuts:
    """Truncation of the target's and the draft's rows: first top-k, then top-p.

    Attributes
    ----------
    top_k : number of likeliest tokens that stay in the target's rows, 0 for all; tokens as likely
        as the k-th stay, too.
    top_p : probability of the nucleus that is kept of the top-k tokens, in (0, 1].
    draft_top_k : as ``top_k`` for the draft's rows; None for the target's value.
    draft_top_p : as ``top_p`` for the draft's rows; None for the target's value.

    Raises
    ------
    ValueError
        A top-k that is no whole number of at least 0, a top-p outside (0, 1].

    Examples
    --------
    >>> print(Cuts(top_k=20), "|", Cuts(top_p=0.9, draft_top_p=1.0), "|", Cuts())
    top-k 20, top-p 1 | top-k 0, top-p 0.9 (draft: top-k 0, top-p 1) | no cuts
    """

    top_k: int = 0
    top_p: float = 1.0
    draft_top_k: int | None = None
    draft_top_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "top_p"):
            if getattr(self, f"draft_{name}") is None:
                object.__setattr__(self, f"draft_{name}", getattr(self, name))
        for side, (top_k, top_p) in zip(("", "draft_"), self._sides, strict=True):
            check.whole_number(f"{side}top_k", top_k, 0)
            share = check.number(f"{side}top_p", top_p, 0, 1, open_low=True)
            object.__setattr__(self, f"{side}top_p", share)

    def __str__(self) -> str:
        target, draft = (f"top-k {top_k}, top-p {top_p:g}" for top_k, top_p in self._sides)
        if self == WHOLE:
            return "no cuts"
        return target if target == draft else f"{target} (draft: {draft})"

    @property
    def _sides(self) -> Sequence[Any]:
        return (self.top_k, self.top_p), (self.draft_top_k, self.draft_top_p)

    @classmethod
    def of(cls, logged: Mapping[str, Any]) -> "Cuts | None":
        """Return the cuts in logged settings, or None without cuts; ValueError for invalid cuts."""
        values: list[Any] = [logged.get(field.name) for field in fields(cls)]
        return cls(*values) if "top_k" in logged else None

    def options(self, temperature: float, soft: bool = False) -> dict[str, Any]:
        """Return the keywords ``temperature`` and ``logits_processor`` that make the target's cuts.

        At temperature 0 cuts change nothing, unless policies read softmax rows there (``soft``).

        Raises
        ------
        ModuleNotFoundError
            transformers is not installed (extra llm), and there is a cut.
        """
        return _options(temperature, self.top_k, self.top_p, soft)

    def rows(self, *logits: Any, temperature: float) -> list[Any]:
        """Return the cut rows of target and draft from their ``logits`` (by :func:`cut_rows`)."""
        sides = zip(logits, self._sides, strict=True)
        return [cut_rows(row, temperature=temperature, top_k=k, top_p=p) for row, (k, p) in sides]

    def drafter(self, draft_model: Any, temperature: float) -> Drafter:
        """Return a drafter with the draft's cuts, for a decode with :meth:`options`."""
        drafter, (target, draft) = as_drafter(draft_model), self._sides
        return drafter if target == draft else _Cut(drafter, _options(temperature, *draft))


WHOLE = Cuts()


def cut_rows(logits: Any, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    """Return rows of probabilities from logits (..., V), as a decode computes them.

    Logits are divided by the temperature (0: greedy), then cut to the ``top_k`` likeliest tokens
    (0: all), then to the nucleus of ``top_p``. Rows are float64, of the input's kind (NumPy array
    or tensor).

    Raises
    ------
    ValueError
        As :class:`Cuts`; a negative temperature, a row of logits without a finite maximum.
    ModuleNotFoundError
        transformers is not installed (extra llm), and there is a cut.

    Examples
    --------
    >>> ct.cut_rows(np.log([0.5, 0.25, 0.15, 0.1]), top_k=3, top_p=0.7).round(3)
    array([0.667, 0.333, 0.   , 0.   ])
    """
    Cuts(top_k, top_p)
    options = _options(checked_temperature(temperature), top_k, top_p)
    scores = checked_logits("logits", tensors.as_tensor("logits", logits))
    rows = scores.reshape(1, -1, scores.shape[-1]).clone()
    warp = Warp(options["temperature"], Processors(options["logits_processor"]))
    texts = Texts([[0]], room=0, eos=frozenset(), device=rows.device)  # no cut reads the texts
    rows = warp(rows, texts, first=0, drafted=[rows.shape[1]])
    return tensors.scalar_like(rows.reshape(scores.shape), logits)


def _options(temperature: float, top_k: int, top_p: float, soft: bool = False) -> dict[str, Any]:
    """Return the keywords ``temperature`` and ``logits_processor`` for one top-k and top-p."""
    if (temperature == 0 and not soft) or (top_k, top_p) == (0, 1.0):
        return {"temperature": temperature, "logits_processor": ()}
    library = check.optional_module("transformers", "llm")
    processors = [library.TemperatureLogitsWarper(float(temperature))] if temperature else []
    processors += [library.TopKLogitsWarper(top_k)] if top_k else []
    processors += [library.TopPLogitsWarper(top_p)] if top_p < 1 else []
    return {"temperature": 1.0 if temperature else 0.0, "logits_processor": processors}


@dataclass(frozen=True)
class _Cut(Drafter):
    """A drafter whose rows are cut differently from the target's."""

    drafter: Drafter
    options: dict[str, Any]

    def begin(self, setting: DraftContext) -> Drafting:
        warp = Warp(self.options["temperature"], Processors(self.options["logits_processor"]))
        return self.drafter.begin(replace(setting, warp=warp))

    def check(self, target_model: Any) -> dict[str, Any]:
        return self.drafter.check(target_model)

    def nodes(self, depth: int) -> int:
        return self.drafter.nodes(depth)

    def reads(self, target_model: Any) -> Sequence[int]:
        return self.drafter.reads(target_model)
