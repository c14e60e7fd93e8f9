"""Speculative decoding in the layout of the Hub: a folder to give as ``custom_generate=``.

``hub/`` is that folder, as it may be uploaded. A function in ``custom_generate=`` is not handed
``streamer`` and ``tokenizer``; the function in a folder gets every argument of ``generate``.
"""

from functools import partial
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.decoding.hugging_face import speculative_generate


def hub_path() -> Path:
    """Return the folder.

    ``model.generate(..., custom_generate=str(hub_path()), trust_remote_code=True)`` does what
    ``custom_generate=speculative_generate`` does.

    Examples
    --------
    >>> sorted(path.name for path in hub_path().glob("custom_generate/*.*"))
    ['generate.py', 'requirements.txt']
    """
    return Path(__file__).parent / "hub"


def generate_from_hub(
    model: Any,
    *inputs: Any,
    assistant_model: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    custom_generate: Any = None,
    **options: Any,
) -> Any:
    """Do what ``custom_generate/generate.py`` of the folder is called for.

    The library calls it with all arguments of ``model.generate``, among them those of
    :func:`speculative_generate`. It is the ``generate`` of a model loaded from a folder with
    such a file, and then obeys another ``custom_generate``. Folders that were uploaded import it
    by this name.
    """
    if assistant_model is not None:
        raise ValueError("assistant_model: must be given as draft_model instead; got a model")
    library = check.optional_module("transformers.generation.utils", "llm")
    speculative = partial(speculative_generate, streamer=streamer, tokenizer=tokenizer)
    keywords = {"streamer": streamer, "tokenizer": tokenizer} | options
    decode = speculative if custom_generate is None else custom_generate
    return library.GenerationMixin.generate(model, *inputs, custom_generate=decode, **keywords)
