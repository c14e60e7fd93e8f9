"""Small mistakes, one at a time: where each is made, how, and why, if no test can see it."""

import ast
from pathlib import Path
from typing import NamedTuple

from tests.mutation.edits import Edit, find
from tests.mutation.in_blocks import IN_BLOCKS, IN_TRACES
from tests.mutation.in_decoding import IN_DECODING, IN_VERIFY
from tests.mutation.in_policies import IN_POLICIES
from tests.mutation.in_theory import IN_DIVERGENCES, IN_OPTIMUM

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A mistake to make in a copy of the package.

    Attributes
    ----------
    file : under ``cactus_theory``.
    function : the qualified name of the function it is made in.
    edit : what happens to the function's syntax tree.
    unseen : why no test can notice it; empty where the tests must.
    """

    file: str
    function: str
    edit: Edit
    unseen: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.edit}"

    def tree(self, root: Path = ROOT) -> ast.Module | None:
        """Return the module with the mistake, None where it no longer applies."""
        tree = ast.parse((root / "cactus_theory" / self.file).read_text(encoding="utf-8"))
        function = find(tree, self.function)
        before = "" if function is None else ast.dump(function)
        if function is None or not self.edit.apply(function) or ast.dump(function) == before:
            return None
        return ast.fix_missing_locations(tree)

    def mutated(self, root: Path = ROOT) -> str | None:
        """Return the text of that module."""
        tree = self.tree(root)
        return None if tree is None else ast.unparse(tree)


LISTS = (IN_DIVERGENCES, IN_OPTIMUM, IN_POLICIES, IN_VERIFY, IN_DECODING, IN_BLOCKS, IN_TRACES)
MUTATIONS = tuple(
    Mutation(file, *parts) for where in LISTS for file, listed in where.items() for parts in listed
)
