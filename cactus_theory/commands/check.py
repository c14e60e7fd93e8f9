"""``cactus-theory check file.py:rule``: look for rows on which a policy is wrong."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from cactus_theory.base import arguments as check

# pairs of rows to try: enough to find every fault planted in the tests, most of them within 50
DEFAULT_EXAMPLES = 2000
# most seconds for the whole check, far more than policies usually need
DEFAULT_TIMEOUT = 600.0
# longest --timeout in seconds that the system's alarm accepts
LONGEST = 1e6


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags; needs no optional package."""
    parser.add_argument(
        "rule",
        metavar="FILE.py:NAME",
        help="a function under @ct.rule or a Policy; :knob=value",
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=DEFAULT_EXAMPLES,
        metavar="N",
        help="pairs of rows to draw (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other rows")
    parser.add_argument("--properties", metavar="A,B", help="check these properties only")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help="seconds that the check may take (%(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def run(args: Namespace) -> int:
    """Print the report; return 0 if every property holds, 1 if one is broken."""
    from cactus_theory.base.tables import print_json
    from cactus_theory.testing.check_process import check_file
    from cactus_theory.testing.report import summary, table, told

    check.number("--timeout", args.timeout, 0, LONGEST, open_low=True)
    check.number("--seed", args.seed, 0)
    asked = args.properties
    properties = None if asked is None else [name.strip() for name in asked.split(",")]
    report = check_file(
        args.rule,
        examples=int(check.number("--examples", args.examples, 1)),
        seed=args.seed,
        properties=properties,
        timeout=args.timeout,
        quiet=args.json,
    )
    if args.json:
        print_json({"passed": report.passed} | asdict(report))
    else:
        print(f"{report.policy}\n{report.declares}\n\n{table(report)}\n")
        if report.findings:
            print(f"{told(report)}\n")
        print(summary(report))
    return 0 if report.passed else 1
