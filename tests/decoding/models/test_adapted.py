"""Adapted, wrapped and hooked models: the library's texts, or a refusal by name, never others'."""

import copy
import functools

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import cactus_theory as ct
from cactus_theory.decoding import EarlyExit, speculative_generate
from cactus_theory.decoding.models import CachedModel
from cactus_theory.decoding.models.cache_check import runs_together
from cactus_theory.decoding.models.recognised import changed, obstacle

IDS = torch.tensor([[3, 5, 7, 2, 9], [4, 4, 1, 9, 6]])
# the library's own, of the way in which peft asks it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def texts(model, draft, ids=IDS, **given):
    """Return the new tokens: of the library, under the hook, and of this package's generate.

    The last has the model as its own draft, of which every token is accepted if both run alike.
    """
    new = ids.shape[1]
    plain = model.generate(ids, **GREEDY)[:, new:]
    hook = {"custom_generate": speculative_generate, "draft_model": draft}
    ours = model.generate(ids, **GREEDY, **hook, **given)[:, new:]
    alone = ct.generate(model, model, ids, max_new_tokens=7, temperature=0.0)
    assert alone.num_accepted == alone.reading.num_draft_tokens > 0
    return plain.tolist(), ours.tolist(), alone.output_token_ids.tolist()


def norm_twice(model):
    class Twice(type(model.model.norm)):
        def forward(self, states):
            return 2 * super().forward(states)

    model.model.layers[1].input_layernorm.__class__ = Twice


def embeddings(model):
    class Shifted(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids).roll(1, -1)

    model.model.embed_tokens.__class__ = Shifted


def renormed(model):
    model.model.embed_tokens.max_norm = 0.01


def final_norm(model):
    model.model.norm = nn.Identity()


def mlp(model):
    whole = model.model.layers[0].mlp
    model.model.layers[0].mlp = nn.Sequential(whole, nn.Softmax(-1))


def forward(model):
    layer = model.model.layers[1].self_attn.o_proj
    layer.forward = functools.partial(lambda before, x: before(x) * 3, layer.forward)


def steered(model):
    model.model.layers[0].register_forward_hook(lambda *given: given[-1] + 0.5)


def hook_of_all(model):
    """One that stands on no module; the test takes it off again."""
    norm = type(model.model.norm)

    def tripled(module, given, output):
        return output * 3 if type(module) is norm else None

    return nn.modules.module.register_module_forward_hook(tripled)


def parametrized(model):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(model.model.norm, "weight", Doubled())


