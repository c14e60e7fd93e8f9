"""Every bad argument is refused before the first forward pass, by name, rule and value."""

import json
import math
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from cactus_theory.decoding import (
    Between,
    ByPosition,
    Eagle3Drafter,
    EarlyExit,
    Ledger,
    ModelDrafter,
    NGram,
    Siblings,
    generate,
    load_pair,
    speculative_generate,
)
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.text import check_same_vocabulary
from cactus_theory.decoding.truncation import Cuts
from simulations.common.inputs import PAIR
from tests.decoding.models.families import build, families
from tests.decoding.test_ragged import padded, prompts

PROMPT = torch.tensor([[1, 5, 9]])
ROWS, MASK = padded(prompts())
TREE = {"verifier": "tree", "num_draft_tokens": 4}
BAND = "band:price=1"
HEAD = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2}  # fmt: skip


class Pair(SimpleNamespace):
    """The tiny pair, and the calls whose arguments are wrong."""

    def decode(self, draft=None, ids=PROMPT, target=None, **options):
        given = {"policy": "speculative", "max_new_tokens": 4} | options
        return generate(target or self.target, draft or self.draft, ids, **given)

    def rows(self, **options):
        return self.decode(ids=ROWS, **{"attention_mask": MASK} | options)

    def plain(self, ids):
        return generate(self.target, None, ids, max_new_tokens=4)

    def library(self, **options):
        given = {"custom_generate": speculative_generate, "pad_token_id": 6, "max_new_tokens": 4}
        return self.target.generate(PROMPT, **given | options)

    def hooked(self, **options):
        return self.library(**{"draft_model": self.draft} | options)

    def head(self, reads=(1,), **change):
        options = {"eagle_aux_hidden_state_layer_ids": list(reads)}
        layer = LlamaConfig(**HEAD | change)
        return self.decode(Eagle3Drafter(Eagle3Head(layer, options, shares=True)))


@pytest.fixture
def pair(tiny, make_model):
    return Pair(target=tiny[0], draft=tiny[1], make=make_model)


