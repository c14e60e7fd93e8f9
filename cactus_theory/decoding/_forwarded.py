"""Arguments of a running ``model.generate`` that it does not hand to ``custom_generate``."""

import inspect
from types import FrameType
from typing import Any

from cactus_theory import _arguments as check


def withheld(name: str) -> Any:
    """Return what ``name=`` was in the ``generate`` that is running, None if it was not given.

    The library (5.17 to 5.23 read) hands a function in ``custom_generate`` neither ``streamer``
    nor ``tokenizer``, whatever its signature asks for, and says nothing. Both stand in the
    frames of the call: ``streamer`` is an argument of ``generate``, and ``tokenizer`` is left in
    the keywords of the ``no_grad`` around it.
    """
    frame = _generate_frame()
    for own in (frame, frame and frame.f_back):
        if own is None:
            break
        keywords = own.f_locals.get("kwargs")
        known = keywords if isinstance(keywords, dict) else {}
        found = own.f_locals.get(name) if own is frame else None
        if found is None:
            found = known.get(name)
        if found is not None:
            return found
    return None


def _generate_frame() -> FrameType | None:
    """Return the frame of the innermost ``generate`` of the library, None outside of it."""
    library = check.optional_module("transformers.generation.utils", "llm")
    code = inspect.unwrap(library.GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
