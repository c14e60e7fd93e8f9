"""The Hub's layout: the folder works as ``custom_generate=`` in a process that knows nothing."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cactus_theory.decoding import hub_path, speculative_generate, speculative_stream
from cactus_theory.decoding.from_hub import generate_from_hub
from simulations.common.inputs import PAIR
from tests.amounts import THOROUGH
from tests.decoding.test_streaming import GREEDY, IDS, TOKENIZER, Heard

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch, transformers

target, draft, folder = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(target)
target, draft = (transformers.AutoModelForCausalLM.from_pretrained(own) for own in (target, draft))
given = tokenizer("def main(", return_tensors="pt", return_token_type_ids=False)
given |= {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
heard = []

class Heard(transformers.generation.BaseStreamer):
    def put(self, value):
        heard.append(value.flatten().tolist())

    def end(self):
        heard.append("end")

stops = {"stop_strings": ["):", "s", "\\n"], "tokenizer": tokenizer, "streamer": Heard()}
plain = target.generate(**given, **stops).tolist()
ours = {"custom_generate": folder, "trust_remote_code": True, "draft_model": draft}
own = target.generate(
    **given, **stops, **ours, policy="speculative", num_draft_tokens=3, log_probs=True,
    return_dict_in_generate=True,
)
assert own.sequences.tolist() == plain, (own.sequences.tolist(), plain)
half = len(heard) // 2
assert heard[:half] == heard[half:] and heard[-1] == "end", heard
assert "cactus_theory" in sys.modules
print("equal", len(plain[0]), own.result.log_probs.target.shape[1])
"""


@pytest.mark.skipif(not THOROUGH, reason="starts a process; run by make test-thorough")
def test_a_fresh_process_decodes_with_the_folder(tmp_path):
    folders = PAIR / "target", PAIR / "draft", hub_path()
    away = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, folders)],
        cwd=tmp_path,
        env=os.environ | away | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal ")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Keep what the library copies out of the user's cache."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_folder_is_remote_code_and_needs_trust(tiny, module):
    options = GREEDY | {"custom_generate": str(hub_path()), "draft_model": tiny[1]}
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny[0].generate(IDS, **options, trust_remote_code=False)
    found = tiny[0].generate(IDS, **options, trust_remote_code=True)
    assert found.tolist() == tiny[0].generate(IDS, **GREEDY).tolist()


def test_assistant_model_is_refused_in_words(tiny, module):
    options = GREEDY | {"custom_generate": str(hub_path()), "trust_remote_code": True}
    with pytest.raises(ValueError, match="assistant_model: must be given as draft_model instead"):
        tiny[0].generate(IDS, **options, assistant_model=tiny[1])
    with pytest.raises(ValueError, match="draft_model: must be a causal LM or a drafter; got None"):
        tiny[0].generate(IDS, **options)


def test_a_model_that_was_loaded_from_such_a_folder_streams_too(tiny, monkeypatch):
    """The library puts the folder's function in the place of such a model's ``generate``."""
    target, draft = tiny
    plain, heard = Heard(), Heard()
    expected = target.generate(IDS, **GREEDY, streamer=plain, tokenizer=TOKENIZER, stop_strings="a")
    monkeypatch.setattr(target, "generate", partial(generate_from_hub, model=target), raising=False)
    options = GREEDY | {"draft_model": draft, "stop_strings": "a"}
    found = target.generate(inputs=IDS, **options, tokenizer=TOKENIZER, streamer=heard)
    assert found.tolist() == expected.tolist() and heard.calls == plain.calls
    named = target.generate(
        inputs=IDS, **options, tokenizer=TOKENIZER, custom_generate=speculative_generate
    )
    assert named.tolist() == expected.tolist()
    pieces = speculative_stream(target, TOKENIZER, inputs=IDS, **options)
    assert "".join(pieces) == TOKENIZER.decode(expected[0, IDS.shape[1] :])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cactus_theory.decoding.from_hub", None)
    code = (hub_path() / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    with pytest.raises(
        ImportError, match="custom_generate: needs the Python package cactus-theory"
    ):
        exec(compile(code, "generate.py", "exec"), {})


def test_the_folder_has_what_the_hub_asks_for():
    folder = hub_path()
    head = (folder / "README.md").read_text(encoding="utf-8").split("---")[1]
    assert "tags:\n  - custom_generate\n" in head and "library_name: transformers" in head
    needs = (folder / "custom_generate" / "requirements.txt").read_text(encoding="utf-8").split()
    assert needs == ["cactus-theory"]
