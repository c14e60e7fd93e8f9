"""How cvxpy writes divergences: a table for each way, with a form for each generator class."""

from collections.abc import Callable
from typing import Any, TypeVar

from cactus_theory.divergences import FDivergence

Form = TypeVar("Form", bound=Callable[..., Any])


class Forms(dict[type[FDivergence], Callable[..., Any]]):
    """Functions of (variables, divergence) by generator class.

    Attributes
    ----------
    decorator, file : how a form is entered, and where, for those who miss one.
    """

    def __init__(self, decorator: str, file: str) -> None:
        super().__init__()
        self.decorator, self.file = decorator, file

    def enter(self, kind: type[FDivergence]) -> Callable[[Form], Form]:
        """Register a function as the form of a generator class."""

        def entered(form: Form) -> Form:
            self[kind] = form
            return form

        return entered

    def form(self, kind: FDivergence) -> Callable[..., Any]:
        """Return the form of a divergence.

        Raises
        ------
        ValueError
            There is none.
        """
        if type(kind) not in self:
            raise ValueError(
                f"divergence: must have a form for cvxpy, entered with "
                f"@{self.decorator}({type(kind).__name__}) as in {self.file}; got {kind.spec!r}"
            )
        return self[type(kind)]
