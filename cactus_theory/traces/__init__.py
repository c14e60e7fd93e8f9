"""Log the rows of a real pair along real texts, and replay any policy and verifier on them."""

from cactus_theory.traces._shard import Cycle
from cactus_theory.traces.compared import Observation, compare_observed
from cactus_theory.traces.estimate import (
    Comparison,
    Estimate,
    Replay,
    compare,
    divergence_at,
    tokens_at,
)
from cactus_theory.traces.expect import Expectation, expect
from cactus_theory.traces.faults import row_signatures
from cactus_theory.traces.log import log_trace, save_trace
from cactus_theory.traces.replays import replay
from cactus_theory.traces.rows import PooledAudit, SavedRows, pooled_audit, row_pairs
from cactus_theory.traces.trace import Batch, Trace
from cactus_theory.traces.values import learn_values
from cactus_theory.traces.yardsticks import NoiseFloor, noise_floor

__all__ = [
    "Batch",
    "Comparison",
    "Cycle",
    "Estimate",
    "Expectation",
    "NoiseFloor",
    "Observation",
    "PooledAudit",
    "Replay",
    "SavedRows",
    "Trace",
    "compare",
    "compare_observed",
    "divergence_at",
    "expect",
    "learn_values",
    "log_trace",
    "noise_floor",
    "pooled_audit",
    "replay",
    "row_pairs",
    "row_signatures",
    "save_trace",
    "tokens_at",
]
