"""Policies relaxed in one section of a text and lossless outside it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cactus_theory.decoding._checks import whole_number
from cactus_theory.decoding.schedule import Schedule, Spec, check_bonus_is_free
from cactus_theory.policies import policy as find_policy
from cactus_theory.verify.contract import Verifier

Marker = int | Sequence[int]


class Section(NamedTuple):
    """Whether a section is open, and the last ids, of which a marker may be half written."""

    open: bool
    tail: tuple[int, ...]


class Between(Schedule):
    """One policy between an opening and a closing marker, another one elsewhere.

    For example a thinking section decoded faster than the answer after it:
    ``Between("cactus:delta=1", opening=5, closing=6)`` is lossless outside. A marker is a token
    or a sequence of tokens (how the tokenizer writes ``<think>``), and there may be several:
    ``opening=[5, (7, 8)]`` are two. A token is inside if an opening marker ends before it in the
    text and no closing one ends after that; so the policy starts with the token after an opening
    marker and ends with the last token of a closing one. Where both end together, the closing
    one counts. Markers in the prompt count; those inside a draft count for the tokens after
    them.

    Guarantee: with ``outside="speculative"`` every token outside the section is drawn from the
    target's row, and the meter charges exactly 0 for it, whatever is drafted and however the
    draft is verified: the policy of a token is chosen from the tokens before it, drafted ones
    included, and where a token is reached its law is that of its own policy (THEORY.md,
    Theorem 18). Markers are looked for as token ids, and a text may be written in several ways:
    :func:`spellings` has the usual ones. Only a marker that is one special token cannot be missed.

    Raises
    ------
    ValueError
        A marker without tokens, one that both opens and closes, an unknown policy.

    Examples
    --------
    >>> thinking = Between("band:price=1", opening=5, closing=6)
    >>> state = thinking.begin([1, 5])  # the prompt opens the section
    >>> thinking.choose(state, torch.tensor([3, 6, 3])).tolist()
    [1, 1, 0]
    """

    def __init__(
        self,
        inside: Spec,
        *,
        outside: Spec = "speculative",
        opening: int | Iterable[Marker],
        closing: int | Iterable[Marker],
    ) -> None:
        self.rules = (find_policy(outside), find_policy(inside))
        self.opening = _markers("opening", opening)
        self.closing = _markers("closing", closing)
        both = sorted(set(self.opening) & set(self.closing))
        if both:
            raise ValueError(f"closing: must differ from opening; got {_shown(both[0])} in both")
        self.memory = max(map(len, self.opening + self.closing)) - 1

    @property
    def spec(self) -> str:
        """Return policies and markers in a line."""
        outside, inside = (rule.spec for rule in self.rules)
        return f"{inside} between {list(self.opening)} and {list(self.closing)}, else {outside}"

    def check(self, verifier: Verifier) -> None:
        """Raise ValueError for a verifier that cannot follow, or that charges bonus tokens."""
        super().check(verifier)
        check_bonus_is_free("Between", verifier)

    def begin(self, prompt: Sequence[int]) -> Section:
        """Return the section after the prompt."""
        return self.advance(Section(False, ()), prompt)

    def advance(self, state: Section, new_ids: Sequence[int]) -> Section:
        """Return the section after more tokens."""
        ids = (*state.tail, *new_ids)
        tail = ids[len(ids) - min(len(ids), self.memory) :]
        if not len(new_ids):
            return state
        return Section(bool(self._after(state, torch.tensor(new_ids))[-1]), tail)

    def choose(self, state: Section, drafted: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Return 1 inside a section, else 0."""
        if not len(drafted):
            return drafted
        before = torch.full_like(drafted[:1], state.open, dtype=torch.bool)
        return torch.cat([before, self._after(state, drafted[:-1])]).long()

    def _after(self, state: Section, ids: Int[Tensor, "count"]) -> Bool[Tensor, "count"]:
        """Return whether a section is open after each of some tokens."""
        text = torch.cat([ids.new_tensor(state.tail), ids])
        closed, opened = (
            _ends(text, markers)[len(state.tail) :] for markers in (self.closing, self.opening)
        )
        count = torch.arange(1, len(ids) + 1, device=ids.device)
        # the latest marker up to each token, 0 for none
        latest = torch.where(opened | closed, count, 0).cummax(0).values
        changed = (opened & ~closed)[(latest - 1).clamp(min=0)] if len(ids) else opened
        return torch.where(latest > 0, changed, torch.full_like(changed, state.open))


def spellings(tokenizer: Any, text: str) -> list[tuple[int, ...]]:
    """Return the token ids of a marker at the start, after a space and on a new line.

    Tokenizers join a marker with what stands around it in yet other ways, if it is not one
    special token: a marker written so is not found.
    """

    def ids(written: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(written, add_special_tokens=False))

    line, lined = ids("\n"), ids(f"\n{text}")
    after_line = lined[len(line) :] if lined[: len(line)] == line else lined
    return list(dict.fromkeys(own for own in (ids(text), ids(f" {text}"), after_line) if own))


def _ends(text: Int[Tensor, "T"], markers: Sequence[Sequence[int]]) -> Bool[Tensor, "T"]:
    """Return at which tokens any of the markers ends."""
    found = torch.zeros_like(text, dtype=torch.bool)
    for marker in markers:
        size = len(marker)
        if len(text) >= size:
            written = text.unfold(0, size, 1) == text.new_tensor(marker)
            found[size - 1 :] |= written.all(-1)
    return found


def _markers(name: str, given: int | Iterable[Marker]) -> tuple[tuple[int, ...], ...]:
    each = [given] if isinstance(given, int) else list(given)
    found = [(one,) if isinstance(one, int) else tuple(one) for one in each]
    if not found or not all(found):
        given_text = "an empty marker" if found else "none"
        raise ValueError(f"{name}: must name at least one token; got {given_text}")
    for token in (token for marker in found for token in marker):
        whole_number(name, token, 0)
    return tuple(found)


def _shown(marker: tuple[int, ...]) -> str:
    return f"token {marker[0]}" if len(marker) == 1 else f"tokens {list(marker)}"
