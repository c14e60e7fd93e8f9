"""Drafters on the target's states: their rows, laws, batches, both passes, greedy texts, files."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from cactus_theory.decoding import (
    BlockDrafter,
    RecurrentDrafter,
    generate,
)
from cactus_theory.decoding._sampling import Warp
from cactus_theory.decoding._text import Texts
from cactus_theory.decoding.drafters import Setting, load
from cactus_theory.decoding.drafters._heads import HeadShape
from cactus_theory.decoding.drafters.block import BlockHead
from cactus_theory.decoding.drafters.recurrent import RecurrentHead
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.options import Callbacks
from cactus_theory.decoding.result import Stopwatch
from cactus_theory.testing import assert_drafter_properties
from tests.amounts import amount, some
from tests.decoding.test_ragged import compare, prompts

heads = pytest.importorskip("simulations.train_pair.heads")

PROMPTS = torch.tensor([[1, 5, 9, 2], [0, 0, 4, 2], [0, 0, 0, 1]])
EOS, PLACES, STEPS = [3, 11], 5, 16
# the library, which training runs in, takes norms in float32
CLOSE = 1e-5
NAMES = ("block", "greedy", "stopped", "recurrent")


@pytest.fixture(scope="module")
def drafters(tiny):
    """Return drafters by name, on heads that have learned a little of the tiny target."""
    target = tiny[0]
    starts = torch.arange(12)[:, None]
    texts = generate(target, None, starts, max_new_tokens=23, seed=1).output_token_ids

    @cache
    def trained(kind):
        head = heads.build(kind, target, 0, PLACES, layers=1).double()
        loss = heads.head_loss(target, heads.by_kl, 0)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        for _ in range(STEPS):
            loss(head, torch.cat([starts, texts], 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind == "block":  # what is foretold shall depend on the path
            source, (path, bias) = torch.Generator().manual_seed(0), head.confidence.parameters()
            torch.nn.init.zeros_(path)
            torch.nn.init.normal_(path[:, head.shape.width :], 0, 0.5, source)
            torch.nn.init.zeros_(bias)
        return head.eval().requires_grad_(False)

    trained("block"), trained("recurrent")  # now: tests may ask in inference mode

    def named(name):
        if name == "recurrent":
            return RecurrentDrafter(trained("recurrent"))
        block = BlockDrafter(trained("block"))
        others = {"stopped": replace(block, stop=0.3), "greedy": replace(block, greedy=True)}
        return others.get(name, block)

    return named


@pytest.mark.parametrize("name", some(NAMES, 1))
def test_tokens_are_drawn_from_the_rows_that_are_reported(tiny, drafters, name):
    rounds = amount(2, 20)
    options = {"rounds": rounds, "num_draft_tokens": amount(2, 4)}
    assert assert_drafter_properties(drafters(name), tiny[0], **options) > 2 * rounds


@pytest.mark.parametrize(("name", "fast"), some([(a, b) for a in NAMES for b in (True, False)], 2))
def test_a_text_of_a_batch_is_the_one_it_is_alone(tiny, drafters, name, fast):
    options = {"max_new_tokens": 12, "eos_token_ids": EOS, "num_draft_tokens": 4}
    options["fast_forward"] = fast
    both = compare(tiny[0], drafters(name), prompts(), options, "band:price=1")
    assert both.num_accepted > 0 and len(set(both.row_lengths)) > 1


@pytest.mark.parametrize("name", ["block", "recurrent"])
def test_rows_are_those_of_training(tiny, drafters, name):
    """A drafter runs over its cache what training ran over a whole window."""
    states = {"block": heads.block_states, "recurrent": heads.recurrent_states}[name]
    assert_rows_are_those_of_training(tiny[0], drafters(name), states)


def assert_rows_are_those_of_training(target, drafter, states):
    rows = []
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
        path = [shown.before] if isinstance(drafter, BlockDrafter) else []
        logits = drafter.head.logits(states(drafter.head, shown), *path)
        count = draft.lengths[0]
        due = logits[0, 0, :count].softmax(-1)
        assert torch.allclose(draft.probs[0, :count], due, rtol=0, atol=CLOSE)
        checked += count
    assert checked > 10


def test_a_stop_ends_a_draft_before_the_place_that_falls_below_it(tiny, drafters):
    """It depends on the tokens before that place, and not on the number that draws its own."""
    block, lengths = drafters("block"), set()
    states = CachedModel(tiny[0], 20, reads=block.reads(tiny[0]))
    with torch.inference_mode():
        states.feed(PROMPTS[:1], [3], [1])
        for coins in torch.rand(20, PLACES, generator=torch.Generator().manual_seed(0)).double():
            whole, stopped = (
                proposed(tiny[0], replace(block, stop=stop), states, coins) for stop in (None, 0.3)
            )
            count = stopped.lengths[0]
            assert whole.lengths == [PLACES]
            assert stopped.token_ids[0, :count].equal(whole.token_ids[0, :count])
            moved = coins.clone()
            moved[count - 1 :] = 1 - moved[count - 1 :]
            other = proposed(tiny[0], replace(block, stop=0.3), states, moved)
            assert other.lengths[0] >= count  # what ended it is known once its last token is
            moved = coins.clone()
            moved[count:] = 1 - moved[count:]
            assert proposed(tiny[0], replace(block, stop=0.3), states, moved).lengths[0] == count
            lengths.add(count)
        once = proposed(tiny[0], replace(block, stop=1.0), states, coins)
    assert len(lengths) > 1 and once.lengths == [1]


@pytest.mark.parametrize("name", ["block", "recurrent"])
def test_the_row_after_the_last_token_is_the_one_it_would_be_drawn_from(tiny, drafters, name):
    states = CachedModel(tiny[0], 20, reads=(1, 2))
    coins = torch.rand(PLACES, generator=torch.Generator().manual_seed(1)).double()
    with torch.inference_mode():
        states.feed(PROMPTS[:1], [3], [1])
        longer = proposed(tiny[0], drafters(name), states, coins, 4)
        short = proposed(tiny[0], drafters(name), states, coins, 3, next_row=True)
        most = proposed(tiny[0], drafters(name), states, coins, PLACES, next_row=True)
    assert short.probs.shape[1] == 4 and short.lengths == [3]
    assert torch.allclose(short.probs, longer.probs, rtol=0, atol=1e-12)
    assert most.lengths == [PLACES - 1] and most.probs.shape[1] == PLACES


def proposed(target, drafter, states, coins, wanted=PLACES, next_row=False):
    """Return what is drafted after the first prompt, whose states are there."""
    texts = Texts(PROMPTS[:1].tolist(), 12, frozenset(), torch.device("cpu"))
    warp = Warp(1.0, (), [0])
    setting = Setting(target, texts, warp, Stopwatch(), PLACES, None, next_row, states)
    return drafter.begin(setting).propose([wanted], coins[None])


def test_more_tokens_than_places_are_not_drafted(tiny, drafters):
    options = {"policy": "speculative", "num_draft_tokens": 9, "max_new_tokens": 20}
    result = generate(tiny[0], drafters("block"), PROMPTS[:1], **options)
    assert max(drafted for drafted, _, _ in result.reading.rounds) == PLACES


@pytest.mark.parametrize("kind", [BlockHead, RecurrentHead])
def test_a_head_is_loaded_as_it_was_saved(make_model, tmp_path, kind):
    shape = HeadShape(vocab=24, hidden=32, reads=(1, 2), places=4, width=32, rank=8)
    head = kind(shape)
    head.save(tmp_path)
    found = kind.load(tmp_path)
    assert found.shape == shape and not found.training
    for name, own in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], own.half().float())
    drafter = load(tmp_path)
    assert drafter == type(drafter)(drafter.head) and type(drafter.head) is kind
    options = {"policy": "speculative", "max_new_tokens": 8, "num_draft_tokens": 3, "seed": 1}
    target = make_model(dtype=torch.float32)
    due = generate(target, type(drafter)(head.half().float().eval()), PROMPTS[:1], **options)
    for own in (drafter, tmp_path, str(tmp_path)):  # the rows are no weights, and there too
        text = generate(target, own, PROMPTS[:1], **options).output_token_ids
        assert text.equal(due.output_token_ids)
    other = RecurrentHead if kind is BlockHead else BlockHead
    with pytest.raises(ValueError, match=f"folder: must hold a {other.kind} head; got ValueError"):
        other.load(tmp_path)
    described = json.loads((tmp_path / "head.json").read_text())
    refused = f"folder: must hold a {kind.kind} head; got RuntimeError: Error.s. in loading"
    for claimed in ({"rank": 9}, {"vocab": 10**12}):  # of which no memory is taken
        (tmp_path / "head.json").write_text(json.dumps(described | claimed))
        with pytest.raises(ValueError, match=refused):
            kind.load(tmp_path)
    for layers in (10**9, 1):  # none is built to be compared
        (tmp_path / "head.json").write_text(json.dumps(described | {"layers": layers}))
        with pytest.raises(ValueError, match=f"layers must be the 2 stored; got {layers}"):
            kind.load(tmp_path)
    with pytest.raises(ValueError, match="folder: must hold a block head; got FileNotFoundError"):
        BlockDrafter.load(tmp_path / "none")
    refused = "folder: must hold a head.json of kind block or recurrent; got"
    (tmp_path / "head.json").write_text(json.dumps(described | {"kind": "tree"}))
    with pytest.raises(ValueError, match=f"{refused} 'tree'"):
        load(tmp_path)
    for damaged in ("[1]", "{"):
        (tmp_path / "head.json").write_text(damaged)
        with pytest.raises(ValueError, match=f"{refused} None"):
            load(tmp_path)
    with pytest.raises(ValueError, match="draft_model: must be a head's folder; got"):
        generate(target, tmp_path / "none", PROMPTS, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank: must be an integer of at least 1; got 0"),
        ({"places": True}, "places: must be an integer of at least 1; got True"),
        ({"head_size": 5}, "head_size: must divide width 128; got 5"),
        ({"reads": ()}, r"reads: must be layers of the target; got \(\)"),
    ],
)
def test_bad_sizes_are_one_error(change, message):
    with pytest.raises(ValueError, match=message):
        HeadShape(**{"vocab": 24, "hidden": 32, "reads": (1,)} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 16}, "target_model: vocabulary must be that of the head, 16; got 24"),
        ({"hidden": 16}, "target_model: hidden size must be that of the head, 16; got 32"),
        ({"reads": (3,)}, r"reads: must be layers in \[0, 2\]; got 3"),
    ],
)
def test_a_head_for_another_target_is_refused(tiny, change, message):
    head = BlockHead(HeadShape(**{"vocab": 24, "hidden": 32, "reads": (1,)} | change))
    with pytest.raises(ValueError, match=message):
        generate(tiny[0], BlockDrafter(head), PROMPTS, policy="speculative", max_new_tokens=4)
    with pytest.raises(ValueError, match=r"stop: must lie in \[0, 1\]; got 2"):
        BlockDrafter(head, stop=2)