# fmt: off
TYPES = [
    (lambda on: on.decode(ids=[[1, 2]]), "input_ids: must be an int64 tensor; got list"),
    (lambda on: on.decode(ids=torch.ones(1, 3)), "got torch.float32"),
    (lambda on: on.decode(3), "draft_model: must be a causal LM, a Drafter or"),
    (lambda on: Siblings(on.draft), r"must be a Drafter, as ModelDrafter\(model\); got Llama"),
]
VALUES = [
    (lambda on: on.decode(ids=PROMPT[0]), r"shape must be \(B, T\) .* got \(3,\)"),
    (lambda on: on.decode(ids=PROMPT[:, :0]), r"at least one token; got \(1, 0\)"),
    (lambda on: on.decode(ids=torch.tensor([[3, 24]])), r"ids must lie in \[0, 24\); got 24"),
    (lambda on: on.plain(torch.tensor([[-1, 3]])), r"ids must lie in \[0, 24\); got -1"),
    (lambda on: on.decode(target=on.make(positions=16), max_new_tokens=14),
     r"the 16 positions of target_model; got 3 \+ 14 = 17"),
    (lambda on: on.decode(on.make(vocab=12)),
     r"draft_model: vocabulary .*\(24 tokens\), .*; got 12"),
    (lambda on: on.decode(ModelDrafter(on.make(vocab=12))), "draft_model: vocabulary .*got 12"),
    (lambda on: on.decode(on.make(vocab=48)), r"\(24 tokens\), up to padding"),
    (lambda on: on.decode(on.make().train()), "draft_model: must be in evaluation mode"),
    (lambda on: on.decode("nowhere"), "draft_model: must be one of .*; got 'nowhere'"),
    # of rows
    (lambda on: on.rows(seed=[1, 2]), r"seed: must be one per row of input_ids \(7\); got 2"),
    (lambda on: on.rows(seed=1.5), "seed: must be an integer of at least 0; got 1.5"),
    (lambda on: on.rows(policy=["speculative"] * 3),
     r"policy: must be one or one per row .*\(7\); got 3"),
    (lambda on: on.rows(attention_mask=torch.ones(7, 2)),
     r"attention_mask: shape must .*\(7, 9\); got"),
    (lambda on: on.rows(attention_mask=torch.zeros(7, 9)),
     "attention_mask: must be 1 on the last token .* row 0"),
    # of drafters
    (lambda on: NGram(longest=1, shortest=2), "longest: must be an integer of at least 2; got 1"),
    *[(lambda on, own=own: on.decode(EarlyExit(own)),
     r"layers: must be an integer in \[1, 2\); got")
      for own in (0, 2, True, 1.0)],
    (lambda on: on.decode("skip:1"), r"layers: must be an integer in \[1, 1\); got 1"),
    (lambda on: on.decode("skip:x"), "draft: must say how many layers, as skip:3; got 'skip:x'"),
    (lambda on: ModelDrafter(None, stop=1.2), "stop: .*got 1.2"),
    (lambda on: EarlyExit(1, stop=1.2), "stop: .*got 1.2"),
    (lambda on: ModelDrafter(None, stop="high"), "stop: .*must be a number"),
    (lambda on: EarlyExit(1, stop="high"), "stop: .*must be a number"),
    (lambda on: on.head(vocab_size=16),
     "target_model: vocabulary must be that of the head, 16; got 24"),
    (lambda on: on.head(hidden_size=16),
     "target_model: hidden size must be that of the head, 16; got 32"),
    (lambda on: on.head(reads=[2]), r"layers that the head reads, \[2\]; got 2 layers"),
    *[(lambda on, own=own: CachedModel(on.target, 4, reads=[own]),
       r"reads: must be layers in \[0, 2\]; got") for own in (-1, 3, True, "last")],
    # of siblings
    (lambda on: on.decode(Siblings(ModelDrafter(on.draft))),
     "Siblings drafts trees, and chain verifies one drafted"),
    (lambda on: on.decode(Siblings(ModelDrafter(on.draft)), **TREE, device_loop=True),
     "where a drafter is more than a model"),
    (lambda on: Siblings(Siblings(ModelDrafter(on.draft))), "must draft one path; got Siblings"),
    (lambda on: Siblings(ModelDrafter(on.draft), -1),
     "m: must be an integer of at least 0; got -1"),
    (lambda on: on.decode(Siblings(ModelDrafter(bloom())), target=bloom(), **TREE),
     "parents: must be None for BloomForCausalLM"),
    # of schedules
    (lambda on: Ledger(BAND, -0.1), "cap: must lie in .* got -0.1"),
    (lambda on: Ledger(BAND, math.inf), "cap: must be finite; got inf"),
    (lambda on: Ledger(BAND, 0.1, burst=-1), "burst: must lie in .* got -1"),
    (lambda on: Between("typical", opening=3, closing=3), r"closing: must differ .* \[3\]"),
    (lambda on: Between("typical", opening=(), closing=3), "opening: must name at least one"),
    (lambda on: Between("typical", opening=-1, closing=3), "opening: must be an integer .* -1"),
    (lambda on: ByPosition([(1, "typical")]), r"steps: positions must start at 0 .* \(1,\)"),
    (lambda on: ByPosition([(0, "typical"), (0, "typical")]), r"steps: .*\(0, 0\)"),
    # of rows that are cut
    (lambda on: Cuts(top_k=-1), "^top_k: must be an integer of at least 0"),
    (lambda on: Cuts(draft_top_k=1.5), "^draft_top_k: must be an integer"),
    (lambda on: Cuts(top_p=0.0), r"^top_p: must lie in \(0, 1\]"),
    (lambda on: Cuts(draft_top_p=2), r"^draft_top_p: must lie in \(0, 1\]"),
    # of generate of the library
    (lambda on: on.hooked(draft_model=None),
     "draft_model: must be a causal LM or a drafter .*; got None"),
    (lambda on: on.hooked(num_beams=2), "num_beams: must be 1 for speculative decoding .*; got 2"),
    (lambda on: on.hooked(guidance_scale=1.5), "guidance_scale: must be 1 .*; got 1.5"),
    (lambda on: on.hooked(output_scores=True, return_dict_in_generate=True),
     r"output_scores: must be False for .* \(generate takes it without .*\); got True"),
    (lambda on: on.library(prompt_lookup_num_tokens=2),
     r"prompt_lookup_num_tokens: must be .*here it is draft_model=NGram\(\)"),
    (lambda on: on.library(num_assistant_tokens=7),
     "num_assistant_tokens: must be 20 .*here it is num_draft_tokens=.*; got 7"),
    (lambda on: on.library(assistant_confidence_threshold=0.2),
     r"assistant_confidence_threshold: .*here it is draft_model=ModelDrafter\(draft, stop=\)"),
    (lambda on: on.library(assistant_early_exit=2),
     r"assistant_early_exit: must be .*here it is draft_model=EarlyExit\(layers\)"),
]
# fmt: on


