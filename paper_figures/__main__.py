"""Draw figures from committed numbers: ``python -m paper_figures [NAME …] [--width column]``.

Every module ``fig_NAME.py`` has a function ``draw(data)``, which reads CSV files in the folder
``data`` and returns a figure. The figure is saved as ``NAME.pdf`` and ``NAME.png``; equal numbers
give equal bytes.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    return sorted(path.stem.removeprefix("fig_") for path in HERE.glob("fig_*.py"))


def drawable(data: Path) -> list[str]:
    """Return the names of all figures whose tables exist; some need a GPU or a real model."""
    tables = {"gpu": ("gpu_verify", "gpu_decode"), "answers": ("answers",)}
    present = {path.stem for path in data.glob("*.csv") if path.is_file()}
    return [name for name in names() if present.issuperset(tables.get(name, ()))]


def main(arguments: list[str] | None = None) -> int:
    """Draw the named figures, or all; return the exit code.

    The code is 2, after one line, for a wrong name or file, 130 after Ctrl-C, and silently 141 if
    the reader of the output is gone, as after ``| head``.
    """
    if sys.stderr is None:  # stderr was closed before the start
        sys.stderr = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
    if sys.stdout is None:
        return 141  # 128 + SIGPIPE
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"stdout: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m paper_figures: interrupted; its pictures are whole", file=sys.stderr)
        return 130


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures",
        description=__doc__,
        epilog="example:\n  python -m paper_figures overspend --out build/example",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--width", choices=("page", "column"), default="page", help="in a paper")
    parser.add_argument("--out", type=Path, default=HERE, help="where the pictures go")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="folder of the CSV")
    args = parser.parse_args(arguments)
    try:
        for name in args.names or drawable(args.data):
            if name not in names():
                raise ValueError(f"NAME: must be one of {', '.join(names())}; got {name!r}")
            for path in draw(name, args.data, args.out, args.width):
                print(path)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"python -m paper_figures: {error}", file=sys.stderr)
        return 2
    return 0


def draw(name: str, data: Path, out: Path, width: str = "page") -> list[Path]:
    """Draw one figure, as wide as a page or a column, and return its files."""
    try:
        style = importlib.import_module("paper_figures._style")
    except ImportError as error:
        raise ValueError("matplotlib is needed: pip install 'cactus-theory[figures]'") from error
    with style.applied(width):
        figure = importlib.import_module(f"paper_figures.fig_{name}").draw(data)
        return style.save(figure, name, out)


if __name__ == "__main__":
    sys.exit(main())
