"""Damaged and hostile files: one line and exit code 2, or what the whole file gives; none runs."""

import contextlib
import io
import random
import shutil
import sys
from pathlib import Path

import pytest

from cactus_theory.cli import main
from tests.amounts import THOROUGH
from tests.damaged import damaged, damaged_json, whole
from tests.test_trusted import PAIR, SPY

KINDS = (
    "rows.npy", "rows.npz", "rows.json", "prompts.txt",
    "prompts.jsonl", "tuned.json", "manifest.json",
    "text-00000.safetensors", "config.json",
)  # fmt: skip
# of each kind in the plain suite; models take a tenth of a second each
PLAIN = dict.fromkeys(KINDS, 2) | {"config.json": 0}
LONGEST = 1400  # characters of a line
# what a line may name instead of the file: the argument that it was given for
ARGUMENTS = dict.fromkeys(KINDS, ("target_probs: ", "--prompts: ")) | {
    "config.json": ("target_dir: ",),
}
SEEN: list[str] = []
WATCHED = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect")


def _watch(event: str, arguments: tuple) -> None:
    """Note what would run foreign code, or code of the folder that is watched."""
    if event in WATCHED or (event == "exec" and "spying" in str(arguments[0])):
        SEEN.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)


class Desk:
    """A folder with one whole file of every kind, and a command that reads each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder, folder / "unpickled"
        self.files = whole(folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        (folder / "spying.py").write_text(SPY)
        (folder / "model").mkdir()
        (folder / "model" / "spying.py").write_text(SPY)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PAIR / "target" / name, folder / "model")

    def path(self, kind: str) -> Path:
        inside = {"manifest.json": "trace", "text-00000.safetensors": "trace"}
        return self.folder / {**inside, "config.json": "model"}.get(kind, "") / kind

    def read(self, kind: str) -> tuple[int, str, str]:
        """Return exit code, output and errors of the command that reads a kind of file."""
        path = str(self.path(kind))
        models = ("--target", "nowhere", "--draft", "nowhere")
        generate = ("generate", "--prompt", "x", "--json")
        trace = ("compare", str(self.folder / "trace"), "--policy", "speculative", "--json")
        work = str(self.folder / "work")
        tune = ("tune", "--nats", "0.1", "--work", work, "--json")
        command, arguments = {
            "prompts": (main, (*tune, *models, "--prompts", path)),
            "tuned": (main, (*generate, *models, "--tuned", path)),
            "manifest": (main, trace),
            "text-00000": (main, trace),
            "config": (main, (*generate, "--policy", "speculative", "--target",
                              str(self.folder / "model"), "--draft", str(PAIR / "draft"))),
            "rows": (main, ("solve", path, path, "--delta", "0.1", "--json")),
        }[kind.partition(".")[0]]  # fmt: skip
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command(list(arguments))
        return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"))


def complaints(desk: Desk, kind: str, content: bytes, right: tuple[int, str, str]) -> list[str]:
    """Return what is wrong about reading ``content`` in a file's place; fewer rows are rows."""
    path, found = desk.path(kind), []
    path.write_bytes(content)
    SEEN.clear()
    try:
        status, out, err = desk.read(kind)
    except BaseException as error:
        return [f"raised {type(error).__name__}: {error!s:.200}"]
    finally:
        path.write_bytes(desk.files[kind])
    if SEEN or desk.marker.exists() or list(desk.folder.glob("**/ran")):
        found.append(f"something ran: {SEEN}")
    lines = err.splitlines()
    if status == 0 and kind != "rows.json" and out != right[1]:
        found.append(f"another result: {out[:300]}")
    if status == 2 and (status, out, err) != right:
        named = any(name in err for name in (path.name, str(desk.folder), *ARGUMENTS[kind]))
        if out or len(lines) != 1 or len(err) > LONGEST or not named:
            found.append(f"not one line of its own: {err[:600]}")
    return found if status in (0, 2) else [*found, f"exit code {status}: {err[:300]}"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_one_line_and_run_nothing(desk: Desk, kind: str) -> None:
    make = damaged_json if kind.endswith(".json") else damaged
    damages = list(make(desk.files[kind], desk.marker, len(kind)))
    assert len(damages) >= 25
    chosen = damages if THOROUGH else random.Random(kind).sample(damages, PLAIN[kind])
    if not chosen:
        pytest.skip("in the thorough suite")
    if kind == "config.json":
        pytest.importorskip("transformers")
    right = desk.read(kind)
    assert right[0] == 0 or "nowhere" in right[2] or kind == "config.json", right
    found = {name: said for name, content in chosen
             if (said := complaints(desk, kind, content, right))}  # fmt: skip
    assert not found, "\n".join(f"{name}: {said}" for name, said in found.items())


def test_the_watch_sees_what_it_watches(desk: Desk) -> None:
    import pickle

    from tests.damaged import Mine

    SEEN.clear()
    pickle.loads(pickle.dumps(Mine(desk.marker)))
    assert desk.marker.exists() and SEEN
    desk.marker.rmdir()
    SEEN.clear()
