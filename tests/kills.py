"""Kills grafts at random moments (SIGKILL, which nothing can catch) and looks at what stands: python tests/kills.py [KILLS]

Each kill hits a fork of this process that grafts a tiny model over an earlier one with --overwrite. Whatever the moment, the
earlier folder or the new one is whole at its place, or the earlier one is whole in the staging folder beside it; the next run names
what was left, puts the earlier folder back where it has to, and succeeds.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from test_graft import QUICK, save_source

from checkpoints.outputs import names_of_files
from conversion import __main__ as command
from conversion import delivery


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names_of_files(folder)}


def graft_in_a_fork(folder: Path, *flags: str, before: Callable[[], object] = lambda: None) -> int:
    """Starts the graft of folder/source to folder/out; `before` runs in the fork, first of all. Returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        before()
        sys.argv = ["conversion", "graft", str(folder / "source"), str(folder / "out"), *QUICK, *flags]
        command.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for(process: int) -> int:
    """The exit code; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_after(moves: int):
    """Makes this process kill itself once a folder or file was moved so often while folders change places."""
    change, move = delivery._change_places, Path.rename
    done = 0

    def rename(self, target):
        nonlocal done
        if done == moves:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        return move(self, target)

    def patched(*arguments):
        Path.rename = rename
        change(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    delivery._change_places = patched


def check_what_stands(folder: Path, earlier: dict[str, bytes]) -> str:
    """What was found, after the next run proved that it can go on from there."""
    out = folder / "out"
    left = sorted(folder.glob(".out.*"))
    if not out.exists():
        assert len(left) == 1 and contents(left[0] / "old") == earlier, "the earlier folder is not whole"
        found = "between the moves"
        assert wait_for(graft_in_a_fork(folder)) == 2 and "was put back from" in (folder / "log").read_text()
        assert contents(out) == earlier, "it was not put back as it was"
    elif (out / "config.json").stat().st_ino == earlier_inode(folder):
        found = "before them"
        assert contents(out) == earlier, "the earlier folder changed"
    else:
        found = "after them"
        # The same graft again
        assert contents(out) == earlier, "the new folder is not whole"
    assert wait_for(graft_in_a_fork(folder, "--overwrite")) == 0, (folder / "log").read_text()
    words = (folder / "log").read_text()
    assert all(staging.name in words for staging in left), "what was left is not named"
    for staging in left:
        shutil.rmtree(staging)
    assert sorted(path.name for path in folder.iterdir()) == ["inode", "log", "out", "source"]
    return f"{found}, {'staging left' if left else 'nothing left'}"


def earlier_inode(folder: Path) -> int:
    return int((folder / "inode").read_text())


def prepare(folder: Path):
    save_source(folder / "source")
    assert wait_for(graft_in_a_fork(folder)) == 0, (folder / "log").read_text()


def remember(folder: Path) -> dict[str, bytes]:
    """The earlier folder's content; which one it is can be told by its inode."""
    (folder / "inode").write_text(str((folder / "out" / "config.json").stat().st_ino))
    return contents(folder / "out")


def random_kills(folder: Path, count: int, seed: int = 0) -> Counter:
    """Kills `count` grafts at moments spread evenly over the time that one takes. Returns how often what was found."""
    generator = random.Random(seed)
    begun = time.monotonic()
    assert wait_for(graft_in_a_fork(folder, "--overwrite")) == 0, (folder / "log").read_text()
    duration = time.monotonic() - begun
    found: Counter = Counter()
    for _ in range(count):
        earlier = remember(folder)
        process = graft_in_a_fork(folder, "--overwrite")
        time.sleep(generator.uniform(0, duration))
        os.kill(process, signal.SIGKILL)
        wait_for(process)
        found[check_what_stands(folder, earlier)] += 1
    return found


def main():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for what, times in random_kills(folder, int(sys.argv[1]) if sys.argv[1:] else 20).items():
            print(f"{times} kills {what}")


if __name__ == "__main__":
    main()
