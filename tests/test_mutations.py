"""Every mistake of ``make mutate`` can still be made in the package as it reads now."""

import ast

import pytest

from tests.amounts import some
from tests.mutation import edits
from tests.mutation.mutations import MUTATIONS, ROOT, Mutation

FUNCTION = """
class Rule:
    def keep(self, q, p):
        '''Return it.'''
        total = (q * 2).clamp(min=0.0, max=1.0)
        total += p
        if q < p and p < 1:
            return torch.minimum(q, p).sum(-1)
        return total
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_it_applies(mutation: Mutation):
    changed = mutation.tree()
    assert changed is not None, "the function is gone or no longer holds what the edit looks for"
    compile(changed, mutation.file, "exec")


def test_there_are_enough():
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS) >= 50


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edits.Operator("<", "<="), "if q <= p and p <= 1:"),
        (edits.Operator("<", ">", nth=1), "if q < p and p > 1:"),
        (edits.Operator("and", "or"), "if q < p or p < 1:"),
        (edits.Operator("+", "-"), "total -= p"),
        (edits.Replace("q*2", "q / 2"), "total = (q / 2).clamp(min=0.0, max=1.0)"),
        (edits.DropCall("clamp"), "total = q * 2"),
        (edits.DropCall("minimum"), "return q.sum(-1)"),
        (edits.RenameCall("minimum", "maximum"), "return torch.maximum(q, p).sum(-1)"),
        (edits.SwapArguments("minimum"), "return torch.minimum(p, q).sum(-1)"),
        (edits.Argument("clamp", "min", None), "total = (q * 2).clamp(max=1.0)"),
        (edits.Argument("clamp", "max", "2"), "total = (q * 2).clamp(min=0.0, max=2)"),
        (edits.SwapNames("q", "p"), "return torch.minimum(p, q).sum(-1)"),
        (edits.Value("-_", nth=1), "return -total"),
        (edits.Value("p", into="total", nth=0), "total = p"),
    ],
    ids=str,
)
def test_an_edit_changes_what_it_names(edit, expected):
    tree = ast.parse(FUNCTION)
    function = edits.find(tree, "Rule.keep")
    assert function is not None
    before = ast.unparse(tree).splitlines()
    assert edit.apply(function)
    after = [line.strip() for line in ast.unparse(tree).splitlines()]
    assert expected in after
    assert len(after) == len(before) and expected not in map(str.strip, before)


def test_a_statement_is_left_out():
    tree = ast.parse(FUNCTION)
    assert edits.DropStatement("total").apply(tree) == 2
    assert "total =" not in ast.unparse(tree) and "total +=" not in ast.unparse(tree)


def test_what_is_not_there_is_not_found():
    tree = ast.parse(FUNCTION)
    assert edits.find(tree, "Rule.other") is None
    for edit in (
        edits.Operator(">", "<"),
        edits.Operator("<", ">", nth=2),
        edits.Replace("q * 3", "q"),
        edits.DropCall("relu"),
        edits.RenameCall("relu", "clamp"),
        edits.SwapArguments("clamp"),
        edits.Argument("clamp", "out", None),
        edits.SwapNames("q", "p", into="nothing"),
        edits.Value("_", into="nothing"),
        edits.DropStatement("nothing"),
    ):
        assert edit.apply(tree) == 0, edit


def test_a_mistake_outlives_another_layout(tmp_path):
    """Other line breaks, comments and brackets leave every mistake where it was."""
    package = tmp_path / "cactus_theory"
    chosen = some(MUTATIONS, 20)
    for file in {mutation.file for mutation in chosen}:
        source = ast.parse((ROOT / "cactus_theory" / file).read_text(encoding="utf-8"))
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("# moved down\n\n\n" + ast.unparse(source), encoding="utf-8")
    assert all(mutation.mutated(tmp_path) == mutation.mutated() for mutation in chosen)
