"""What engines are asked to do: arguments of engines and of requests."""

from tests.vllm_engine.laws import PAIR


def engine(sample="probabilistic", processes=1, **speculative):
    """Return arguments of an engine with the package's own pair of models."""
    draft = {
        "method": "draft_model",
        "model": str(PAIR / "draft"),
        "num_speculative_tokens": 3,
        "draft_sample_method": sample,
    }
    alone = {"distributed_executor_backend": "uni"} if processes == 1 else {}
    return {
        "model": str(PAIR / "target"),
        "speculative_config": draft | speculative,
        "seed": 1,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 64,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    } | alone


def request(prompt, times, policy=None, seeds=None, **params):
    """Return so many equal requests of four tokens."""
    own = {"max_tokens": 4} | params
    if policy is not None:
        own["extra_args"] = {"cactus": policy}
    return {"prompt": prompt, "times": times, "params": own} | (
        {} if seeds is None else {"seeds": seeds}
    )


def texts_of(answer, job):
    """Return the texts of each kind of request."""
    found, place = [], 0
    for own in job["requests"]:
        found.append(answer["tokens"][place : place + own["times"]])
        place += own["times"]
    return found
