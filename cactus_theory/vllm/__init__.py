r"""Let vLLM accept drafted tokens by a policy of this package.

``register`` is the entry point ``cactus_theory`` of the group ``vllm.general_plugins``: vLLM calls
``register`` in every process, before an engine is made. Unless ``CACTUS_POLICY`` is set, the call
loads neither torch nor vLLM, and only looks for misspelt settings::

    VLLM_USE_V2_MODEL_RUNNER=0 CACTUS_POLICY=band:price=2.0 vllm serve TARGET \
        --speculative-config '{"method": "draft_model", "model": "DRAFT",
        "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}'

If ``VLLM_PLUGINS`` is set, this list must name ``cactus_theory``, or the server is not changed.
"""

from cactus_theory.vllm import compatibility, settings


def register() -> None:
    """Install the policy that ``CACTUS_POLICY`` names; without one, change nothing.

    A bad setting or an unknown version of vLLM ends the process with one line (SystemExit).
    Otherwise vLLM would log an ImportError of a plugin and serve without the policy, and show any
    other error below a traceback.
    """
    try:
        server_settings = settings.read()
        if server_settings is None:
            return
        from cactus_theory.vllm.install import install

        install(server_settings)
    except (ValueError, compatibility.UnknownVersion) as error:
        compatibility.stop(str(error))
    except ImportError as error:
        compatibility.stop(str(compatibility.unknown_version(str(error))))
