"""EAGLE-3 heads as speculators writes them: logits, laws of fewer tokens, batches, files."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from cactus_theory.decoding import Eagle3Drafter, Siblings, generate, read_drafter
from cactus_theory.decoding.drafters.eagle3_head import Eagle3Head
from cactus_theory.decoding.options import Callbacks
from cactus_theory.traces import Trace, log_trace, replay
from cactus_theory.traces.log import identity
from tests.amounts import amount, some
from tests.decoding.test_ragged import compare, prompts
from tests.kits.drafters import assert_drafter_properties

HIDDEN, HEADS, SHARED, WIDTH, INNER = 32, 4, 2, 8, 40
EPSILON, THETA, LAYERS, READS = 1e-6, 5000.0, 4, (1, 2, 3)
# the library takes norms and rotary tables in float32
CLOSE = 1e-5


def write(folder, vocab, kept, seed=0, layer=None, **options):
    """Write a random head over the tokens ``kept`` of ``vocab``; return its tensors."""
    source = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "lm_head.weight": (len(kept), HIDDEN),
        "embed_tokens.weight": (vocab, HIDDEN),
        "layers.0.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (SHARED * WIDTH, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (SHARED * WIDTH, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    norms = ("norm", "layers.0.input_layernorm", "layers.0.hidden_norm")
    shapes |= {f"{name}.weight": (HIDDEN,)
               for name in (*norms, "layers.0.post_attention_layernorm")}  # fmt: skip
    weights = {name: torch.randn(shape, generator=source) / (2 if len(shape) > 1 else 4)
               + (len(shape) == 1) for name, shape in shapes.items()}  # fmt: skip
    weights["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
    weights["t2d"] = torch.isin(torch.arange(vocab), torch.tensor(kept))
    decoder = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "head_dim": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED, "rms_norm_eps": EPSILON, "rope_theta": THETA,
        "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"}
    described = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0", "draft_vocab_size": len(kept), "torch_dtype": "float32",
        "norm_before_residual": True, "norm_before_fc": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(READS),
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "transformer_layer_config": decoder | (layer or {}),
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described | options))
    return weights


def plain_logits(weights, embedding, states, ids, normed_stream, reads=READS):
    """Return logits (B, D) after ids (B, n + 1 + m), of which the target has read the first n.

    Written from the format: no cache, one token after the other.
    """
    weights = {name: weight.double() for name, weight in weights.items()}
    settled = states[reads[0]].shape[1]
    fused = torch.cat([states[layer] for layer in reads], -1) @ weights["fc.weight"].T
    stream = list(fused.unbind(1))
    output = None
    for last in range(settled, ids.shape[1]):
        if last > settled:
            stream.append(output[:, -1])
        output = plain_layer(weights, embedding[ids[:, 1 : last + 1]], torch.stack(stream, 1),
                             normed_stream)  # fmt: skip
    return norm(output[:, -1], weights["norm.weight"]) @ weights["lm_head.weight"].T


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def plain_layer(weights, embedded, stream, normed_stream):
    own = {name.removeprefix("layers.0.").removesuffix(".weight"): weight
           for name, weight in weights.items() if name.startswith("layers.0.")}  # fmt: skip
    after = norm(stream, own["hidden_norm"])
    pairs = torch.cat([norm(embedded, own["input_layernorm"]), after], -1)
    residual = after if normed_stream else stream
    batch, count, _ = pairs.shape
    q, k, v = (
        (pairs @ own[f"self_attn.{name}_proj"].T).view(batch, count, -1, WIDTH) for name in "qkv"
    )
    angles = torch.arange(count)[:, None] / THETA ** (torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    k, v = (x.repeat_interleave(HEADS // SHARED, 2) for x in (turned(k), v))
    scores = torch.einsum("bqhd,bkhd->bhqk", turned(q), k) / WIDTH**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
    x = residual + attended @ own["self_attn.o_proj"].T
    y = norm(x, own["post_attention_layernorm"])
    gated = F.silu(y @ own["mlp.gate_proj"].T) * (y @ own["mlp.up_proj"].T)
    return x + gated @ own["mlp.down_proj"].T


def states_of(target, ids):
    with torch.inference_mode():
        return target(ids, output_hidden_states=True, use_cache=False).hidden_states


@pytest.fixture(scope="module")
def targets(make_model):
    made = {vocab: make_model(vocab=vocab, layers=LAYERS, pad_token_id=None) for vocab in (5, 40)}
    with torch.no_grad():  # or nothing would be accepted of drafts that know nothing
        for target in made.values():
            target.lm_head.weight.mul_(0.2)
    return made


def drafter_in(folder, **options):
    return Eagle3Drafter(Eagle3Head.load(folder, torch.float64), **options)


KEPT = [0, 2, 3]
# tokens of the target, those of the head, whether its stream is normed, what it has of its own
FORMATS = [
    (5, KEPT, True, True),
    (40, range(1, 40, 2), False, True),
    (5, range(5), False, False),
    (5, [3, 0, 4, 1, 2], True, True),  # every token of the target, in another order
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("vocab", "kept", "normed", "own"), FORMATS)
def test_rows_of_every_round_are_those_of_the_format(
    targets, tmp_path, vocab, kept, normed, own, fast
):
    """Cut back, all is as if rejected tokens had never been."""
    target, kept, rows, new = targets[vocab], list(kept), [], 16
    weights = write(tmp_path, vocab, kept, 1, norm_before_residual=normed,
                    eagle_aux_hidden_state_layer_ids=list(READS) if own else None)  # fmt: skip
    embedding, reads = weights["embed_tokens.weight"].double(), READS
    if not own:  # the target's embedding, no map of tokens, and layers 2, n // 2 and n − 3
        for name in ("embed_tokens.weight", "d2t", "t2d"):
            del weights[name]
        save_file(weights, tmp_path / "model.safetensors")
        embedding, reads = target.get_input_embeddings().weight.detach(), (2, 2, 1)
    drafter = drafter_in(tmp_path)
    assert tuple(drafter.reads(target)) == reads
    told = Callbacks(on_rows=lambda q, draft, places, made: rows.append((made[0], draft)))
    result = generate(target, drafter, torch.tensor([[3, 1, 4, 0, 2]]), policy="band:price=2",
                      verifier="block", num_draft_tokens=3, max_new_tokens=new,
                      callbacks=told, fast_forward=fast, seed=2)  # fmt: skip
    assert result.num_accepted > 0 and len(rows) > 3
    text = [3, 1, 4, 0, 2, *result.output_token_ids[0].tolist()]
    for made, draft in rows[1:]:  # the first round has no states to read
        settled, length = text[: 5 + made], draft.lengths[0]
        assert length == min(3, new - made - 1)
        states = states_of(target, torch.tensor([settled[:-1]]))
        for place in range(length):
            ids = torch.tensor([settled + draft.token_ids[0, :place].tolist()])
            due = plain_logits(weights, embedding, states, ids, normed, reads)
            row = torch.zeros(vocab).double()
            row[kept] = due[0].softmax(-1)
            assert torch.allclose(draft.probs[0, place], row, rtol=0, atol=CLOSE)


NAMES = ("sampled", "greedy")


@pytest.fixture(scope="module")
def head(targets, tmp_path_factory):
    """Return the folder of a head over half of the tokens, of the target's own head."""
    folder, kept = tmp_path_factory.mktemp("half"), list(range(0, 40, 2))
    weights = write(folder, 40, kept, 1)
    weights["lm_head.weight"] = targets[40].lm_head.weight.detach().float()[kept]
    del weights["embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("name", "fast"), some([(a, b) for a in NAMES for b in (True, False)], 2))
def test_a_text_of_a_batch_is_the_one_it_is_alone(targets, head, name, fast):
    drafter = drafter_in(head, greedy=name == "greedy")
    options = {"max_new_tokens": 12, "eos_token_ids": [5, 20], "num_draft_tokens": 4}
    options["fast_forward"] = fast
    rows = prompts(40)
    both = compare(targets[40], drafter, rows, options, "band:price=2")
    assert both.num_accepted > 0 and len(set(both.row_lengths)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_drawn_from_the_rows_that_are_reported(targets, head, name):
    drafter, options = drafter_in(head, greedy=name == "greedy"), {"num_draft_tokens": 3}
    options["rounds"] = amount(2, 20)
    assert assert_drafter_properties(drafter, targets[40], **options) > 2
    tree = Siblings(drafter, 3)
    assert assert_drafter_properties(tree, targets[40], verifier="tree", **options) > 2


def test_greedy_texts_are_the_targets(targets, head):
    ids = torch.tensor([[1, 2], [0, 7]])
    options = {"max_new_tokens": 12, "temperature": 0, "eos_token_ids": ()}
    due = generate(targets[40], None, ids, **options).output_token_ids
    for drafter in (drafter_in(head), Siblings(drafter_in(head, greedy=True), 2)):
        more = {"verifier": "tree"} if isinstance(drafter, Siblings) else {}
        got = generate(targets[40], drafter, ids, num_draft_tokens=3, **options, **more)
        assert got.output_token_ids.equal(due) and got.draft_calls > 0
    single = replace(drafter_in(head), greedy=True)
    got = generate(targets[40], single, ids, policy="speculative", max_new_tokens=8, seed=1)
    assert got.num_tokens == 16


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({"norm_before_fc": True}, {}, "norm_before_fc: must be left out; got True"),
        ({"fc_norm": True}, {}, "fc_norm: must be left out; got True"),
        ({"norm_output": True}, {}, "norm_output: must be left out; got True"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size: must be 32; got 64"),
        ({"speculators_model_type": "dflash"}, {}, "model_type: must be eagle3; got 'dflash'"),
        ({"layer": {"model_type": "qwen3"}}, {}, "model_type: must be llama; got 'qwen3'"),
        ({"layer": {"num_hidden_layers": 2}}, {}, "num_hidden_layers: must be 1; got 2"),
        ({"layer": {"sliding_window": 8}}, {}, "sliding_window: must be left out; got 8"),
        ({"layer": {"rope_scaling": {"rope_type": "longrope"}}}, {}, "rope_type: must be one of"),
        ({"eagle_aux_hidden_state_layer_ids": []}, {}, "layer_ids: must be layers; got"),
        # what is not read
        ({"rope_theta": 0}, {}, "rope_theta: must be left out, or in transformer_layer_.*; got 0"),
        ({"is_encoder_decoder": True}, {}, "is_encoder_decoder: must be left out; got True"),
        ({"chunk_size_feed_forward": 3}, {}, "chunk_size_feed_forward: must be left out; got 3"),
        ({"layer": {"pretraining_tp": 4}}, {}, "pretraining_tp: must be left out; got 4"),
        ({"layer": {"attention_dropout": 0.5}}, {}, "attention_dropout: must be left out; got 0.5"),
        ({"layer": {"tie_word_embeddings": True}}, {}, "tie_word_embeddings: must be left out"),
        ({"layer": {"sliding_window": 0}}, {}, "sliding_window: must be left out; got 0"),
        ({"rope_theta": 9e5}, {}, "rope_theta: must be left out, or in transformer_layer_config; "),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, {}, "rope_scaling: .* left out"),
        ({"hidden_size": 32}, {}, "hidden_size: must be left out, or in transformer_layer_config"),
        ({"attention_bias": True}, {}, "attention_bias: must be left out, or in transformer_lay"),
        ({"layer": {"norm_before_residual": True}}, {}, "norm_before_residual: must be left out"),
        ({"layer": {"draft_vocab_size": 3}}, {}, "draft_vocab_size: must be left out; got 3"),
        ({"layer": {"rope_parameters": {"rope_theta": 7.0}}}, {},
         "rope_theta: must be that of rope_parameters, 7.0; got 5000.0"),
        ({"layer": {"rope_parameters": {"rope_theta": THETA}, "rope_scaling": {"type": "yarn"}}},
         {}, "rope_scaling: must be left out beside rope_parameters"),
        ({"layer": {"rope_scaling": {"type": "default", "factors": 2.0}}}, {}, "factors: must be"),
        ({"layer": {"rope_scaling": {"factor": 2.0}}}, {}, "factor: must be left out; got 2.0"),
        ({"layer": {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 9}}}, {},
         "beta_fast: must be left out; got 9"),
        # values
        ({"norm_before_residual": "no"}, {}, "norm_before_residual: must be true or false; got"),
        ({"norm_before_residual": 1}, {}, "norm_before_residual: must be true or false; got 1"),
        ({"layer": {"attention_bias": "no"}}, {}, "attention_bias: must be true or false"),
        ({"layer": {"rope_theta": 0}}, {}, "rope_theta: must be a positive number; got 0"),
        ({"layer": {"rope_theta": -1.0}}, {}, "rope_theta: must be a positive number; got -1.0"),
        ({"layer": {"rope_theta": float("nan")}}, {}, "rope_theta: must be .*; got nan"),
        ({"layer": {"rope_scaling": {"type": "linear", "factor": 0}}}, {}, "factor: .* got 0"),
        *(({"layer": {"rope_parameters": {"rope_theta": THETA, "rope_type": kind}}}, {},
           "factor: must be a positive number; got None") for kind in ("linear", "llama3", "yarn")),
        ({"layer": {"rope_parameters": [1]}}, {}, r"rope_parameters: must be a JSON .*\[1\]"),
        ({"layer": {"rms_norm_eps": None}}, {}, "rms_norm_eps: must be a .*; got None"),
        ({"layer": {"hidden_size": "x"}}, {}, "hidden_size: must be an integer of at least 1; got"),
        ({"layer": {"hidden_act": "swish!"}}, {}, "hidden_act: must be a name that"),
        ({"layer": {"num_attention_heads": 5}}, {}, "is not a multiple of the number of attention"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, {}, "layer_ids: must be layers; got 3"),
        ({"layer": {"rms_norm_eps": 0.0}}, {}, "rms_norm_eps: must be a positive number; got 0.0"),
        ({"layer": {"rms_norm_eps": "small"}}, {}, "rms_norm_eps: must be a .*; got 'small'"),
        ({"draft_vocab_size": 0}, {}, "draft_vocab_size: must be an integer of at least 1; got 0"),
        *(({}, {"norm.weight": torch.ones(32).to(kind)}, f"norm.weight: must be .*; got {kind}")
          for kind in (torch.complex64, torch.bool, torch.int8, torch.float8_e4m3fn)),
        ({}, {"d2t": torch.tensor([0.2, 1.4, 1.0])}, "d2t: must be int32 or int64; got"),
        ({"draft_vocab_size": 4},
         {"d2t": torch.tensor([0, 1, 1, 1]), "t2d": torch.tensor([1, 0, 1, 1, 1]).bool()},
         r"lm_head.weight: must have shape \(4, 32\); got \(3, 32\)"),
        # of what is only claimed no memory is taken
        ({"draft_vocab_size": 10**12}, {}, r"lm_head.weight: must have shape \(1000000000000, 32"),
        ({"layer": {"vocab_size": 10**12}}, {}, r"embed_tokens.weight: must have shape \(10000"),
        ({"layer": {"intermediate_size": 10**12}}, {}, r"gate_proj.weight: must have shape \(1000"),
        ({}, {"fc.weight": None}, "fc.weight is not there"),
        ({}, {"d2t": None}, "d2t is not there"),
        ({}, {"lm_head.weight": None}, "lm_head.weight is not there"),
        ({}, {"input_norm.weight": torch.ones(96)}, "input_norm.weight: is no tensor of such a h"),
        ({}, {"d2t": torch.tensor([0, 1, 3])}, "d2t: must give 3 ids below 5, each once"),
        ({}, {"d2t": torch.tensor([0, -1, 1])}, "d2t: must give 3 ids below 5, each once"),
        ({}, {"d2t": torch.tensor([0, 0, 1])}, "t2d: must mark the ids that d2t gives"),
        ({}, {"fc.weight": torch.ones(32, 64)}, r"fc.weight: must have shape \(32, 96\); got"),
    ],
)  # fmt: skip
def test_what_is_not_followed_or_damaged_is_refused_by_name(tmp_path, options, change, said):
    weights = write(tmp_path, 5, KEPT, **options) | change
    weights = {name: own for name, own in weights.items() if own is not None}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said) as refusal:
        read_drafter(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


OTHERS = {"architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(
    "written",
    [
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 3},  # by SafeAILab's EAGLE
        OTHERS | {"draft_vocab_size": 3},  # by SpecForge
        OTHERS | {"eagle_config": {"use_aux_hidden_state": True}},  # by Model-Optimizer
    ],
)
def test_heads_of_other_makers_are_called_that(targets, tmp_path, written):
    write(tmp_path, 5, KEPT)
    config = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | written))
    ids = torch.tensor([[1, 2]])
    for load in (read_drafter, lambda own: generate(targets[5], own, ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match="SpecForge and Model-Optimizer write them") as error:
            load(tmp_path)
        assert f"`speculators convert {tmp_path} --algorithm eagle3" in str(error.value)


@pytest.mark.parametrize("damaged", ["[1]", "{", '{"speculators_model_type": "eagle3"}'])
def test_a_damaged_configuration_is_one_error(tmp_path, damaged):
    write(tmp_path, 5, KEPT)
    (tmp_path / "config.json").write_text(damaged)
    with pytest.raises(ValueError, match="draft: must be a head that speculators wrote; "):
        Eagle3Drafter.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="draft: must be a head that speculators wrote; "):
        Eagle3Drafter.load(tmp_path)