def bloom():
    return build(*families()["BloomForCausalLM"])


CASES = [(*own, TypeError) for own in TYPES] + [(*own, ValueError) for own in VALUES]


@pytest.mark.parametrize(("call", "said", "kind"), CASES, ids=[own[1] for own in CASES])
def test_what_is_wrong_is_refused_by_name(pair, call, said, kind):
    with pytest.raises(kind, match=said):
        call(pair)


def test_a_draft_may_have_no_position_beyond_the_text(tiny, make_model):
    short = make_model(positions=16)
    whole = generate(tiny[0], short, PROMPT, policy="speculative", max_new_tokens=13)
    assert whole.num_tokens == 13


@pytest.fixture
def folders(tmp_path):
    return [shutil.copytree(PAIR / name, tmp_path / name) for name in ("target", "draft")]


def test_loads_a_pair_quietly(folders, capfd):
    pair = load_pair(*folders, dtype=torch.float64)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert pair.target.dtype == torch.float64
    assert not pair.target.training
    result = generate(pair.target, pair.draft, PROMPT, eos_token_ids=(), max_new_tokens=5)
    assert result.num_tokens == 5


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model.layers.0.self_attn.q_proj.bias"], "q_proj.bias' in .* is none"),
        (["lm_head.bias", "model.layers.0.attn.bias"], "'lm_head.bias' in .* is none"),
        (["model.layers.0.attn.bias", "h.0.attn.masked_bias"], None),
        (["model.layers.0.self_attn.rotary_emb.inv_freq"], ""),  # which the library leaves out
        (["lm_head.weight"], ""),  # the tied one, as it is
    ],
)
def test_a_tensor_that_the_model_does_not_take_is_named(folders, capsys, names, said):
    """A bias in the file and none in the configuration are another model."""
    target, draft = folders
    weights = load_file(draft / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    added = {name: embedding.clone() if "head.w" in name else torch.ones(4) for name in names}
    save_file(weights | added, draft / "model.safetensors", metadata={"format": "pt"})
    if said:
        with pytest.raises(ValueError, match=f"draft: every tensor must be one of .*{said}"):
            load_pair(target, draft)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_pair(target, draft)
    wanted = (
        f"{min(names)!r} and all such tensors ({len(names)}) are not read, as the model computes"
    )
    assert [wanted in str(one.message) for one in told] == [True] * (said is None)


def test_says_which_folder_cannot_be_read(folders, tmp_path):
    target, draft = folders
    with pytest.raises(ValueError, match="draft: must be a folder with a config.json, or an id"):
        load_pair(target, tmp_path / "nowhere")
    edit(draft / "config.json", lambda config: config.update(num_hidden_layers=9))
    with pytest.raises(ValueError, match="draft: every weight must be present; 'model.lay"):
        load_pair(target, draft)
    (draft / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match="draft: files must be readable by transformers"):
        load_pair(target, draft)
    words = AutoTokenizer.from_pretrained(draft).get_vocab()
    first, second = (next(word for word in words if words[word] == own) for own in (500, 501))
    edit(
        draft / "tokenizer.json",
        lambda file: file["model"]["vocab"].update({first: 501, second: 500}),
    )
    with pytest.raises(ValueError, match="is id 500 in the target and id 501 in the draft"):
        load_pair(target, draft)
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="target: files must be readable by transformers"):
        load_pair(target, draft)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("acbd", "token 'b' is id 1 in the target and id 2 in the draft"),
        ("abc", "token 'd' is id 3 in the target and missing in the draft"),
        ("abcde", "token 'e' is missing in the target and id 4 in the draft"),
    ],
)
def test_refuses_other_words(words, said):
    target, draft = (
        SimpleNamespace(get_vocab=lambda own=own: {word: at for at, word in enumerate(own)})
        for own in ("abcd", words)
    )
    with pytest.raises(ValueError, match=said):
        check_same_vocabulary(target, draft)
