"""Log the rows of a real pair along real texts, and replay any policy and verifier on them."""

from cactus_theory.traces._shard import Cycle
from cactus_theory.traces.diagnosis import Observation, compare_observed
from cactus_theory.traces.estimate import Estimate, Replay
from cactus_theory.traces.expect import Expectation, expect
from cactus_theory.traces.log import log_trace, save_trace
from cactus_theory.traces.replays import replay
from cactus_theory.traces.rows import SavedRows, pooled_audit
from cactus_theory.traces.trace import Trace

__all__ = [
    "Cycle",
    "Estimate",
    "Expectation",
    "Observation",
    "Replay",
    "SavedRows",
    "Trace",
    "compare_observed",
    "expect",
    "log_trace",
    "pooled_audit",
    "replay",
    "save_trace",
]
