"""Read acceptance records of engines: for each request, how many rounds accepted 0, 1, … tokens.

The formats are answers of vLLM (``--per-request-spec-decode-metrics``, summary or detailed; pull
request 48915), answers of SGLang (``spec_accept_histogram`` of ``meta_info``) and lines of NVIDIA
AIPerf's ``profile_export.jsonl`` (``spec_decode_acceptance``; warm-up requests are left out).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cactus_theory.base import arguments as check
from cactus_theory.base.significance import FEWEST_TEXTS
from cactus_theory.traces.counters import Observation

Record = dict[str, Any]


def read_records(path: str | Path, *, width: int, **known: Any) -> Observation:
    """Read acceptance records from JSON lines or one JSON text; errors are computed over requests.

    Drafts may have up to ``width`` tokens. The share of rounds that draft each position is known
    if all records have vLLM's ``per_step_drafted`` or ``acceptance_histogram_by_draft_length``.
    vLLM counts positions behind an end of text; fields in ``known`` replace what is read.

    Raises
    ------
    OSError, ValueError
        A file that cannot be read or holds no record, numbers that contradict each other, more
        than ``width`` accepted or drafted tokens in a round.
    """
    histograms, drafted, reached, engines = [], [], [], set[str]()
    for number, item in enumerate(_objects(path), 1):
        parts = _record(item)
        if parts is None:
            continue
        engine, record, histogram = parts
        where = f"--records: record {number} of {path}"
        counts = np.trim_zeros(_counts(f"{where}: the histogram", histogram), "b")
        if len(counts) > width + 1:
            raise ValueError(
                f"{where}: must accept at most the {width} tokens that are expected to be drafted "
                f"(--num-draft-tokens); got {len(counts) - 1}"
            )
        counts = np.pad(counts, (0, width + 1 - len(counts)))
        accepted = int(counts @ np.arange(width + 1))
        # the engines' own sums, if the record has them
        sums = dict.fromkeys(("num_spec_steps", "spec_verify_ct"), counts.sum())
        for name, sum_ in (sums | {"num_accepted_draft_tokens": accepted}).items():
            if record.get(name, sum_) != sum_:
                raise ValueError(f"{where}: {name} must be {sum_}; got {record[name]!r:.60}")
        drafted.append(record.get("num_draft_tokens"))  # in SGLang, perhaps the nodes of trees
        reached.append(_reached(where, record, counts))
        histograms.append(counts)
        engines.add(engine)
    if not histograms:
        raise ValueError(f"--records: must hold a record of vLLM, SGLang or AIPerf; got {path}")
    requests, exactly_i = len(histograms), np.array(histograms, float)
    at_least = exactly_i[:, ::-1].cumsum(1)[:, ::-1]  # (requests, K + 1): rounds that accept ≥ i
    total = at_least.sum(0)
    before = np.maximum(total[:-1], 1)  # rounds that accept the position before
    further: Record = {"answers": float(requests), "drafted": None, "behind_ends": None}
    # an Observation has a drafted token or more in each round
    if all(type(count) is int for count in drafted) and sum(drafted) >= total[0]:
        further["drafted"] = float(sum(drafted))
    if engines == {"vllm"}:
        further["behind_ends"] = True
    if all(by_position is not None for by_position in reached):
        further["shares"] = sum(reached) / before
    if requests >= FEWEST_TEXTS:  # standard error of a ratio of sums over requests (delta method)
        residuals = at_least[:, 1:] - at_least[:, :-1] * (total[1:] / before)
        variance = (residuals**2).sum(0) * requests / (requests - 1)
        further["by_request"] = np.sqrt(variance) / before
    further |= {name: value for name, value in known.items() if value is not None}
    try:
        return Observation(total[1:] / max(total[0], 1), total[0], np.zeros(width), **further)
    except ValueError as error:
        raise ValueError(f"--records: {error} in {path}") from None


def _objects(path: str | Path) -> Iterator[Any]:
    """Yield the objects of a JSON text or of JSON lines, also as a stream of events (data: …)."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"--records: must be a readable text; {error}") from None
    try:
        items = json.loads(text)
    except ValueError:
        try:
            lines = [line for line in text.splitlines() if line.strip() not in ("", "data: [DONE]")]
            items = [json.loads(line.removeprefix("data: ")) for line in lines]
        except ValueError as error:
            raise ValueError(f"--records: must be JSON, or JSON lines; {error}") from None
    yield from items if isinstance(items, list) else [items]


def _record(item: Any) -> tuple[str, Record, Any] | None:
    """Return the engine, the record and its histogram; None for an object without a histogram."""
    outer = item if isinstance(item, dict) else {}

    def inner(name: str) -> Record:
        return value if isinstance(value := outer.get(name), dict) else {}

    about, record, meta = inner("metadata"), inner("spec_decode_acceptance"), inner("meta_info")
    if "warmup" in (about.get("benchmark_phase"), about.get("phase_kind")):
        return None
    if not record and isinstance(vllm := inner("metrics").get("speculative_decoding"), dict):
        record = {"engine": "vllm"} | vllm
    if "acceptance_histogram" in record:
        return str(record.get("engine")), record, record["acceptance_histogram"]
    if "spec_accept_histogram" in meta:
        return "sglang", meta, meta["spec_accept_histogram"]
    return None


def _counts(where: str, histogram: Any) -> np.ndarray:
    """Return how many rounds accepted 0, 1, … tokens, from a list or from a map by number."""
    if isinstance(histogram, dict) and all(str(key).isdecimal() for key in histogram):
        most = max(map(int, histogram), default=0)
        # raises above 10^4: the list would have as many entries
        check.whole_number(f"{where}: accepted tokens", min(most, 10**4), most)
        histogram = [histogram.get(str(place), 0) for place in range(most + 1)]
    if not isinstance(histogram, list) or not all(
        type(count) is int and 0 <= count < 2**53 for count in histogram
    ):
        raise ValueError(f"{where} must be of whole numbers from 0 on; got {histogram!r:.60}")
    return np.array(histogram or [0], dtype=np.int64)


def _reached(where: str, record: Record, counts: np.ndarray) -> np.ndarray | None:
    """Return how many rounds drafted each position after accepting all before; None if unknown."""
    width = len(counts) - 1
    steps, lengths = record.get("per_step_accepted"), record.get("per_step_drafted")
    by_length = record.get("acceptance_histogram_by_draft_length")
    table = np.zeros((width + 1, width + 1))  # number of rounds by tokens drafted, and accepted
    rounds: list[Any] = []  # (tokens drafted, tokens accepted, number of rounds)
    if steps is not None and lengths is not None:
        if steps:  # of an empty list _counts makes a round
            numbers = (_counts(f"{where}: by step", listed) for listed in (lengths, steps))
            rounds = [(*pair, 1) for pair in zip(*numbers, strict=False)]
    elif isinstance(by_length, dict):
        for length, histogram in by_length.items():
            if str(length).isdecimal():
                by_accepted = enumerate(_counts(f"{where}: drafts of {length}", histogram))
                rounds += [(int(length), accepted, count) for accepted, count in by_accepted]
    else:
        return None
    for drafted, accepted, count in rounds:
        if count and not accepted <= drafted <= width:
            raise ValueError(
                f"{where}: must accept at most what was drafted, up to {width}; "
                f"got {accepted} of {drafted}"
            )
        if count:
            table[drafted, accepted] += count
    if not np.array_equal(table.sum(0), counts):
        raise ValueError(f"{where}: numbers by step or length must add up to the histogram's")
    return np.array([table[place + 1 :, place:].sum() for place in range(width)])
