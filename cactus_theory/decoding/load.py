"""Load a target and a draft without log lines, from folders or by id from the Hugging Face Hub.

The network is used only for ids, through transformers: files in the Hugging Face cache are not
fetched again, downloads show their progress bar, and ``HF_HUB_OFFLINE`` is respected.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cactus_theory.base import arguments as check
from cactus_theory.base import tensors
from cactus_theory.base.files import first_line
from cactus_theory.base.names import AUTO, DRAFTERS, DTYPES, HUB_ID
from cactus_theory.decoding.drafters import (
    Drafter,
    Eagle3Drafter,
    ModelDrafter,
    named_drafter,
)
from cactus_theory.decoding.drafters.eagle3_head import CONFIG, WEIGHTS, Eagle3Head, holds_head
from cactus_theory.decoding.prepare import dtype_of_pair, has_instructions
from cactus_theory.decoding.text import check_same_vocabulary

# seconds to wait for the hub's answer whether it has a model
HUB_TIMEOUT_S = 10.0
# tensors in older checkpoints that need not be read: models compute rotary tables and causal masks
COMPUTED = re.compile(r"(.*\.)?(inv_freq|position_ids|(attn|attention)\.(masked_)?bias)")


@dataclass(frozen=True)
class Pair:
    """A target and a draft of one vocabulary, with the target's tokenizer.

    The draft is a model; a drafter if it was loaded by a name or from a head's folder; or None.
    """

    target: Any
    draft: Any
    tokenizer: Any

    @property
    def dtype(self) -> str:
        """Return the name of the models' dtype, or both names if the dtypes differ."""
        return dtype_of_pair(self.target, self.draft)


@dataclass(frozen=True)
class Source:
    """Source of a model's files: ``place``, a folder or an id of the Hugging Face Hub.

    ``name`` is the argument's name in errors; ``revision`` is a branch, tag or commit on the hub.
    Python files that come with a model (``auto_map``) run only with ``trust_code``. Without
    ``trust_code`` a model that needs such files raises an error; the user is not prompted.

    Raises
    ------
    ValueError
        A path that is no folder of a model and cannot be an id; a revision of a folder.
    """

    name: str
    place: str | Path
    revision: str | None = None
    trust_code: bool = False

    def __post_init__(self) -> None:
        if self.of_hub and (Path(self.place).exists() or not HUB_ID.fullmatch(str(self.place))):
            raise ValueError(
                f"{self.name}: must be a folder with a config.json, or an id of the Hugging Face "
                f"Hub{self._or_drafters}; got {str(self.place)!r}"
            )
        if self.revision is not None and not self.of_hub:
            raise ValueError(
                f"{self.name}: a revision is of an id of the Hugging Face Hub; got "
                f"{self.revision!r} of the folder {str(self.place)!r}"
            )

    @property
    def _or_drafters(self) -> str:
        return f"; or one of {DRAFTERS}" if self.name == "draft" else ""

    @property
    def of_hub(self) -> bool:
        """Return whether the source is an id of the hub, that is, no folder with a model."""
        return not (Path(self.place) / "config.json").is_file()

    @property
    def commit(self) -> str:
        """Return the commit of a hub id's files, after fetching the configuration to the cache."""
        return self.file(CONFIG).parent.name

    def file(self, name: str) -> Path:
        """Return a file's path, fetching an uncached hub file; ValueError if fetching fails."""
        if not self.of_hub:
            return Path(self.place) / name
        cached_file = check.optional_module("transformers.utils", "llm").cached_file
        revision = self.revision or "main"
        return Path(self._loaded(partial(cached_file, str(self.place), name, revision=revision)))

    def read(self, kind: str, **options: Any) -> Any:
        """Load an object with ``from_pretrained`` of the transformers class named ``kind``.

        Errors of transformers become ValueError.
        """
        library = check.optional_module("transformers", "llm")
        load = partial(
            getattr(library, kind).from_pretrained,
            str(self.place),
            revision=self.revision or "main",
            trust_remote_code=self.trust_code,
            **options,
        )
        return self._loaded(load)

    def _loaded(self, load: Any) -> Any:
        """Call ``load`` on the folder or the cache, else on the hub; return the result."""
        library = check.optional_module("transformers", "llm")
        with _quiet(library, self.of_hub):
            try:
                return load(local_files_only=True)
            except Exception as error:  # JSON, safetensors, OS and shape errors share no base
                if not (self.of_hub and isinstance(error, OSError)):
                    raise self._unreadable(error) from error
            try:  # ask the hub first: without a network a download would retry for a minute
                hub = check.optional_module("huggingface_hub", "llm").HfApi()
                hub.model_info(str(self.place), revision=self.revision, timeout=HUB_TIMEOUT_S)
            except Exception as error:  # errors of the network, the hub, or HF_HUB_OFFLINE
                raise ValueError(
                    f"{self.name}: {str(self.place)!r} is neither a folder here nor a model in the "
                    "cache of Hugging Face, and the hub did not give it "
                    f"({type(error).__name__}: {first_line(error)}); check the name and the "
                    f"network, or run `hf download {self.place}` where there is one and name its "
                    f"folder{self._or_drafters}"
                ) from error
            try:
                return load()
            except Exception as error:
                raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.name}: files must be readable by transformers; got {type(error).__name__}: "
            f"{first_line(error)} in {str(self.place)!r}"
        )


