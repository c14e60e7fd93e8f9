"""generate(custom_generate=…) gives what generate gives without the hook, faster."""

import pytest
import torch
import transformers

import cactus_theory as ct
from cactus_theory.decoding import speculative_generate
from cactus_theory.tuned import TunedSetting
from tests.decoding.test_ragged import padded, prompts

IDS, MASK = padded(prompts(seed=9), pad=6)
GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 6, "eos_token_id": 2}


def sampled(tiny, **options):
    target, draft = tiny
    given = {"input_ids": IDS, "attention_mask": MASK, "do_sample": True, "max_new_tokens": 9}
    return target.generate(
        **given | {"pad_token_id": 6} | options,
        custom_generate=speculative_generate,
        draft_model=draft,
    )


def test_sampling_follows_the_seed_or_the_global_one(tiny):
    first, again = (sampled(tiny, seed=3).tolist() for _ in range(2))
    assert first == again != sampled(tiny, seed=4).tolist()
    texts = []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(5)
            texts.append(sampled(tiny).tolist())
    assert texts[0] == texts[1]


def test_a_dictionary_holds_the_statistics(tiny):
    output = sampled(
        tiny, return_dict_in_generate=True, policy="cactus:delta=0.5", meter=True, seed=1
    )
    assert output.sequences.tolist() == output["sequences"].tolist()
    assert output.result.reading.emitted_divergence > 0
    assert 7 * 4 < output.result.num_tokens <= 7 * 9
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)


def test_a_tuned_setting_gives_its_options(tiny):
    setting = TunedSetting(ct.policy("band:price=1"), 2, "chain", 0.7)
    output = sampled(tiny, return_dict_in_generate=True, seed=1, **setting.options)
    same = sampled(tiny, policy="band:price=1", num_draft_tokens=2, temperature=0.7, seed=1)
    assert output.result.reading.rows > 0  # on without being asked for
    assert torch.equal(output.sequences, same)


def test_log_probs_switch_the_meter_on(tiny):
    asked = {"log_probs": True, "return_dict_in_generate": True, "policy": "cactus:delta=0.5"}
    result = sampled(tiny, **asked, seed=1, fast_forward=False).result
    assert result.reading.divergence == "kl"
    assert not torch.allclose(result.log_probs.target, result.log_probs.emitted, atol=1e-3)


def test_a_policy_that_relaxes_nothing_without_sampling_says_so(tiny, recwarn):
    given = GREEDY | {"input_ids": IDS[2:3], "custom_generate": speculative_generate}
    for policy in ("speculative", "mixture:alpha=0.5,support=free"):
        tiny[0].generate(**given, draft_model=tiny[1], policy=policy)
    assert not recwarn
    with pytest.warns(UserWarning, match="band:price=1.0 relaxes nothing at temperature 0"):
        tiny[0].generate(**given, draft_model=tiny[1], policy="band:price=1")


FULL = torch.tensor([[3, 5, 7, 2], [4, 4, 1, 9]])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 128}
IMAGE = 23  # the id that stands for a part of an image


def random(model_class, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
    model.generation_config.eos_token_id = None
    return model


def gemma():
    vision = transformers.SiglipVisionConfig(**SIZES, image_size=8, patch_size=4)
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=64)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=21, eoi_token_index=22,
    )  # fmt: skip
    return random(transformers.Gemma3ForConditionalGeneration, config)


def both(model, draft, ids=FULL, **given):
    """Return the new tokens of the library, and ours or what they were refused for."""
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | given
    plain = model.generate(ids, **options)
    try:
        hook = {"custom_generate": speculative_generate, "draft_model": draft}
        return plain.tolist(), model.generate(ids, **options, **hook).tolist()
    except ValueError as refusal:
        assert "\n" not in str(refusal)
        return plain.tolist(), str(refusal)


def test_an_image_is_refused_and_text_alone_is_not(tiny):
    model, draft = gemma(), tiny[1]
    plain, ours = both(model, draft)
    assert plain == ours
    ids = torch.cat([torch.full((1, 4), IMAGE), FULL[:1]], 1)
    pixels = torch.rand(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, refusal = both(model, draft, ids, pixel_values=pixels)
    with torch.inference_mode():  # it matters
        assert not torch.allclose(model(ids, pixel_values=pixels).logits, model(ids).logits)
    assert "must not be given, the loop feeds models token ids and nothing else" in refusal
    assert refusal.startswith(("pixel_values: ", "mm_encoder_outputs: "))
    types = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])  # it sees all of an image's tokens at once
    assert both(model, draft, token_type_ids=types)[1].startswith("token_type_ids: must not")


def test_positions_of_ones_own_are_refused_and_the_usual_ones_are_not(tiny):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    usual = mask.cumsum(1) - 1
    plain, ours = both(*tiny, attention_mask=mask, position_ids=usual.clamp(min=0))
    assert plain == ours == both(*tiny, attention_mask=mask)[0]
    for positions in (usual + 3, torch.tensor([[0, 2, 4, 6]] * 2)):
        plain, refusal = both(*tiny, attention_mask=mask, position_ids=positions)
        assert refusal.startswith("position_ids: must count the tokens of the attention mask")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"inputs_embeds": torch.rand(2, 4, 32, dtype=torch.float64)}, "inputs_embeds"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q"),
    ],
)
def test_no_other_input_is_ignored(tiny, given, name):
    assert both(*tiny, **given)[1].startswith(f"{name}: must not be given, the loop feeds")


def test_models_with_an_encoder_are_refused(tiny):
    config = transformers.T5Config(
        vocab_size=24, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    _, refusal = both(random(transformers.T5ForConditionalGeneration, config), tiny[1])
    assert refusal.startswith("model: must have no encoder for speculative decoding; got T5For")


def test_models_with_a_loop_of_their_own_are_refused(make_model, tiny):
    model = make_model()

    class Frames(type(model)):
        def _sample(self, *given, **options):
            return super()._sample(*given, **options) + 1

    model.__class__ = Frames
    plain, refusal = both(model, tiny[1])
    assert plain != both(*tiny)[0]
    assert refusal.startswith(
        "model: must be decoded by the library's own loop; Frames has a _samp"
    )
