"""Data files and model folders name no code and no file elsewhere, and are not misread."""

import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import cactus_theory as ct
from cactus_theory.base import rows as row_files
from cactus_theory.base.files import beside
from cactus_theory.base.prompts import prompts_of
from cactus_theory.base.rows import load_rows
from cactus_theory.cli import main
from cactus_theory.policies.registry import policy_of_data
from cactus_theory.traces import Cycle, Trace, replay, save_trace
from simulations.__main__ import main as simulations
from solvers.__main__ import main as solvers

PAIR = Path(__file__).parents[1] / "simulations" / "pair"
MODELS = ("--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"))
# a rule in a file that leaves a trace of having been run
SPY = """
from pathlib import Path
import cactus_theory as ct
Path(__file__).with_name("ran").touch()
@ct.rule
def spy(q, p, n):
    return min(1, q[n] / p[n])
"""


@pytest.fixture
def spy(tmp_path: Path) -> str:
    """Return the spec of a policy in a file of a folder beside that of the data."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "spying.py").write_text(SPY)
    return f"{folder / 'spying.py'}:spy"


def ran(spec: str) -> bool:
    return Path(spec.partition(".py")[0]).with_name("ran").exists()


def tuned(folder: Path, policy: str = "band:price=1", **more) -> Path:
    """Write what ``tune`` writes; ``more`` is of the recommended setting."""
    best = {"policy": policy, "verifier": "block", "num_draft_tokens": 2} | more
    content = {"format": "cactus-theory tuned", "version": 2, "level": 0.1, "divergence": "kl",
               "source": {}, "recommended": best}  # fmt: skip
    path = folder / "tuned.json"
    path.write_text(json.dumps(content))
    return path


def one_line(capsys: pytest.CaptureFixture[str], *named: str) -> None:
    """Assert that a command said one line on stderr that names ``named``, and nothing else."""
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "Traceback" not in err
    assert all(name in err for name in named), err


# code


def test_a_tuned_file_runs_no_code(tmp_path: Path, spy: str, capsys) -> None:
    path = tuned(tmp_path, spy, verifier="chain")
    with pytest.raises(ValueError, match="policy: must be a registered name in a data file"):
        ct.load_tuned(path)
    asked = ("generate", *MODELS, "--prompt", "x", "--tuned", str(path))
    assert main([*asked]) == 2
    one_line(capsys, str(path), "--trust-code")
    assert not ran(spy)
    assert ct.load_tuned(path, trust_code=True).verifier == "chain" and ran(spy)


@pytest.mark.parametrize("name", ["../rows.npy", "/etc/passwd", "sub/rows.npy", "..", "link"])
def test_a_data_file_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own"
    (own / "sub").mkdir(parents=True)
    for folder in (tmp_path, own, own / "sub"):
        (folder / "rows.npy").touch()
    os.symlink(tmp_path / "rows.npy", own / "link")
    with pytest.raises(ValueError, match="must name files of its own folder"):
        beside(own / "manifest.json", name)
    assert beside(own / "manifest.json", "rows.npy") == own / "rows.npy"


def test_a_folder_that_is_a_link_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "rows.npy").touch()
    os.symlink(tmp_path / "real", tmp_path / "link")
    assert beside(tmp_path / "link" / "tuned.json", "rows.npy").is_file()
    for name in ("a\0b", "a\nb", "a\\b", "", None, 3):
        with pytest.raises(ValueError, match="must name files of its own folder"):
            beside(tmp_path / "tuned.json", name)


def test_registered_rules_of_data_are_those_of_code() -> None:
    for spec in ("band:price=1", "band:price=2,per_row=true", "speculative"):
        assert policy_of_data(spec, "tuned.json") == ct.policy(spec)
    for wrong in (None, 3, ["band"], "band:price=x", "nix", "band:price=1,price=2"):
        with pytest.raises(ValueError, match=r"^\w+: "):
            policy_of_data(wrong, "tuned.json")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return the folder of a model whose classes are in a Python file of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / "target" / name, folder)
    names = {"AutoConfig": "spying.Config", "AutoModelForCausalLM": "spying.Model"}
    config = {"model_type": "spying", "auto_map": names, "vocab_size": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "spying.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    return folder


def test_a_model_folder_runs_no_code(tmp_path: Path, foreign: Path, capsys, monkeypatch) -> None:
    pytest.importorskip("transformers")
    from cactus_theory.decoding import load_pair
    from cactus_theory.decoding.load import load_model

    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what was piped to a question
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    asked = ("generate", "--policy", "speculative", "--prompt", "x")
    assert main([*asked, "--target", str(foreign), "--draft", str(PAIR / "draft")]) == 2
    one_line(capsys, "target: files must be readable", str(foreign))
    with pytest.raises(ValueError, match="draft: files"):
        load_pair(PAIR / "target", foreign)
    with pytest.raises(ValueError, match="contains custom code"):
        load_model(foreign)
    assert not (tmp_path / "ran").exists()


# claims


def npy(shape: str) -> bytes:
    """Return the start of a .npy file that claims this."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "shape", ["(268435456,)", "(1000000000000,)", f"({10**30}, 2)", "(-1, 2)", "(True, -7)"]
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_must_fit_its_file(tmp_path: Path, capsys, shape: str, suffix: str) -> None:
    content, path = npy(shape) + bytes(64), tmp_path / f"rows{suffix}"
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as held:
            held.writestr("rows.npy", content)
    else:
        path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"must be a {suffix} file of numbers"):
            load_rows(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**20  # no memory for what is claimed
    finally:
        tracemalloc.stop()
    assert main(["solve", str(path), str(path), "--delta", "1"]) == 2
    one_line(capsys, str(path))


def test_a_compressed_array_unpacks_to_a_bounded_size(tmp_path: Path, monkeypatch) -> None:
    rows, path = np.zeros(4000), tmp_path / "rows.npz"
    np.savez_compressed(path, rows=rows)
    assert load_rows(str(path)).shape == rows.shape
    monkeypatch.setattr(row_files, "UNPACKED", 30000)
    with pytest.raises(ValueError, match="must unpack to at most 30000 bytes; got 32128"):
        load_rows(str(path))
    np.savez(path, rows=rows)  # as large as it says: nothing is hidden
    assert load_rows(str(path)).shape == rows.shape


def test_numbers_that_do_not_fit_are_one_line(tmp_path: Path, capsys) -> None:
    long = tmp_path / "long.json"
    long.write_text(f"[{'9' * 5000}, 1]")
    for command, name in ((main, "solve"), (solvers, "optimal")):
        assert command([name, str(long), str(long), "--delta", "1"]) == 2
        one_line(capsys, str(long))
    with pytest.raises(ValueError, match="price: must be a number"):
        ct.policy("band", price=10**400)
    path = tuned(tmp_path, num_draft_tokens=10**4000)
    path.write_text(path.read_text().replace('"level": 0.1', f'"level": {10**4000}'))
    with pytest.raises(ValueError, match=r"tuned\.json: level: must be a number"):
        ct.load_tuned(path)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    rows = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    cycle = Cycle(0, 0, torch.tensor([1, 0]), rows, rows[:2])
    sizes = {"vocab_size": 2, "num_draft_tokens": 2}
    return save_trace(tmp_path / "trace", [[cycle] * 4, [cycle] * 4], **sizes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("texts", 3), ("texts", None), ("num_draft_tokens", 1), ("num_draft_tokens", 3),
     ("num_draft_tokens", 10**9), ("num_draft_tokens", 10**4000), ("vocab_size", 3),
     ("vocab_size", 10**12), ("cycles", 9), ("target_rows", 25), ("temperature", 10**4000),
     ("temperature", float("inf")), ("eos_token_ids", ["a"]), ("dtype", "float64"),
     ("vocab_size", "2"), ("vocab_size", 0), ("num_draft_tokens", True), ("shards", [])],
)  # fmt: skip
def test_a_manifest_says_what_its_shards_hold(trace: Trace, name: str, value) -> None:
    assert replay(trace, "speculative").num_draft_tokens == 2
    path = trace.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=str(trace.folder)):
        replay(trace.folder, "speculative")


