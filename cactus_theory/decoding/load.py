"""Load a target and its draft from local folders, quietly and without a network."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base.files import first_line
from cactus_theory.decoding._text import check_model_vocabularies, check_same_vocabulary
from cactus_theory.decoding.drafters import RecurrentDrafter, named_drafter
from cactus_theory.decoding.drafters.recurrent_head import is_head


@dataclass(frozen=True)
class Pair:
    """A target and a draft of one vocabulary, with the target's tokenizer.

    The draft is a model, or a drafter where a head's folder was asked for.
    """

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target_dir: str | Path,
    draft_dir: str | Path | None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    trust_code: bool = False,
    heads: bool = False,
) -> Pair:
    """Load two Hugging Face causal LMs in evaluation mode from local folders.

    Python files that a folder brings along (``auto_map``) run only with ``trust_code``; without
    it a model that needs them is refused, and nobody is asked. The draft may be a name
    (``ngram``, ``exit:20``), whose drafter is returned, or ``none``; with ``heads`` also a head's
    folder (``head.json``).

    Raises
    ------
    ValueError
        A folder that is missing or holds files transformers cannot read, weights that do not
        fill the model, vocabularies that differ, a device that there is not.
    ModuleNotFoundError
        transformers is not installed.

    Examples
    --------
    >>> pair = load_pair("simulations/pair/target", "simulations/pair/draft")
    >>> pair.target.training, pair.target.dtype
    (False, torch.float32)
    """
    library = check.optional_module("transformers", "llm")
    folders = {"target_dir": target_dir}
    draft: Any = None if draft_dir is None else named_drafter(draft_dir)
    if draft_dir is not None and str(draft_dir) != "none" and draft is None:
        if heads and is_head(draft_dir):
            draft = RecurrentDrafter.load(draft_dir)
            draft.head.to(device)
        else:
            folders["draft_dir"] = draft_dir
    for name, folder in folders.items():
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{name}: must be a folder with a config.json; got {str(folder)!r}")
    check.working_device("device", device)
    with _quiet(library):
        tokenizers = [
            _tokenizer(library, name, folder, trust_code) for name, folder in folders.items()
        ]
        check_same_vocabulary(tokenizers[0], tokenizers[-1])
        models = [
            _model(library, name, folder, device, dtype, trust_code)
            for name, folder in folders.items()
        ]
    if len(models) > 1:
        check_model_vocabularies(models[0], models[1])
        return Pair(models[0], models[1], tokenizers[0])
    if draft is not None:
        draft.check(models[0])
    return Pair(models[0], draft, tokenizers[0])


def _tokenizer(library: Any, name: str, folder: str | Path, trust_code: bool) -> Any:
    with _named(name, folder):
        return library.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_code
        )


def _model(
    library: Any,
    name: str,
    folder: str | Path,
    device: str | torch.device,
    dtype: torch.dtype,
    trust_code: bool,
) -> Any:
    with _named(name, folder):
        model, report = library.AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=trust_code,
            dtype=dtype,
            output_loading_info=True,
        )
    # transformers would fill what is missing with random numbers
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{name}: every weight must be present; {missing[0]!r} is not in {folder}")
    return model.to(device).eval()


@contextmanager
def _named(name: str, folder: str | Path) -> Iterator[None]:
    """Name the folder in whatever error the library raises."""
    try:
        yield
    except Exception as error:  # JSON, safetensors, OS and shape errors share no narrower base
        raise ValueError(
            f"{name}: files must be readable by transformers; "
            f"got {type(error).__name__}: {first_line(error)} in {str(folder)!r}"
        ) from error


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence progress bars, log lines and warnings, and restore them afterwards."""
    logging = library.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
