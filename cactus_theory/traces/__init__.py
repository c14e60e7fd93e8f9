"""Log the rows of a target and its draft along texts, and replay policies on the logged rows."""

from cactus_theory.traces.counters import Observation as Observation
from cactus_theory.traces.counters import compare_observed as compare_observed
from cactus_theory.traces.estimate import Estimate as Estimate
from cactus_theory.traces.estimate import Replay as Replay
from cactus_theory.traces.expected_acceptance import expect
from cactus_theory.traces.log import log_trace, save_trace
from cactus_theory.traces.replays import replay
from cactus_theory.traces.rows import SavedRows as SavedRows
from cactus_theory.traces.shard import Cycle
from cactus_theory.traces.trace import Trace

__all__ = ["Cycle", "Trace", "expect", "log_trace", "replay", "save_trace"]
