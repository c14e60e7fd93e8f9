"""Run the worker of a check, and leave no process behind when it ends or has to end.

``python -P _keeper.py HOME`` reads the worker's options as JSON from its input. It is run by its
path, so that it can fork before anything large is imported: the child becomes the worker, and
this process ends what the child leaves behind, in sessions of their own, too. HOME, the folder
that holds this package, is searched after the standard library. SIGTERM ends both.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any

# prctl: orphans of this process's descendants become its children (Linux)
ADOPT_ORPHANS = 36
# what a rule may write to one file, and which part of the machine's memory it may use
FILE_BYTES, MEMORY_SHARE = 2**30, 0.5


def main(home: str) -> None:
    """Run the worker; end as it ends."""
    options = json.loads(sys.stdin.buffer.read())
    if not hasattr(os, "fork"):
        _work(home, options)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    worker = os.fork()
    if worker == 0:
        _limit()
        _work(home, options)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(worker, signal.SIGKILL))
    _, status = os.waitpid(worker, 0)
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _work(home: str, options: dict[str, Any]) -> None:
    """Be the worker; what is registered for the end of Python, and threads, do not run on."""
    code = 1
    try:
        library = os.path.dirname(os.__file__)
        sys.path.insert(sys.path.index(library) + 1 if library in sys.path else 0, home)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from cactus_theory.testing._worker import main as work

        work(options)
        code = 0
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _limit() -> None:
    """Keep the worker from filling the disk or the memory."""
    import resource

    memory = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    bounds = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_BYTES))
    for kind, most in (*bounds, (resource.RLIMIT_DATA, memory)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _end_children() -> None:
    """End every child, and those that become children by it (Linux)."""
    listed = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(listed):
        with open(listed, encoding="ascii") as children:
            for child in children.read().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1])
