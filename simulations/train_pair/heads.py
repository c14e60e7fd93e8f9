"""Train a head on a target's hidden states, step by step along the text that follows an anchor.

It learns the target's rows there; places count as far as the head's own drafts would get.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from transformers import DynamicCache

from cactus_theory import losses
from cactus_theory.decoding.drafters.recurrent_head import HeadShape, RecurrentHead

# most drafts of a window
ANCHORS = 32
Judge = Callable[[Tensor, Tensor], losses.Judged]


def by_kl(q: Tensor, p: Tensor) -> losses.Judged:
    """Judge by KL(q‖p)."""
    return losses.Judged(losses.forward_kl(q, p), losses.overlap(q, p).detach())


def at_price(price: float) -> Judge:
    """Return the judge by acceptance, of which a nat costs ``price``."""
    return partial(losses.at_price, price=price)


@dataclass(frozen=True)
class Windows:
    """A target's outputs on windows (B, L + 1), and the anchors (B, A) that are drafted from.

    Unit j − 1 stands for token j. From anchor a (a unit), place i follows token a + i, and the
    target's row there is what is to be learned.
    """

    units: Float[Tensor, "batch some width"]
    tokens: Int[Tensor, "batch length"]
    logits: Float[Tensor, "batch length vocab"]
    anchors: Int[Tensor, "batch anchors"]
    places: int
    embedding: Any

    @property
    def at(self) -> Int[Tensor, "batch anchors places"]:
        """Return the tokens that the places of every anchor follow."""
        return self.anchors[..., None] + torch.arange(1, self.places + 1)

    @property
    def before(self) -> Int[Tensor, "batch anchors places"]:
        """Return the ids of those tokens."""
        return self.of(self.tokens, self.at)

    def of(self, rows: Tensor, at: Int[Tensor, "batch ..."]) -> Tensor:
        """Return the entries of ``rows`` (B, n, …) at indices (B, …)."""
        return rows[torch.arange(len(rows)).view(-1, *[1] * (at.ndim - 1)), at]


def build(target: Any, seed: int, places: int, **sizes: int) -> RecurrentHead:
    """Return a new head for a target: it reads three layers, and begins with the target's own head.

    ``sizes`` are others of its shape. The head of low rank starts at the first singular vectors of
    the target's.
    """
    config = target.config
    depth = config.num_hidden_layers
    reads = tuple(sorted({max(depth // 4, 1), -(-2 * depth // 3), depth}))
    shape = HeadShape(config.vocab_size, config.hidden_size, reads, places, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = RecurrentHead(shape)
    turned, sizes, _ = torch.linalg.svd(target.get_output_embeddings().weight, full_matrices=False)
    first = (turned * sizes)[:, : shape.rank]
    with torch.no_grad():
        head.vocabulary.weight[:, : first.shape[1]] = first
    return head


def windows_of(
    head: RecurrentHead, target: Any, window: Int[Tensor, "batch more"], source: Generator
) -> Windows:
    """Run the target over windows and choose anchors, each with room for all places."""
    tokens, places = window[:, :-1], head.shape.places
    with torch.no_grad():
        output = target(tokens, output_hidden_states=True, use_cache=False)
        states = [output.hidden_states[layer][:, :-1] for layer in head.shape.reads]
        embedded = target.get_input_embeddings()(tokens[:, 1:])
    room = tokens.shape[1] - places
    at = torch.rand(len(tokens), room, generator=source).topk(min(ANCHORS, room)).indices
    units, embedding = head.units(states, embedded), target.get_input_embeddings()
    return Windows(units, tokens, output.logits, at, places, embedding)


def states_of(head: RecurrentHead, windows: Windows) -> Float[Tensor, "batch anchors places width"]:
    """Return the states of every step, unrolled: each follows from the one before it."""
    units, anchors = windows.units, windows.anchors
    batch, count = anchors.shape
    cache, positions = DynamicCache(config=head.core.config), torch.arange(units.shape[1])
    run = head.core.model
    output = run(inputs_embeds=units, past_key_values=cache, use_cache=True)
    states = [windows.of(output.last_hidden_state, anchors)]
    mask = positions <= anchors[..., None]
    itself = torch.eye(count, dtype=torch.bool).expand(batch, -1, -1)
    for step in range(1, windows.places):
        embedded = windows.embedding(windows.before[:, :, step]).detach()
        x = head.state(states[-1]) + head.token(head.normed(embedded))
        mask = torch.cat([mask, itself], 2)
        output = run(
            inputs_embeds=x,
            attention_mask=mask[:, None],
            position_ids=anchors + step,
            past_key_values=cache,
            use_cache=True,
        )
        states.append(output.last_hidden_state)
    return torch.stack(states, 2)


def judgement(head: RecurrentHead, windows: Windows, judge: Judge) -> losses.Judged:
    """Return loss and acceptance of every place (B, A, K)."""
    logits = head.logits(states_of(head, windows))
    return judge(windows.of(windows.logits, windows.at).float(), logits.float())


def head_loss(target: Any, judge: Judge, seed: int) -> Callable[[Any, Tensor], Tensor]:
    """Return the mean loss of a block, places weighed by the probability of reaching them.

    Anchors follow from the window, so that a run that was resumed goes on with the same ones.
    """

    def loss(head: RecurrentHead, window: Tensor) -> Tensor:
        source = Generator().manual_seed(seed + int(window.sum()))
        windows = windows_of(head, target, window, source)
        return losses.along_block(*judgement(head, windows, judge)).mean()

    return loss


@torch.inference_mode()
def overlaps(
    head: RecurrentHead, target: Any, texts: Int[Tensor, "texts more"], seed: int
) -> list[float]:
    """Return the mean overlap of each place with the target's row there, along texts."""
    source, total = Generator().manual_seed(seed), torch.zeros(head.shape.places).double()
    for window in texts.split(16):
        windows = windows_of(head, target, window, source)
        acceptance = judgement(head, windows, by_kl).acceptance
        total += acceptance.double().mean((0, 1)) * len(window) / len(texts)
    return [round(value, 4) for value in total.tolist()]
