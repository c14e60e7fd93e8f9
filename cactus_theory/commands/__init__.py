"""The subcommands of ``cactus-theory``: a file each, with ``add_arguments`` and ``run``.

Beside them is what several share: flags, and pictures.
"""

# name: what it does in a line
COMMANDS = {
    "solve": "the best acceptance under a divergence budget",
    "audit": "what a policy emits, costs and declares",
    "check": "look for rows on which a policy is wrong",
    "generate": "decode a prompt with a draft model",
    "expect": "what acceptance is healthy, at each position",
    "tune": "the fastest policy, knob, verifier and K",
    "promise": "what a cap on KL says about an answer",
}
