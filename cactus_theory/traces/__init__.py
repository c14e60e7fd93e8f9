"""Log the rows of a real pair along real texts, and replay any policy and verifier on them."""

from cactus_theory.traces._cycle import Cycle
from cactus_theory.traces._folder import save_trace
from cactus_theory.traces._result import Replay
from cactus_theory.traces.audits import PooledAudit, pooled_audit, row_pairs
from cactus_theory.traces.estimate import Estimate
from cactus_theory.traces.log import log_trace
from cactus_theory.traces.paired import Comparison, compare, divergence_at, tokens_at
from cactus_theory.traces.replays import replay
from cactus_theory.traces.rows import SavedRows
from cactus_theory.traces.trace import Batch, Trace
from cactus_theory.traces.values import learn_values

__all__ = [
    "Batch",
    "Comparison",
    "Cycle",
    "Estimate",
    "PooledAudit",
    "Replay",
    "SavedRows",
    "Trace",
    "compare",
    "divergence_at",
    "learn_values",
    "log_trace",
    "pooled_audit",
    "replay",
    "row_pairs",
    "save_trace",
    "tokens_at",
]
