"""Models by folder or by id of the hub, in the dtype that was asked for; nothing is downloaded."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from cactus_theory.cli import main
from cactus_theory.decoding import NGram, generate, load_pair
from cactus_theory.decoding.load import Source, dtype_rule, load_model
from cactus_theory.traces import Trace
from simulations.__main__ import main as simulations
from simulations.common.inputs import PAIR, PROMPTS

pytest.importorskip("transformers")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DRAFT = str(PAIR / "draft")
ASKED = ["generate", "--policy", "speculative", "--prompt", "import os", "--max-new-tokens", "4"]
PROCESSORS = {"no instructions": {}, "x86-64": {"amx_bf16": True}, "ARM": {"bf16": True}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lay ``org/cached`` into a cache of Hugging Face; return the ids that its hub is asked for."""
    asked: list[str] = []

    def model_info(_, name: str, **options) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    own = tmp_path / "models--org--cached"
    (own / "refs").mkdir(parents=True)
    (own / "refs" / "main").write_text(COMMIT)
    shutil.copytree(DRAFT, own / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    return asked


def test_an_id_is_taken_from_the_cache(hub: list[str], capsys) -> None:
    assert main([*ASKED, "--target", "org/cached", "--draft", DRAFT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] is not None
    pair = load_pair("org/cached", "org/cached", revision=COMMIT)
    assert pair.target.num_parameters() == pair.draft.num_parameters()
    assert Source("target", "org/cached").commit == COMMIT
    assert not hub  # a folder or a cached id asks nobody


def test_without_a_network_one_line_says_what_to_do(hub: list[str], capsys) -> None:
    assert main([*ASKED, "--target", "org/other", "--draft", DRAFT]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no network" in said and "hf download org/other" in said
    with pytest.raises(ValueError, match="draft: 'org/cached' is neither .* nor .* in the cache"):
        load_pair(DRAFT, "org/cached", draft_revision="other")
    assert hub == ["org/other", "org/cached"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([DRAFT, "--revision", "main"], "target: a revision is of an id of the Hugging Face Hub"),
        ([DRAFT, "--revision", "a", "b", "c"], "--revision: at most two may be given; got 3"),
        (["a/b/c"], "target: must be a folder with a config.json, or an id"),
        (["/nowhere"], "target: must be a folder with a config.json, or an id"),
    ],
)
def test_what_is_no_model_is_refused(words: list[str], said: str, hub: list[str], capsys) -> None:
    assert main([*ASKED, "--draft", DRAFT, "--target", *words]) == 2
    assert said in capsys.readouterr().err and not hub


def test_a_journal_keeps_the_commit(hub: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {}, raising=False)
    asked = "throughput --policy speculative --batch 1 --num-draft-tokens 2 --num-prompts 1"
    asked += f" --max-new-tokens 4 --repeats 0 --metered 1 --baselines --target {DRAFT}"
    asked += f" --draft org/cached --out {tmp_path / 'out'}"
    assert simulations(asked.split()) == 0
    settings = json.loads((tmp_path / "out" / "journal.jsonl").read_text().splitlines()[0])
    assert settings["draft"] == f"org/cached@{COMMIT}" and settings["dtype"] == "float32"
    assert simulations([*asked.split(), "--dtype", "bfloat16"]) == 2
    assert "another dtype ('float32', now 'bfloat16')" in capsys.readouterr().err


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of the shipped draft, stored in each dtype."""
    folders = {}
    for name in ("float32", "bfloat16", "float16"):
        folders[name] = tmp_path_factory.mktemp("stored") / name
        shutil.copytree(DRAFT, folders[name])
        load_model(DRAFT, dtype=name).save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("processor", PROCESSORS)
def test_auto_takes_bfloat16_where_it_is_stored_and_computed(processor, stored, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: PROCESSORS[processor], raising=False)
    taken = {name: load_model(folder).dtype for name, folder in stored.items()}
    best = torch.bfloat16 if PROCESSORS[processor] else torch.float32
    assert taken == {"float32": torch.float32, "bfloat16": best, "float16": torch.float32}
    assert dtype_rule("auto", "cuda") == "as stored"
    assert (dtype_rule("auto", "cpu") == "float32") == (processor == "no instructions")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_only_emulated_half_precision_is_warned_of(processor, stored, monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: PROCESSORS[processor], raising=False)
    model = load_model(stored["bfloat16"], dtype="bfloat16")
    for draft in (model, NGram()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generate(model, draft, torch.tensor([[1, 2]]), max_new_tokens=2)
        said = "target_model: Llama.* bfloat16 on a CPU without instr.* dtype=torch.float32"
        warned = [one for one in caught if re.search(said, str(one.message))]
        assert len(warned) == (processor == "no instructions")


def test_a_trace_keeps_its_dtype(stored, tmp_path: Path, capsys) -> None:
    asked = f"trace --target {DRAFT} --draft {stored['bfloat16']} --cycles 2 --max-new-tokens 4"
    asked += f" --num-draft-tokens 2 --out {tmp_path} --prompts {PROMPTS}"
    assert main([*asked.split(), "--dtype", "bfloat16"]) == 0
    assert "models run in bfloat16 on" in capsys.readouterr().err
    assert Trace.open(tmp_path).header.details["model_dtype"] == "bfloat16"
    assert main([*asked.split(), "--dtype", "float32"]) == 2
    assert "another model_dtype ('bfloat16', now 'float32')" in capsys.readouterr().err


def test_generate_says_its_dtype(stored, capsys) -> None:
    models = ["--target", str(stored["float16"]), "--draft", DRAFT, "--json"]
    for dtype in ("float32", "bfloat16", "float16"):
        assert main([*ASKED, *models, "--dtype", dtype]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == dtype
    assert main([*ASKED, *models[:-1]]) == 0
    assert "models run in float32 (--dtype auto: " in capsys.readouterr().err
