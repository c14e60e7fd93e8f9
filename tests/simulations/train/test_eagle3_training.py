"""A head in training is the head that drafts: its losses, its texts, its folder."""

import json

import pytest
import torch

from cactus_theory import losses
from cactus_theory.decoding import Eagle3Drafter
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from simulations.train import eagle3 as heads
from simulations.train.eagle3 import Batch, Unrolled, _Scored, rows_of
from simulations.train.samples import Piece, SampledTexts, Source, Turn, own_prompts, written
from tests.chat_model import chat_tokenizer
from tests.decoding.conftest import random_llama
from tests.decoding.test_eagle3 import plain_logits, write
from tests.threads import one_thread  # noqa: F401

READS, VOCAB = (1, 2, 3), 40


@pytest.fixture(scope="module")
def target():
    return random_llama(vocab=VOCAB, layers=4, pad_token_id=None).float().requires_grad_(False)


@pytest.mark.parametrize("normed", [False, True])
def test_an_unrolled_head_is_the_head_that_drafts(target, tmp_path, normed):
    kept, text, first, places = list(range(0, VOCAB, 2)), torch.arange(3, 12)[None], 4, 3
    weights = write(tmp_path, VOCAB, kept, norm_before_residual=normed)
    head, embedding = Eagle3Head.load(tmp_path), weights["embed_tokens.weight"]
    states = target(text, output_hidden_states=True).hidden_states
    counts = torch.arange(text.shape[1] - 2)[None] == first
    for step in range(1, places):
        counts = counts | (torch.arange(text.shape[1] - 2)[None] == first + step)
    rows, at = states[-1][:, 1:-1], torch.tensor([[first]])
    batch = Batch(
        embedding[text[:, 1:-1]], torch.cat([states[layer][:, :-2] for layer in READS], -1), rows,
        target.lm_head(rows).logsumexp(-1), counts, at, torch.ones_like(at).bool(),
    )  # fmt: skip
    weight = rows_of(target, head.ids)
    _, overlaps, counted = Unrolled(head)(batch, weight, places, True)
    assert counted.tolist() == [3, 1, 1]
    for step in range(1, places):  # n of the target's states, then tokens of the chain
        n = first + 1
        logits = plain_logits(
            weights, embedding.double(), [layer[:, :n].double() for layer in states],
            text[:, : n + 1 + step], normed, READS,
        )[0]  # fmt: skip
        q = target.lm_head(states[-1][0, n + step]).softmax(-1)[head.ids]
        assert overlaps[step].item() == pytest.approx(
            torch.minimum(q, logits.softmax(-1)).sum().item(), abs=1e-5
        )


@pytest.mark.parametrize("by_kl", [True, False])
def test_anchors_stand_for_all_units(target, tmp_path, by_kl):
    """The mean loss of one anchor is that of all."""
    kept, text, places = list(range(0, VOCAB, 2)), torch.arange(3, 12)[None], 3
    embedding = write(tmp_path, VOCAB, kept)["embed_tokens.weight"]
    head, states = Eagle3Head.load(tmp_path), target(text, output_hidden_states=True).hidden_states
    student, weight = Unrolled(head), rows_of(target, head.ids)
    rows, units = states[-1][:, 1:-1], torch.arange(text.shape[1] - 2)[None]

    def loss(anchors):
        batch = Batch(
            embedding[text[:, 1:-1]], torch.cat([states[layer][:, :-2] for layer in READS], -1),
            rows, target.lm_head(rows).logsumexp(-1), torch.ones_like(units).bool(), anchors,
            torch.ones_like(anchors).bool(),
        )  # fmt: skip
        return student(batch, weight, places, by_kl)[0].item()

    mean = sum(loss(units[:, at : at + 1]) for at in range(units.shape[1])) / units.shape[1]
    assert mean == pytest.approx(loss(units), rel=1e-5)


