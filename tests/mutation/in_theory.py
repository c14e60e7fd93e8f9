"""Mistakes in divergences, the optimum and the emitted law: file → (function, edit, unseen)."""

from tests.mutation.edits import (
    Argument,
    DropCall,
    Operator,
    RenameCall,
    Replace,
    SwapNames,
    Value,
)

IN_DIVERGENCES = {
    "divergences/definition.py": (
        ("FDivergence.value", Value("0 * _", into="price")),
        ("FDivergence.two_points", Operator("+", "-", nth=0)),
        ("FDivergence.lower_edge", Operator("-", "+")),
        ("FDivergence.upper_edge", Operator("+", "-")),
    ),
    "divergences/classical.py": (
        ("KL.f", Value("-_")),
        ("KL.centred", DropCall("sub_")),
        ("KL.lower_edge", Replace("-step", "step")),
        ("TotalVariation.f", Value("2 * _")),
        ("NeymanChi2.slope", Replace("t ** -2", "t ** -1")),
        ("Renyi.to_generator", Replace("(self.a - 1) * delta", "self.a * delta")),
        ("Renyi.price_from_generator", Operator("/", "*")),
        ("MaxDivergence.value", RenameCall("amax", "amin")),
    ),
}

IN_OPTIMUM = {
    "optimum/path.py": (
        ("Path.__init__", Replace("q - p", "p - 2 * q")),
        ("Path.at", Value("rejection", into="capped")),
        ("Path._lower", Operator("+", "-", nth=0)),
        ("Path._lower", Argument("clamp", "max", "0.9")),
    ),
    "optimum/newton.py": (
        ("_for_price", Replace("1 / price", "price")),
        ("_for_budget", Replace("moved.sum(-1) - tables.leaked", "moved.sum(-1)")),
        ("_budget_step", SwapNames("down", "up", into="rejection")),
        ("_with_ends", Replace("tables.least", "tables.most")),
        ("_with_partner", Operator("-", "+")),
        ("Tables._set_zeros_apart", Value("0 * _", into="self.leaked")),
    ),
    "optimum/roots.py": (
        ("convex_root", Replace("there <= budget", "there > budget")),
        ("RisingRoot.tell", Replace("value > 0", "value < 0")),
        ("halved", Replace("torch.where(under, middle, low)", "low")),
    ),
    "optimum/geometry.py": (
        ("Geometry.price", Operator("/", "*")),
        ("Geometry.lossless_price", Value("2 * _", into="leak")),
        ("Geometry.bound", Value("0 * _", into="costs")),
        (
            "Geometry.bound",
            Value("-_", into="level"),
            "the multiplier of Σh = 1 enters as μ(1 − Σ q u), which is 0 on every band",
        ),
        ("Geometry.within", Value("delta", into="budget")),
        ("CeilingGeometry.rejection", DropCall("clamp")),
        ("CeilingGeometry.price", Operator("*", "+", nth=1)),
    ),
    "optimum/solve.py": (
        ("_sorted", Value("rejection > path.largest + 1", into="lossless")),
        ("solve_band", Replace("~done", "done")),
        ("Band._write_rows", RenameCall("maximum", "minimum")),
    ),
    "emitted.py": (
        ("_spent", RenameCall("amax", "amin")),
        ("audit", Value("p.sum(-1)", into="accepted")),
    ),
}
