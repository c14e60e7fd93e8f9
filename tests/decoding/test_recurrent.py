"""The drafter on the target's states: its rows, laws, batches, both passes, greedy texts, files."""

import json
from dataclasses import replace

import pytest
import torch

from cactus_theory.decoding import RecurrentDrafter, generate
from cactus_theory.decoding._sampling import Warp
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import DraftContext
from cactus_theory.decoding.drafters.recurrent_head import HeadShape, RecurrentHead
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.result import Stopwatch
from tests.amounts import amount, some
from tests.decoding.test_ragged import compare, prompts
from tests.kits.drafters import assert_drafter_properties

heads = pytest.importorskip("simulations.train_pair.heads")

PROMPTS = torch.tensor([[1, 5, 9, 2], [0, 0, 4, 2], [0, 0, 0, 1]])
EOS, PLACES, STEPS = [3, 11], 5, 16
# the library, which training runs in, takes norms in float32
CLOSE = 1e-5
NAMES = ("sampled", "greedy")


@pytest.fixture(scope="module")
def drafters(tiny):
    """Return drafters by name, on a head that has learned a little of the tiny target."""
    target = tiny[0]
    starts = torch.arange(12)[:, None]
    texts = generate(target, None, starts, max_new_tokens=23, seed=1).output_token_ids

    head = heads.build(target, 0, PLACES, layers=1).double()
    loss = heads.head_loss(target, heads.by_kl, 0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss(head, torch.cat([starts, texts], 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    head.eval().requires_grad_(False)
    return {name: RecurrentDrafter(head, greedy=name == "greedy") for name in NAMES}


@pytest.mark.parametrize("name", some(NAMES, 1))
def test_tokens_are_drawn_from_the_rows_that_are_reported(tiny, drafters, name):
    rounds = amount(2, 20)
    options = {"rounds": rounds, "num_draft_tokens": amount(2, 4)}
    assert assert_drafter_properties(drafters[name], tiny[0], **options) > 2 * rounds


@pytest.mark.parametrize(("name", "fast"), some([(a, b) for a in NAMES for b in (True, False)], 2))
def test_a_text_of_a_batch_is_the_one_it_is_alone(tiny, drafters, name, fast):
    options = {"max_new_tokens": 12, "eos_token_ids": EOS, "num_draft_tokens": 4}
    options["fast_forward"] = fast
    both = compare(tiny[0], drafters[name], prompts(), options, "band:price=1")
    assert both.num_accepted > 0 and len(set(both.row_lengths)) > 1


def test_rows_are_those_of_training(tiny, drafters):
    """A drafter runs over its cache what training ran over a whole window."""
    target, drafter, rows = tiny[0], drafters["sampled"], []
    options = {"policy": "speculative", "num_draft_tokens": 4, "max_new_tokens": 12, "meter": False}

    def keep(target_probs, draft, places, earlier):
        rows.append((earlier[0], draft))

    prompt = PROMPTS[:1]
    result = generate(target, drafter, prompt, callbacks=Callbacks(on_rows=keep), **options)
    text = result.output_token_ids[0].tolist()
    checked = 0
    for made, draft in rows[1:]:
        settled = prompt[0].tolist() + text[:made]
        window = torch.tensor([settled + draft.token_ids[0].tolist() + [0] * (PLACES + 1)])
        shown = heads.windows_of(drafter.head, target, window, torch.Generator())
        shown = replace(shown, anchors=torch.tensor([[len(settled) - 2]]))
        logits = drafter.head.logits(heads.states_of(drafter.head, shown))
        count = draft.lengths[0]
        due = logits[0, 0, :count].softmax(-1)
        assert torch.allclose(draft.probs[0, :count], due, rtol=0, atol=CLOSE)
        checked += count
    assert checked > 10


def test_the_row_after_the_last_token_is_the_one_it_would_be_drawn_from(tiny, drafters):
    drafter = drafters["sampled"]
    states = CachedModel(tiny[0], 20, reads=(1, 2))
    coins = torch.rand(PLACES, generator=torch.Generator().manual_seed(1)).double()
    with torch.inference_mode():
        states.feed(PROMPTS[:1], [3], [1])
        longer = proposed(tiny[0], drafter, states, coins, 4)
        short = proposed(tiny[0], drafter, states, coins, 3, next_row=True)
        most = proposed(tiny[0], drafter, states, coins, PLACES, next_row=True)
    assert short.probs.shape[1] == 4 and short.lengths == [3]
    assert torch.allclose(short.probs, longer.probs, rtol=0, atol=1e-12)
    assert most.lengths == [PLACES - 1] and most.probs.shape[1] == PLACES


def proposed(target, drafter, states, coins, wanted=PLACES, next_row=False):
    """Return what is drafted after the first prompt, whose states are there."""
    texts = Texts(PROMPTS[:1].tolist(), 12, frozenset(), torch.device("cpu"))
    warp = Warp(1.0)
    setting = DraftContext(target, texts, warp, Stopwatch(), PLACES, None, next_row, states)
    return drafter.begin(setting).propose([wanted], coins[None])


def test_more_tokens_than_places_are_not_drafted(tiny, drafters):
    options = {"policy": "speculative", "num_draft_tokens": 9, "max_new_tokens": 20}
    result = generate(tiny[0], drafters["sampled"], PROMPTS[:1], **options)
    assert max(drafted for drafted, _, _ in result.reading.rounds) == PLACES


def test_a_head_is_loaded_as_it_was_saved(make_model, tmp_path):
    shape = HeadShape(vocab=24, hidden=32, reads=(1, 2), places=4, width=32, rank=8)
    head = RecurrentHead(shape)
    head.save(tmp_path)
    found = RecurrentHead.load(tmp_path)
    assert found.shape == shape and not found.training
    for name, own in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], own.half().float())
    drafter = RecurrentDrafter.load(tmp_path)
    options = {"policy": "speculative", "max_new_tokens": 8, "num_draft_tokens": 3, "seed": 1}
    target = make_model(dtype=torch.float32)
    due = generate(target, RecurrentDrafter(head.half().float().eval()), PROMPTS[:1], **options)
    for own in (drafter, tmp_path, str(tmp_path)):  # the rows are no weights, and there too
        text = generate(target, own, PROMPTS[:1], **options).output_token_ids
        assert text.equal(due.output_token_ids)
    described = json.loads((tmp_path / "head.json").read_text())
    refused = "folder: must hold a head; got RuntimeError: Error.s. in loading"
    for claimed in ({"rank": 9}, {"vocab": 10**12}):  # of which no memory is taken
        (tmp_path / "head.json").write_text(json.dumps(described | claimed))
        with pytest.raises(ValueError, match=refused):
            RecurrentHead.load(tmp_path)
    for layers in (10**9, 1):  # none is built to be compared
        (tmp_path / "head.json").write_text(json.dumps(described | {"layers": layers}))
        with pytest.raises(ValueError, match=f"layers must be the 2 stored; got {layers}"):
            RecurrentHead.load(tmp_path)
    with pytest.raises(ValueError, match="folder: must hold a head; got FileNotFoundError"):
        RecurrentDrafter.load(tmp_path / "none")
    (tmp_path / "head.json").write_text(json.dumps(described | {"format": 2}))
    with pytest.raises(ValueError, match="must hold a head; got ValueError: format must be 1"):
        RecurrentDrafter.load(tmp_path)
    for damaged in ("[1]", "{", json.dumps(described | {"kind": "tree"})):
        (tmp_path / "head.json").write_text(damaged)
        with pytest.raises(ValueError, match="folder: must hold a head; got"):
            RecurrentDrafter.load(tmp_path)
    with pytest.raises(ValueError, match="draft_model: must be one of ngram.* or a head's folder"):
        generate(target, tmp_path / "none", PROMPTS, **options)