@pytest.mark.parametrize("by_kl", [True, False])
def test_losses_are_those_of_the_package_and_know_of_lost_mass(by_kl):
    source = torch.Generator().manual_seed(0)
    states, rows = torch.randn(2, 300, 6, generator=source).unbind()
    weight, whole = torch.randn(9, 6, generator=source), torch.randn(12, 6, generator=source)
    shares, norms = torch.rand(300, generator=source), (rows @ whole.T).logsumexp(-1)
    inputs = states.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, overlap = _Scored.apply(*inputs, rows, whole[:9], norms, shares, by_kl)
    loss.backward()
    again = states.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = torch.nn.functional.pad(again[0] @ again[1].T, (0, 3), value=-torch.inf)
    q = (rows @ whole.T).softmax(-1)
    if by_kl:
        own = -(q[:, :9] * logits[:, :9].log_softmax(-1)).sum(-1)
    else:
        own = losses.total_variation(rows @ whole.T, logits)
    (own * shares).sum().backward()
    assert loss.item() == pytest.approx((own * shares).sum().item(), rel=1e-5)
    torch.testing.assert_close(overlap, losses.overlap(rows @ whole.T, logits.detach()))
    for mine, theirs in zip(inputs, again, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_pieces_hold_the_states_of_texts_that_the_target_wrote(target, tmp_path):
    ends = frozenset({5, 6, 7, 8})
    turns = [Turn(6, ends, 10, (5, 9, 9)), Turn(8, frozenset({30}))]
    source = Source([[1, 2], [3, 4, 5, 6]], turns)
    (path,) = source.pieces(target, tmp_path, 1, 12, (*READS, 4), seed=3)
    piece, start, kinds = Piece.read(path), 0, set()
    for length in piece.lengths.tolist():
        ids = piece.ids[start : start + length]
        output = target(ids[None], output_hidden_states=True)
        norms = piece.norms[start : start + length]
        own = ~norms.isnan()
        torch.testing.assert_close(norms[own], output.logits[0].logsumexp(-1)[own])
        for place, layer in enumerate((*READS, 4)):
            found = piece.states[start : start + length - 1, place]
            torch.testing.assert_close(found, output.hidden_states[layer][0, :-1])
        text, answer = ids.tolist(), int(own.nonzero()[0]) + 1
        assert text[answer - 2 : answer] == [9, 9] and length - answer <= 8
        assert own.sum() == length - answer  # all that it drew from whole rows
        kinds.add(text[answer - 3] == 5 or text[answer - 3])
        start += length
    assert kinds == {True} or len(kinds) > 1
    assert source.pieces(target, tmp_path, 1, 12, (*READS, 4), seed=3) == [path]


def test_all_first_tokens_have_the_targets_law(target):
    turn = Turn(1, frozenset())
    piece = written(target, [[1, 2, 3]] * 4000, turn, (4,), torch.Generator().manual_seed(0))
    counts = torch.bincount(piece.ids.view(-1, 4)[:, 3], minlength=VOCAB)
    law = target(torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)
    assert float(((counts - 4000 * law) ** 2 / (4000 * law)).sum()) < 80  # χ² of 39, p = 1e-4


def test_every_text_is_in_an_epoch_once(target, tmp_path):
    source = Source([[1], [2, 3]], [Turn(6, frozenset())])
    texts = SampledTexts(
        source.pieces(target, tmp_path, 2, 10, (*READS, 4), 0), target.model.embed_tokens.weight
    )
    batches = texts.shuffled(4, 3, seed=1)
    seen = [batches(step, torch.Generator()) for step in range(5)]
    assert len({tuple(map(float, b.norms.flatten())) for b in seen}) == 5
    lengths = torch.cat([piece.lengths for piece in texts.pieces])  # 7 or 8; six tokens are drawn
    assert sum(int(b.counts.sum()) for b in seen) == int((lengths - 2).sum())
    other = torch.Generator().manual_seed(1)
    again = texts.shuffled(4, 3, seed=1)(3, torch.Generator())
    assert torch.equal(again.norms, seen[3].norms)
    assert again.anchors.shape == (4, 3) and again.real.all()
    assert again.counts.gather(1, again.anchors).all()
    assert not torch.equal(again.anchors, texts.shuffled(4, 3, 1)(3, other).anchors)


def test_the_folder_is_one_that_every_reader_takes(target, tmp_path):
    ids = heads.draft_vocabulary([torch.tensor([7, 7, 9, 1, 1])], 4, VOCAB)
    assert ids.tolist() == [0, 1, 7, 9]
    target.config._model_name_or_path = "something"  # as older files have it
    head = heads.build(target, ids, heads.reads_of(target), seed=0)
    heads.write(head, tmp_path, target, "some/target", 3)
    again = Eagle3Head.load(tmp_path)
    assert again.ids.tolist() == ids.tolist() and again.shares and again.cut
    assert list(again.layers(target)) == list(heads.reads_of(target))
    for (name, one), two in zip(head.named_parameters(), again.parameters(), strict=True):
        assert "embed_tokens" in name or torch.equal(one.half(), two.half())
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    Eagle3Drafter.load(tmp_path).check(target)


def test_a_target_writes_prompts_by_its_template():
    tokenizer = chat_tokenizer()
    source = own_prompts(tokenizer, frozenset({2}), 40, 192)
    (opening,), (user, answer) = source.beginnings, source.turns
    assert tokenizer.decode(opening) == "<|im_start|>user\n"
    assert tokenizer.decode(user.after) == "<|im_end|>\n<|im_start|>assistant\n"
    assert (user.most, user.top, user.ends) == (40, 50, {2})
    assert answer == Turn(192, frozenset({2}))
    with pytest.raises(ValueError, match="needs a chat template"):
        own_prompts(chat_tokenizer(None), frozenset(), 1, 1)
