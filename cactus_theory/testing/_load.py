"""Find the policy that ``file.py:name`` stands for."""

from cactus_theory._specs import BrokenRule, split
from cactus_theory.policies import Policy, policy

__all__ = ["BrokenRule", "load_rule", "split"]


def load_rule(source: str) -> Policy:
    """Return the policy called ``name`` in ``file.py:name``, or ``file.py:name:knob=value``.

    The same as ``ct.policy(source)``, for files only.

    Raises
    ------
    ValueError, OSError
        Not of that form, no such file, no such name in it; the file raised.
    TypeError
        The name does not stand for a policy.

    Examples
    --------
    >>> from pathlib import Path
    >>> text = "import cactus_theory as ct; mine = ct.rule(lambda q, p, n: 1.0)"
    >>> size = Path("mine.py").write_text(text)
    >>> load_rule("mine.py:mine").spec
    'mine.py:mine'
    """
    split(source)
    return policy(source)