def load_pair(
    target: str | Path,
    draft: str | Path | None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = AUTO,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_code: bool = False,
) -> Pair:
    """Load a target and a draft in evaluation mode, from folders or by ids of the Hugging Face Hub.

    Parameters
    ----------
    target : a folder with a ``config.json``, or an id such as ``OWNER/NAME``. Files of an id are
        fetched if they are not in the Hugging Face cache.
    draft : as ``target``; or any other name for :func:`read_drafter`, which gives a pair with a
        drafter in place of a model; or None.
    device : device of the weights.
    dtype : dtype of the weights, as in :func:`load_model`.
    revision : branch, tag or commit of the target's id (``main``).
    draft_revision : branch, tag or commit of the draft's id (``main``).
    trust_code : whether to run Python files that come with a model (``auto_map``). If not, a model
        that needs such files raises an error; the user is not prompted.

    Raises
    ------
    ValueError
        A folder that is missing or has files that transformers cannot read, an id that cannot be
        fetched, missing or unknown weights, tokenizers that differ, a device that does not exist.
    ModuleNotFoundError
        transformers is not installed.

    Examples
    --------
    >>> pair = load_pair("simulations/pair/target", "simulations/pair/draft")
    >>> pair.target.training, pair.target.dtype
    (False, torch.float32)
    """
    sources = [Source("target", target, revision, trust_code)]
    drafter = None if draft is None else named_drafter(draft)
    # a name that makes no drafter, other than ``none``, is the folder or the id of a model or head
    if drafter is None and draft and str(draft) != "none":
        draft_source = Source("draft", str(draft), draft_revision, trust_code)
        drafter = _eagle3(draft_source, device, dtype)
        if drafter is None:  # not a head but a model, which has a tokenizer
            sources.append(draft_source)
    elif draft_revision is not None:
        raise ValueError(f"draft: a revision is of an id of the Hugging Face Hub; got {draft!s}")
    tensors.working_device("device", device)
    tokenizers = [source.read("AutoTokenizer") for source in sources]
    check_same_vocabulary(tokenizers[0], tokenizers[-1])
    target_model, *draft_models = [load_model(source, device, dtype) for source in sources]
    if drafter is not None:
        drafter.check(target_model)
    return Pair(target_model, draft_models[0] if draft_models else drafter, tokenizers[0])


def read_drafter(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = AUTO,
    *,
    revision: str | None = None,
    trust_code: bool = False,
) -> Drafter | None:
    """Return the drafter that ``name`` describes, in the form of the commands' option ``--draft``.

    Names are ``ngram`` and ``ngram:longest=4,shortest=2``; ``exit:20``, the target's first 20
    layers; ``skip:3``, the target without three layers; ``4bit``, the target with 4-bit weights;
    and ``none``, which gives None (plain decoding). ``skip`` and ``4bit`` are slow drafts, made to
    measure emitted laws. A name may also be the folder of a model or of an EAGLE-3 head in the
    format of speculators, or the id of such a folder on the Hugging Face Hub; these load as in
    :func:`load_model`.

    Raises
    ------
    ValueError
        Any other name, and as :func:`load_pair`.

    Examples
    --------
    >>> read_drafter("ngram:longest=4")
    NGram(longest=4, shortest=1)
    """
    if str(name) == "none":
        return None
    if (drafter := named_drafter(name)) is not None:
        return drafter
    source = Source("draft", name, revision, trust_code)
    drafter = _eagle3(source, device, dtype)
    return drafter or ModelDrafter(load_model(source, device, dtype))


