"""What a property of verifiers is: bounds on numbers of an enumeration, and who must keep them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cactus_theory.testing.laws._law import Bounds
from cactus_theory.testing.verifiers._enumeration import Enumeration
from cactus_theory.verify import Verifier

Measure = Callable[[Enumeration], Iterator[Bounds]]


@dataclass(frozen=True)
class VerifierProperty:
    """One property of verifiers.

    Attributes
    ----------
    name : its name in messages and in ``properties=``.
    statement : the first paragraph of its docstring.
    measure : an enumeration → bounds, the first axis of which counts its trees.
    applies : which verifiers must have it.
    hint : the likeliest cause of a failure, in words.

    Examples
    --------
    >>> VERIFIER_PROPERTIES["counts_have_a_law"].hint
    'a sum over accepted counts that misses one, or a division of 0 by 0'
    """

    name: str
    statement: str
    measure: Measure
    applies: Callable[[Verifier], bool]
    hint: str


VERIFIER_PROPERTIES: dict[str, VerifierProperty] = {}


def every_verifier(verifier: Verifier) -> bool:
    """Return True: every verifier must have the property."""
    return True


def verifier_property(
    applies: Callable[[Verifier], bool] = every_verifier, *, hint: str = ""
) -> Callable[[Measure], Measure]:
    """Register a function as a property of verifiers; its docstring is the statement.

    The function takes an ``Enumeration`` and yields :class:`Bounds`, the first axis of which
    counts the trees. ``assert_verifier_properties`` picks it up.

    Raises
    ------
    ValueError
        A function without a docstring, or a name that is taken.

    Examples
    --------
    >>> @verifier_property(hint="a chance is left out")
    ... def chances_sum_to_one(seen):
    ...     "The chances of every number of accepted tokens sum to 1."
    ...     yield Bounds(seen.law.stop.sum(-1), 1, 1, "sum of the chances")
    >>> assert_verifier_properties("block", properties=["chances_sum_to_one"], examples=2)
    10
    """

    def enter(function: Measure) -> Measure:
        name = function.__name__
        statement = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
        if not statement:
            raise ValueError(
                f"verifier_property: {name} needs a docstring that says what must hold"
            )
        known = VERIFIER_PROPERTIES.get(name)
        if known is not None and known.measure.__module__ != function.__module__:
            raise ValueError(f"verifier_property: must not be registered already; got {name!r}")
        VERIFIER_PROPERTIES[name] = VerifierProperty(name, statement, function, applies, hint)
        return function

    return enter
