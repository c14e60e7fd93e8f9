"""Mistakes in verification and decoding: file → (function, edit, unseen)."""

from tests.mutation.edits import (
    Argument,
    DropStatement,
    Operator,
    RenameCall,
    Replace,
    Value,
)

IN_VERIFY = {
    "verify/chain.py": (
        ("ChainOnHost._kept_at_once", Operator("<", "<=", nth=0)),
        (
            "ChainOnHost._may_be_kept",
            Replace("number not in self.ceilings", "number in self.ceilings"),
        ),
        ("ChainOnHost.run", Replace("places.of(self.q_n)", "places.of(self.p_n)")),
        ("ChainOnHost._decide", Value("range(len(undecided))", into="going_on")),
        ("ChainOnHost._decide_chunk", DropStatement("self.accepted[row]")),
        ("ChainOnHost._keeps", DropStatement("self.accepted[place[0]]")),
        (
            "ChainOnHost._keeps",
            Replace("self._replace_row(scale, place)", "self._replace_row(1.0, place)"),
        ),
        ("ChainOnHost._keeps", Replace("math.inf", "0.0")),
        ("ChainOnHost._replace", Replace("None if self.p is None else places.of(self.p)", "None")),
        ("ChainOnHost._replace_row", Operator("<=", "<")),
        ("chain_on_device", Replace("accepted < lengths", "accepted <= lengths")),
        ("chain_on_device", Operator("&", "|")),
        ("chain_on_device", RenameCall("cumprod", "cumsum")),
        ("_kept", Operator("<", "<=")),
        ("_recovered", Replace("q[at]", "q[:, 0]")),
    ),
    "verify/draft.py": (
        ("rows_by_choice", Operator("==", "!=")),
        ("Verdict.output_token_ids", Replace("torch.where(place < accepted, ids, -1)", "ids")),
        ("Verdict.rows", Replace("accepted[:count]", "accepted")),
        ("Verdict.accepted_token_ids", Value("self.draft_token_ids")),
        ("Verdict.charged_rows", Replace("slice(0, tokens)", "slice(0, 1)")),
    ),
    "verify/draw.py": (
        ("_first_beyond", Argument("searchsorted", "right", None)),
        ("_beyond", Replace("'right'", "'left'")),
        ("_beyond", Operator("<", "<=")),
        ("_at_share", Replace("NO_TOKEN", "0")),
        ("pick_one", Operator("-", "+", nth=0)),
        ("_first_beyond", RenameCall("minimum", "maximum")),
        ("_pick_blocked", Operator("-", "+", nth=0)),
        ("toss", Replace("length + 1", "length + 2")),
    ),
}

IN_DECODING = {
    "decoding/host.py": (
        ("Decode._settle", Replace("length - 1", "length")),
        ("Decode._score", Replace("count + 1", "max(count, 1)")),
    ),
    "decoding/_meter.py": (
        ("Meter._measure", Replace("emitted is q", "True")),
        ("Meter._measure", Replace("torch.minimum(offered, emitted)", "p")),
        ("Meter._by_policy", Operator("==", "!=")),
        ("_groups", DropStatement("(group, rows)")),
    ),
    "decoding/_verification.py": (
        (
            "RowPolicies._chosen",
            Value("self._scheduled(row, q, draft, slice(0, len(drafted)))", nth=1),
        ),
        ("RowPolicies.keep", Replace("values[row]", "values[0]")),
        ("RowPolicies.observe", DropStatement("self.states[row]")),
        ("verified_rows", Operator("<", "<=")),
        ("rows_of", Replace("q[row, nodes]", "q[row, 1:][nodes]")),
    ),
    "decoding/models/cache.py": (
        ("slots_of", Replace("torch.where(real, slots, cache.capacity)", "chain")),
        ("slots_of", Operator(">", ">=")),
        ("Sight.within", Operator(">=", ">")),
        ("_ancestors", Replace("range((new - chain - 1).bit_length())", "range(1)")),
        ("RaggedCache.select", Replace("length + kept", "length")),
        ("RaggedCache._kept", Replace("place != row", "False")),
    ),
    "decoding/models/fast.py": (("_quick_norm", Value("lambda x: x / length(x)")),),
    "decoding/models/linear.py": (("exact_in_half", RenameCall("all", "any")),),
}
