r"""Serve with a policy of this package on vLLM.

``register`` is the entry point ``cactus_theory`` of the group ``vllm.general_plugins``: vLLM calls
it in every process, before engines are made. Unless ``CACTUS_POLICY`` is set it loads neither torch
nor vLLM, and does nothing but look for misspelt settings::

    VLLM_USE_V2_MODEL_RUNNER=0 CACTUS_POLICY=band:price=2.0 vllm serve TARGET \
        --speculative-config '{"method": "draft_model", "model": "DRAFT",
        "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}'

``VLLM_PLUGINS``, where it is set, must name ``cactus_theory``; a server that it leaves out is not
changed.
"""

from cactus_theory.vllm import replace, settings


def register() -> None:
    """Let the policy of the environment decide drafts; nothing happens without one.

    SystemExit, in one line, for a bad setting or an unknown version: vLLM logs what a plugin cannot
    import and goes on, and shows other errors below a traceback.
    """
    try:
        server_settings = settings.read()
        if server_settings is None:
            return
        from cactus_theory.vllm.install import install

        install(server_settings)
    except (ValueError, replace.UnknownVersion) as error:
        replace.stop(str(error))
    except ImportError as error:
        replace.stop(str(replace.unknown_version(str(error))))