def test_rows_of_fewer_tokens_are_logged_in_their_size_and_replay(targets, head, tmp_path):
    log_trace(targets[40], drafter_in(head), prompts(40)[:2], tmp_path, num_draft_tokens=2,
              max_new_tokens=12)  # fmt: skip
    trace = Trace.open(tmp_path)
    rows = [cycle.draft_probs for cycle in trace if cycle.draft_probs is not None]
    assert trace.header.vocab_size == 40 and not torch.cat(rows)[:, 1::2].any()
    assert load_file(tmp_path / "text-00000.safetensors")["draft_log_probs"].shape[1] == 20
    assert replay(trace, "speculative").divergence_per_token().value < 1e-6
    described = json.loads((head / "config.json").read_text())
    for option in (
        {"norm_before_residual": False},
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    ):
        other = tmp_path / next(iter(option))
        other.mkdir()
        (other / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
        (other / "config.json").write_text(json.dumps(described | option))
        assert identity(drafter_in(other)) != identity(drafter_in(head))


def test_an_id_is_taken_from_the_cache_in_the_dtype_asked_for(tmp_path, monkeypatch):
    commit, own = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--org--head"
    (own / "snapshots").mkdir(parents=True)
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text(commit)
    weights = write(own / "snapshots" / commit, 5, KEPT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for stored, dtype, has, due in (
        (torch.float16, "auto", {}, torch.float32),
        (torch.float16, "bfloat16", {}, torch.bfloat16),
        (torch.bfloat16, "auto", {}, torch.float32),
        (torch.bfloat16, "auto", {"amx_bf16": True}, torch.bfloat16),
    ):
        there = {name: one.to(stored) if one.is_floating_point() else one
                 for name, one in weights.items()}  # fmt: skip
        save_file(there, own / "snapshots" / commit / "model.safetensors")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has, raising=False)
        taken = read_drafter("org/head", dtype=dtype)
        assert isinstance(taken, Eagle3Drafter) and taken.head.fc.weight.dtype == due
        assert taken.head.core.model.rotary_emb.inv_freq.dtype == torch.float32


def test_half_precision_drafts_for_any_target(make_model, head):
    target = make_model(vocab=40, layers=LAYERS, pad_token_id=None, dtype=torch.float32)
    drafter = read_drafter(head, dtype="bfloat16")
    ids, options = torch.tensor([[1, 2]]), {"max_new_tokens": 12, "eos_token_ids": ()}
    got = generate(target, drafter, ids, temperature=0, **options)
    assert got.output_token_ids.equal(
        generate(target, str(head), ids, temperature=0, **options).output_token_ids
    )
    assert got.draft_calls > 0
