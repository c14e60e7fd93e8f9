"""The subcommands of ``cactus-theory``: one module each, with ``add_arguments`` and ``run``.

The modules ``flags``, ``inputs``, ``models`` and ``plot`` have the code that commands share.
"""

# group of commands → name → (description in one line, flags of an example that runs in a checkout)
COMMANDS = {
    "Solve": {
        "solve": ("the best acceptance under a divergence budget",
                  "simulations/data/rows.npz --delta 0.1"),
        "audit": ("what a policy emits, costs and declares",
                  "simulations/data/rows.npz --policy cactus:delta=0.1"),
        "compare": ("policies at equal nats, or equal acceptance, on rows or a trace",
                    "simulations/data/rows.npz --policy simulations/data/wrong_rule.py:wrong_rule "
                    "--policy lenience --policy band --nats 0.02 0.05"),
        "check": ("look for rows on which a policy is wrong",
                  "simulations/data/wrong_rule.py:wrong_rule --examples 200"),
    },
    "Decode": {
        "generate": ("decode a prompt with a draft model",
                     "--target simulations/pair/target --draft simulations/pair/draft "
                     '--policy band:price=1 --prompt "def f(x):" --max-new-tokens 32'),
    },
    "Measure": {
        "trace": ("log all rows of a pair along real texts; resumes",
                  "--target simulations/pair/target --draft simulations/pair/draft "
                  "--prompts simulations/data/prompts.jsonl --num-draft-tokens 4 "
                  "--max-new-tokens 16 --cycles 20 --out build/example/trace"),
        "tune": ("the fastest policy, knob, verifier and K",
                 "--trace simulations/data/trace --cost-ratio 0.1 --nats 0.05"),
        "served": ("is what an engine writes the law that it claims? from its tokens",
                   "simulations/data/answers.jsonl --target simulations/pair/target"),
        "expect": ("what acceptance is healthy, at each position",
                   "--trace simulations/data/trace --observed 0.68,0.49,0.33,0.24 --rounds 500"),
        "promise": ("what a cap on KL says about an answer", "--cap 0.1 --rate 0.9"),
    },
}  # fmt: skip
