"""What ``model.generate(..., custom_generate=THIS_REPOSITORY, trust_remote_code=True)`` runs."""

from typing import Any

try:
    from cactus_theory.decoding.from_hub import generate_from_hub
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] != "cactus_theory":
        raise
    raise ImportError(
        "custom_generate: needs the Python package cactus-theory; run `pip install cactus-theory`"
    ) from missing


def generate(model: Any, *inputs: Any, **options: Any) -> Any:
    """Decode speculatively with ``draft_model=`` under ``policy=``; the README tells more."""
    return generate_from_hub(model, *inputs, **options)