# arguments


@pytest.mark.parametrize("flag", ["--out", "--csv"])
@pytest.mark.parametrize("joined", [True, False])
def test_no_flag_is_empty(tmp_path: Path, capsys, flag: str, joined: bool) -> None:
    rows = str(tmp_path / "q.npy")
    np.save(rows, np.array([0.5, 0.5]))
    given = [f"{flag}="] if joined else [flag, ""]
    assert main(["solve", rows, rows, "--delta", "1", *given]) == 2
    one_line(capsys, f"{flag}: must not be empty")
    given = ["--out="] if joined else ["--out", ""]
    assert simulations(["table", "overspend", *given]) == 2
    one_line(capsys, "--out: must not be empty")


# prompts


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_prompts_end_at_line_feeds_alone(tmp_path: Path, end: str, mark: bytes) -> None:
    odd = ["a\x0cb\x85c", "d\u2028e\u2029f", "g\x0bh\x1ci\rj"]
    path = tmp_path / "prompts"
    path.write_bytes(mark + end.join(odd).encode())
    assert [prompt.text for prompt in prompts_of(path)] == odd
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in odd]
    path.write_bytes(mark + end.join([*lines, ""]).encode())
    assert [prompt.text for prompt in prompts_of(path)] == odd


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfea\x00", b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 10**5, b"\x00" * 0,
     b'{"prompt": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_prompts_that_are_no_text_are_one_line(tmp_path: Path, capsys, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    flags = ("--prompts", str(path), "--nats", "1", "--work", str(tmp_path))
    assert main(["tune", *MODELS, *flags]) == 2
    one_line(capsys, "--prompts: ", "prompts.jsonl")


def test_a_prompt_is_text(capsys) -> None:
    asked = ("generate", *MODELS, "--policy", "speculative")
    assert main([*asked, "--prompt", "a\udcffb"]) == 2
    one_line(capsys, "--prompt: must be UTF-8 text")


def test_json_reads_every_unicode_encoding_right(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes("[0.25, 0.75]".encode(encoding))
        np.testing.assert_array_equal(load_rows(str(path)), [0.25, 0.75])
    content = io.BytesIO()
    np.save(content, np.array([0.25, 0.75]))
    (tmp_path / "more.npy").write_bytes(content.getvalue() + b"more")
    np.testing.assert_array_equal(load_rows(str(tmp_path / "more.npy")), [0.25, 0.75])
