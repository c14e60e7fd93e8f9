"""Read the file that ``cactus-theory tune`` writes, which holds the setting to decode with."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cactus_theory.base import arguments as check
from cactus_theory.base.files import read_marked
from cactus_theory.decoding.setting import Setting
from cactus_theory.decoding.truncation import WHOLE, Cuts
from cactus_theory.policies.registry import policy_of_data
from cactus_theory.traces.log import check_weights
from cactus_theory.verify.contract import find_verifier, registered_verifier

FORMAT = "cactus-theory tuned"
VERSION = 2
WEIGHTS = ("model_dtype", "target_weights", "draft_weights")


@dataclass(frozen=True)
class TunedSetting(Setting):
    """A tuned setting: ``generate(target, draft, ids, **tuned.options, max_new_tokens=64)``.

    Call ``check_pair(target, draft)`` first to check that the setting was tuned for these models.
    """

    level: float | None = None
    divergence: str | None = None
    weights: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    noise_floor: float | None = None

    @property
    def below_floor(self) -> str | None:
        """Return a warning if the level is below the nats that rounding costs, else None."""
        if self.level is None or self.noise_floor is None:
            return None
        return below_floor(self.level, self.noise_floor)

    @property
    def options(self) -> dict[str, Any]:
        """Return the setting as keyword arguments of :func:`cactus_theory.generate`.

        Raises
        ------
        ValueError
            Plain decoding was faster, so there is no policy.
        """
        if self.plain:
            raise ValueError(
                "tuned: must name a policy; plain decoding was faster, so decode without a draft"
            )
        return self.keywords

    def check_pair(self, target_model: Any, draft_model: Any) -> None:
        """Raise an error if the file shows that the setting was tuned for other models.

        Raises
        ------
        ValueError
            Another target or another draft.
        """
        check_weights("tuned", self.weights, target_model, draft_model)


def below_floor(level: float, floor: float) -> str | None:
    """Return a warning if a budget, in nats a token, is below the noise floor, else None."""
    if level >= floor:
        return None
    return (
        f"the budget of {level:.3g} nats a token is below the {floor:.3g} by which the target's "
        "passes over several tokens differ from passes over one: rounding alone spends more"
    )


def load_tuned(path: str | Path, *, trust_code: bool = False) -> TunedSetting:
    """Return the setting that ``cactus-theory tune --out`` recommends.

    The file runs no code. It may name a policy as ``FILE.py:NAME`` only with ``trust_code``, even
    if ``tune`` wrote the file.

    Returns
    -------
    policy, verifier, num_draft_tokens : None, None and 0 if plain decoding was faster.
    temperature : the temperature at which the setting was tuned; 1 if the file names none.
    level : the budget per emitted token that was tuned for, in the unit of ``divergence``.
    divergence : the divergence that the meter adds up.
    weights : strings that identify the weights of the two models, and their dtype, if known.
    dtype : dtype of the models that were timed, if known.
    noise_floor : what rounding alone costs per token: the KL (or regret) between the target's rows
        from passes over several tokens and from passes over one token. None if unknown.
    cuts : truncation of the rows that were tuned on. If the draft was truncated otherwise
        than the target, draft with ``setting.drafter(draft_model)`` of the returned setting.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read, has another content, or names code.

    Examples
    --------
    >>> from cactus_theory import traces, tuning
    >>> trace, costs = traces.Trace.open("simulations/data/trace"), tuning.Costs.ratios(0.1)
    >>> few = {"policies": ["mixture:alpha"], "widths": [1]}
    >>> tuning.save_tuned(tuning.tune(trace, costs, 0.05, **few), "tuned.json")
    >>> setting = ct.load_tuned("tuned.json")
    >>> setting.num_draft_tokens, setting.verifier
    (1, 'chain')
    """
    path = Path(path)
    content = read_marked(path, FORMAT, VERSION)
    try:
        best, about = content["recommended"], content["source"]
        temperature = _amount(path, "temperature", about.get("temperature", 1.0))
        if best is None:  # plain decoding was faster
            choice = {"policy": None, "num_draft_tokens": 0, "verifier": None}
        else:
            choice = _choice(path, best, trust_code)
        weights = {name: str(about[name]) for name in WEIGHTS if name in about}
        level, divergence = _amount(path, "level", content["level"]), str(content["divergence"])
        measured, floor = about.get("noise_floor"), None
        if measured and measured["divergence"] != divergence:
            measured = None  # in another unit than the level
        if measured is not None:
            floor = _amount(path, "noise_floor", measured["per_token"])
        cuts = Cuts.of(about) or WHOLE
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: must hold what was recommended; got {error!r:.200}") from None
    dtype = None if about.get("dtype") is None else str(about["dtype"])
    return TunedSetting(
        **choice, temperature=temperature, cuts=cuts, level=level, divergence=divergence,
        weights=weights, dtype=dtype, noise_floor=floor,
    )  # fmt: skip


def _amount(path: Path, name: str, value: Any) -> float:
    """Return ``value`` of the file as a float; ValueError unless it is finite and at least 0."""
    if isinstance(value, bool | str):
        raise ValueError(f"{path}: {name} must be a number; got {value!r:.60}")
    return check.number(f"{path}: {name}", value, 0, sys.float_info.max)


def _choice(path: Path, best: dict[str, Any], trust_code: bool) -> dict[str, Any]:
    """Return the checked policy, K and verifier of a recommended setting; ValueError if invalid."""
    policy = policy_of_data(best["policy"], path, trust_code=trust_code)
    try:
        verifier = (find_verifier if trust_code else registered_verifier)(best["verifier"])
        verifier.check(policy)
    except ValueError as error:
        raise ValueError(f"{error}; in {path}") from None
    width = best["num_draft_tokens"]
    if type(width) is not int or width < 1:
        raise ValueError(f"{path}: num_draft_tokens must be at least 1; got {width!r:.60}")
    return {"policy": policy, "num_draft_tokens": width, "verifier": verifier.spec}