def weights(model):
    class Negative(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            linear = function is nn.functional.linear
            return -result.as_subclass(torch.Tensor) if linear else result

    gate = model.model.layers[0].mlp.gate_proj
    gate.weight = nn.Parameter(gate.weight.data.as_subclass(Negative))


def attention(model):
    def sharp(module, query, *given, **options):
        return sdpa_attention_forward(module, query * 4, *given, **options)

    AttentionInterface.register("sharp", sharp)
    AttentionMaskInterface.register("sharp", sdpa_mask)
    model.config._attn_implementation = "sharp"


CHANGES = (norm_twice, embeddings, renormed, final_norm, mlp, forward, steered, hook_of_all)
CHANGES += (parametrized, weights, attention)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_below_the_top_is_seen(change, make_model):
    model = make_model()
    with torch.inference_mode():
        unchanged = model(IDS).logits
    undo = change(model)
    try:
        with torch.inference_mode():
            logits = CachedModel(model.eval(), 8, 2).feed(IDS, [5, 5], [5, 5])
            assert torch.allclose(logits, model(IDS).logits, atol=1e-5)
            assert not torch.allclose(logits, unchanged, atol=1e-3)
        assert obstacle(model, 64)
    finally:
        if undo is not None:
            undo.remove()


def test_a_forward_of_the_class_that_was_replaced_is_seen(make_model, monkeypatch):
    """As packages do that speed up training."""
    model = make_model()
    before = type(model.model.norm).forward
    monkeypatch.setattr(
        type(model.model.norm), "forward", functools.wraps(before)(lambda *x: 3 * before(*x))
    )
    plain, ours, alone = texts(model, make_model(seed=3))
    assert plain == ours == alone
    assert "the forward of LlamaRMSNorm was replaced" in obstacle(model, 64)


def test_a_model_asked_for_hidden_states_stays_fast(make_model):
    model = make_model()
    model(IDS, output_hidden_states=True)
    assert changed(model) is obstacle(model, 64) is None


def test_modules_in_training_are_refused(make_model, tiny):
    model = make_model()
    model.model.layers[1].mlp.train()
    match = r"target_model: must be in evaluation mode, .* got training in model\.layers\.1\.mlp"
    with pytest.raises(ValueError, match=match):
        model.generate(IDS, **GREEDY, custom_generate=speculative_generate, draft_model=tiny[1])


def test_what_was_learned_of_a_model_is_not_believed_of_a_changed_one(make_model):
    """A hook that reads other rows, on a model that ran without it."""
    model = make_model()
    assert runs_together(model)
    of_rows = model.model.layers[0].register_forward_hook(lambda *given: given[-1].roll(1, 0))
    refused = "a row's logits depend on its place in the batch: the model has hooks at model.layers"
    with pytest.raises(ValueError, match=refused):
        ct.generate(model, None, IDS, max_new_tokens=4)
    of_rows.remove()
    assert runs_together(model)


class Int8(nn.Linear):
    """Linear maps whose inputs are rounded to 127 steps of their largest, token by token."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", ["everywhere", "head"])
def test_targets_whose_activations_are_quantised_are_refused(make_model, dtype, where):
    """Their few tokens of the check come out the same, others by 1e-2; any law may draft."""
    model = make_model(dtype=dtype)
    parts = [model.lm_head] if where == "head" else model.modules()
    for module in parts:
        if isinstance(module, nn.Linear):
            module.__class__ = Int8
    refused = "whole ones; in LlamaForCausalLM activations are quantised"
    for draft in (None, make_model(seed=3, dtype=dtype)):
        with pytest.raises(ValueError, match=refused):
            ct.generate(model, draft, IDS[:1], max_new_tokens=4)
    target = make_model(seed=3, dtype=dtype)
    alone, drafted = (
        ct.generate(target, draft, IDS, max_new_tokens=9, temperature=0).output_token_ids
        for draft in (None, model)
    )
    assert alone.equal(drafted)


def test_weights_that_are_quantised_alone_are_not_refused(make_model):
    class Packed(nn.Linear):
        def forward(self, x):
            scale = self.weight.abs().amax() / 7
            return nn.functional.linear(x, (self.weight / scale).round() * scale, self.bias)

    model = make_model(dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Packed
    plain, ours, alone = texts(model, make_model(seed=3, dtype=torch.float32))
    assert plain == ours == alone


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate.hooks")


def adapted(model, kind="LoraConfig", seed=1, **options):
    """Return the model with an adapter whose weights are random."""
    peft = pytest.importorskip("peft")
    own = {id(weight) for weight in model.parameters()}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapter = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            for weight in adapter.parameters():
                if id(weight) not in own:
                    weight.add_(0.5 * torch.randn_like(weight))
    return adapter


LORAS = {
    "embeddings": {"target_modules": ["embed_tokens"]},
    "projections": {"target_modules": ["q_proj", "down_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "norms kept apart": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "DoRA": {"target_modules": ["v_proj"], "use_dora": True},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5]},
}


@pytest.mark.parametrize("options", LORAS.values(), ids=list(LORAS))
def test_adapters_count_in_target_and_draft(options, make_model, tiny):
    model = adapted(make_model(dtype=torch.float32), **options)
    plain, ours, alone = texts(model, make_model(seed=3, dtype=torch.float32))
    assert plain == ours == alone
    unadapted = make_model(dtype=torch.float32).generate(IDS, **GREEDY)[:, 5:].tolist()
    assert plain != unadapted


@pytest.mark.parametrize("merged", [False, True])
def test_an_adapter_may_be_switched_off_or_merged(merged, make_model, tiny):
    model = adapted(make_model(), target_modules=["q_proj", "embed_tokens"])
    if merged:
        model = model.merge_and_unload()
        assert obstacle(model, 64) is None
        plain, ours, alone = texts(model, tiny[1])
        assert plain == ours == alone
        return
    with model.disable_adapter():
        plain, ours, alone = texts(model, tiny[1])
    assert plain == ours == alone == tiny[0].generate(IDS, **GREEDY)[:, 5:].tolist()


@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_virtual_tokens_are_refused(kind, make_model, tiny):
    model = adapted(make_model(dtype=torch.float32), f"{kind}Config", num_virtual_tokens=3)
    draft = make_model(seed=3, dtype=torch.float32)
    for pair in ((model, draft), (draft, model)):
        for fast in (None, False):
            said = "model: .* prepare_inputs_for_generation adds .*Use the model"
            with pytest.raises(ValueError, match=said):
                ct.generate(*pair, IDS, max_new_tokens=4, fast_forward=fast)


def test_an_adapter_for_each_row_is_refused(make_model, tiny):
    model = adapted(make_model(dtype=torch.float32), target_modules=["q_proj"])
    hook = {"custom_generate": speculative_generate, "draft_model": tiny[1]}
    with pytest.raises(ValueError, match="depend on its place in the batch|whole pass .* fails"):
        model.generate(IDS, **GREEDY, **hook, adapter_names=["default", "__base__"])


def test_a_wrapped_target_does_not_draft_with_its_first_layers(hooks, make_model):
    """The view of the first layers would call the wrapper, and so all of them."""
    model = make_model()
    hooks.add_hook_to_module(model.model, hooks.ModelHook())
    with pytest.raises(ValueError, match="target_model: its forward must be that of its class"):
        ct.generate(model, EarlyExit(1), IDS, max_new_tokens=4)
    hooks.remove_hook_from_module(model.model)
    options = {"max_new_tokens": 7, "temperature": 0.0, "fast_forward": False}
    same = [ct.generate(one, EarlyExit(1), IDS, **options) for one in (model, make_model())]
    assert same[0].num_accepted == same[1].num_accepted


def test_offloaded_weights_are_refused_by_name(make_model, tiny):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(copy.deepcopy(tiny[0]), torch.device("cpu"))
    with pytest.raises(ValueError, match="target_model: weights must be on a device; .* offloaded"):
        ct.generate(model, None, IDS, max_new_tokens=4)