def _eagle3(
    source: Source, device: str | torch.device, dtype: str | torch.dtype
) -> Eagle3Drafter | None:
    """Return the drafter for the files of an EAGLE-3 head; None if the source is no head."""
    folder = source.file(CONFIG).parent
    if not holds_head(folder):
        return None
    if source.of_hub:
        source.file(WEIGHTS)
    kind, on_cpu = _dtype_to_load(dtype, device)
    head = Eagle3Head.load(folder, kind)
    # as in :func:`load_model`: on a CPU float32, unless the weights are stored in bfloat16
    if kind is None and on_cpu and head.fc.weight.dtype != torch.bfloat16:
        head = Eagle3Head.load(folder)
    return Eagle3Drafter(head.to(device))


def load_model(
    source: Source | str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = AUTO,
) -> Any:
    """Load one causal LM in evaluation mode.

    ``dtype`` is the dtype of the weights: a dtype of torch, a name of a dtype, or ``auto``. On a
    GPU ``auto`` keeps the checkpoint's dtype. On a CPU ``auto`` is bfloat16 if the checkpoint is
    bfloat16 and the CPU has instructions for bfloat16, else float32. The dtype is
    not chosen by timing, so that the same machine always gives the same emitted laws.

    Raises
    ------
    ValueError
        As :func:`load_pair`.
    """
    source = source if isinstance(source, Source) else Source("model", source)
    kind, on_cpu = _dtype_to_load(dtype, device)
    options = {"dtype": kind or AUTO, "output_loading_info": True}
    model, report = source.read("AutoModelForCausalLM", **options)
    # transformers would fill missing weights with random numbers
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{source.name}: every weight must be present; {missing[0]!r} is not in {source.place}"
        )
    unexpected = sorted(report["unexpected_keys"])
    for name in unexpected:
        if not COMPUTED.fullmatch(name):
            raise ValueError(
                f"{source.name}: every tensor must be one of the {type(model).__name__} that its "
                f"{CONFIG} describes; {name!r} in {source.place} is none"
            )
    if unexpected:
        warnings.warn(
            f"{source.name}: of {source.place} {unexpected[0]!r} and all such tensors "
            f"({len(unexpected)}) are not read, as the model computes them",
            stacklevel=2,
        )
    if kind is None and on_cpu and model.dtype != torch.bfloat16:
        model = model.float()
    return model.to(device).eval()


def _dtype_to_load(
    dtype: str | torch.dtype, device: str | torch.device
) -> tuple[torch.dtype | None, bool]:
    """Return the dtype to load (None: as stored), and whether the device is a CPU."""
    on_cpu = tensors.working_device("device", device).type == "cpu"
    if not isinstance(dtype, str):
        return dtype, on_cpu
    if check.one_of("dtype", dtype, (*DTYPES, "float64")) != AUTO:
        return getattr(torch, dtype), on_cpu
    as_stored = not on_cpu or has_instructions(torch.bfloat16)
    return None if as_stored else torch.float32, on_cpu


def dtype_rule(dtype: str, device: str | torch.device) -> str:
    """Return a short text that says which dtype weights get on a device, to print with a run."""
    if dtype != AUTO:
        return dtype
    if torch.device(device).type != "cpu":
        return "as stored"
    return "bfloat16 where stored, else float32" if has_instructions(torch.bfloat16) else "float32"


@contextmanager
def _quiet(library: Any, downloads: bool) -> Iterator[None]:
    """Silence bars, logs and warnings in a block; with ``downloads`` keep the bars of downloads."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    logging, bars_allowed = library.utils.logging, not are_progress_bars_disabled()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    if downloads and bars_allowed:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
