"""Mistakes in policies: file → (function, edit, unseen)."""

from tests.mutation.edits import (
    Argument,
    DropCall,
    Operator,
    RenameCall,
    Replace,
    SwapArguments,
    SwapNames,
    Value,
)

IN_POLICIES = {
    "policies/_base.py": (
        ("keep_probability", DropCall("clamp_")),
        ("normalised_or", Replace("residual / torch.where(empty, 1.0, total)", "residual")),
        ("Policy.decide", Operator("<", "<=")),
        ("Policy.keeps_at_once", Replace("coin * p_n < q_n", "coin * p_n < 2 * q_n")),
        ("Mathematics.emitted", Replace("1 - phi", "phi")),
        (
            "Mathematics.emitted",
            Replace(
                "lost * self.recovery(q, p, refused.argmax(-1))",
                "self.recovery(q, p, refused.argmax(-1))",
            ),
        ),
    ),
    "policies/_forms.py": (
        ("FixedTarget.acceptance", SwapArguments("keep_probability")),
        ("FixedTarget.recovery", Replace("self.target(q, p)", "q")),
        ("FixedTarget.decide", SwapNames("target", "p", into="left")),
        ("FixedTarget.decide", Operator("<", "<=")),
        ("Entrywise.acceptance", SwapArguments("keep_probability")),
        ("Entrywise.recovery", Replace("scale * q - p", "q - p")),
        ("Entrywise.decide", Operator("<", "<=")),
        ("Entrywise.residual_entries", SwapArguments("scale")),
        ("Raised.residual_entries", Replace("UNSCALED", "2 * UNSCALED")),
        ("Raised.target", Value("p", into="kept")),
        ("Raised.target", Replace("p - kept", "p")),
        ("Either.target", Replace("self.takes_draft(q, p)", "~self.takes_draft(q, p)")),
        ("Either.decide", Operator("|", "&")),
        ("Either.decide", Operator("<", "<=")),
        ("PerProposal.scale", Operator("-", "+", nth=0)),
        ("PerProposal.proposal", DropCall("scatter")),
        ("PerProposal.emitted", Replace("torch.minimum(p, gamma)", "torch.minimum(p, q)")),
        ("PerProposal._refill_singly", Value("lost", into="weight")),
        ("_shortfall.beyond", Replace("totals[:, 1:]", "totals[:, :-1]")),
    ),
    "policies/_records.py": (
        ("Residual.law", DropCall("scatter_")),
        ("Residual.law", Replace("difference.sub_(p)", "difference")),
        ("Residual.at", Replace("self.scale[index]", "self.scale.flip(0)[index]")),
        ("Residual.at", Replace("self.rows[index]", "self.rows[: len(index)]")),
        ("residual_or", DropCall("clamp_")),
        ("residual_or", Value("positive")),
    ),
    "policies/cactus.py": (
        ("Cactus.raised", Replace("2 * self.delta", "self.delta")),
        ("Cactus.raised", Operator("-", "+", nth=0)),
    ),
    "policies/band.py": (
        ("Band.target", RenameCall("maximum", "minimum")),
        (
            "Band.declares",
            Value('Budget(self.divergence, self.delta / 2, "emitted")', into="budget"),
        ),
        ("Band.decide", Replace("coin * p_n / q_n", "p_n / q_n")),
        ("Band.decide", Argument("Residual", "scale", "lower / 2")),
        ("Band._shared", RenameCall("to_generator", "from_generator")),
    ),
    "policies/typical.py": (
        ("Typical.chosen", Replace("1 + TIE", "1 - TIE")),
        ("Typical.threshold", Replace("-entropy", "entropy")),
        ("Typical.decide", Operator("|", "&")),
        ("_entropy", Value("-_")),
    ),
    "policies/speculative.py": (("Speculative.ceiling", Value("p_n")),),
}
