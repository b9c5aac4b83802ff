"""Faults at file operations: the n-th operation under a folder fails, as on a full disk, without a right, or on what is gone.

An audit hook sees what Python does with files; what libraries do below it (safetensors, tokenizers, torch.save) is wrapped, and
fails with the error and the half-written file that the library would leave.
"""

import contextlib
import errno
import fnmatch
import importlib
import io
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch


FULL, DENIED, GONE = errno.ENOSPC, errno.EACCES, errno.ENOENT
KINDS = {"full": FULL, "denied": DENIED, "gone": GONE}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# event -> places of (path, descriptor of the folder that a relative path is meant from), one a path
EVENTS = {
    "os.rename": ((0, 2), (1, 3)),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((0, 2), (1, 2)),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.utime": ((0, 3),),
    "os.listdir": ((0, None),),
    "os.scandir": ((0, None),),
}
# What takes room on a disk; reading and removing go on when it is full
TAKES_ROOM = ("write", "os.mkdir", "os.link", "os.symlink", "below Python")


@dataclass
class Faults:
    """While active, counts the operations under `folder`, and lets number `at` fail with the error number `error`.

    A full disk stays full: what takes room fails from number `at` on. Other errors come once. `seen` and `failed` hold the
    operations in words.
    """

    folder: str
    error: int = FULL
    at: int | None = None
    seen: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    removal_failed: bool = False
    _doomed: list[str] = field(default_factory=list)

    def will_remove(self, path: str):
        """What is done to files below `path` from now on is part of removing them."""
        self._doomed.append(path)

    def operation(self, what: str, *paths: str) -> bool:
        """Whether this operation is to fail."""
        if not any(path == self.folder or path.startswith(self.folder + "/") for path in paths):
            return False
        takes_room = what.startswith(TAKES_ROOM)
        if self.error == FULL and not takes_room:
            return False
        self.seen.append(f"{what} {' -> '.join(path.removeprefix(self.folder + '/') for path in paths)}")
        number = len(self.seen) - 1
        if self.at is None or number < self.at or (self.error != FULL and number > self.at):
            return False
        self.failed.append(self.seen[-1])
        is_doomed = any(paths[0] == path or paths[0].startswith(path + "/") for path in self._doomed)
        self.removal_failed |= is_doomed or what in ("os.rmdir", "os.remove", "open to remove")
        return True


_active: Faults | None = None
_installed = False


def _hook(event: str, arguments: tuple):
    faults = _active
    if faults is not None and event == "shutil.rmtree":
        # It only says what comes: each step of it is an event of its own
        faults.will_remove(_absolute(arguments[0], arguments[1]))
    if faults is None or not (event == "open" or event in EVENTS):
        return
    if event == "open":
        path, mode, flags = arguments
        # Removing a folder opens it as no file is opened: without a mode
        what = "write" if flags & WRITING else "read" if mode else "open to remove"
        places: tuple = ((path, None),)
    else:
        what = event
        places = tuple((arguments[at], None if base is None else arguments[base]) for at, base in EVENTS[event])
    paths = [_absolute(path, base) for path, base in places if isinstance(path, (str, bytes, os.PathLike))]
    if faults.operation(what, *paths):
        raise OSError(faults.error, os.strerror(faults.error), paths[0])


def _absolute(path, base: int | None) -> str:
    path = os.fsdecode(path)
    if base is not None and base >= 0 and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{base}"), path)
    return os.path.abspath(path)


@contextlib.contextmanager
def active(faults: Faults) -> Iterator[Faults]:
    """Lets `faults` happen within the block."""
    global _active, _installed
    if not _installed:
        # It cannot be taken out again
        sys.addaudithook(_hook)
        _installed = True
    with _below_python():
        _active = faults
        try:
            yield faults
        finally:
            _active = None


def _safetensors_error(error: int, path: str) -> Exception:
    from safetensors import SafetensorError

    return SafetensorError(f"Error while serializing: I/O error: {os.strerror(error)} (os error {error})")


def _plain_error(error: int, path: str) -> Exception:
    return Exception(f"{os.strerror(error)} (os error {error})")


def _torch_error(error: int, path: str) -> Exception:
    return RuntimeError(f"[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0 ({os.strerror(error)})")


# (module, object, which argument is the path, what it raises) of writers that no audit event tells of
WRITERS: list[tuple[str, str, int, Callable[[int, str], Exception]]] = [
    ("safetensors.torch", "save_file", 1, _safetensors_error),
    ("conversion.saving", "save_file", 1, _safetensors_error),
    ("conversion.report", "save_file", 1, _safetensors_error),
    ("transformers.modeling_utils", "safe_save_file", 1, _safetensors_error),
    ("peft.peft_model", "safe_save_file", 1, _safetensors_error),
    ("torch", "save", 1, _torch_error),
]


@contextlib.contextmanager
def _below_python() -> Iterator[None]:
    former = []
    for name, attribute, place, error in WRITERS:
        module = importlib.import_module(name)
        if hasattr(module, attribute):
            former.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, _failing(getattr(module, attribute), place, error))
    from transformers import PreTrainedTokenizerFast

    # tokenizers' own save is a method of a type that cannot be changed
    backend = PreTrainedTokenizerFast.backend_tokenizer
    former.append((PreTrainedTokenizerFast, "backend_tokenizer", backend))
    PreTrainedTokenizerFast.backend_tokenizer = property(lambda self: _Tokenizer(backend.fget(self)))
    try:
        yield
    finally:
        for module, attribute, function in reversed(former):
            setattr(module, attribute, function)


class _Tokenizer:
    """A tokenizer of Rust whose `save` may fail; all else is its own."""

    def __init__(self, own):
        object.__setattr__(self, "_own", own)

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __setattr__(self, name, value):
        setattr(self._own, name, value)

    def save(self, path, *arguments, **options):
        return _failing(self._own.save, 0, _plain_error)(path, *arguments, **options)


def _failing(function: Callable, place: int, error: Callable[[int, str], Exception]) -> Callable:
    def write(*arguments, **options):
        path = arguments[place] if len(arguments) > place else options.get("filename", options.get("f"))
        if _active is not None and isinstance(path, (str, os.PathLike)):
            path = _absolute(path, None)
            if _active.operation("below Python", path):
                number = _active.error
                if number == FULL:
                    _leave_a_part(path)
                raise error(number, path)
        return function(*arguments, **options)

    return write


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is done to files within the block is none of the command's operations."""
    global _active
    faults, _active = _active, None
    try:
        yield
    finally:
        _active = faults


def _leave_a_part(path: str):
    with aside():
        Path(path).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{")


@dataclass
class Scenario:
    """A command, and the folder that it is run in, made by `prepare`.

    `may_remain`: patterns of what may be there after a failure, as an interrupted training goes on from it.
    `others`: patterns of files that belong to a library.
    `go_on`: the words with which such a run must then come to a whole end.
    """

    name: str
    prepare: Callable[[Path], None]
    main: Callable[[], None]
    words: list[str]
    may_remain: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    grad: bool = False
    go_on: Callable[["End"], list[str]] | None = None


@dataclass
class End:
    """How a run ended: exit code, or the exception that came out of it; what it printed; the files that it left."""

    code: int | BaseException
    errors: str
    files: dict[str, bytes | None]
    faults: Faults

    @property
    def lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Content by path; None for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = None if path.is_dir() else path.read_bytes()
    return found


def run(scenario: Scenario, folder: Path, faults: Faults) -> End:
    """Runs the command in this process, in `folder`; what it says goes to strings."""
    errors, said = io.StringIO(), io.StringIO()
    former, sys.argv = sys.argv, [scenario.name, *scenario.words]
    code: int | BaseException = 0
    place = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(said):
            with torch.set_grad_enabled(scenario.grad), active(faults):
                scenario.main()
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException as error:
        code = error
    finally:
        sys.argv = former
        os.chdir(place)
    return End(code, errors.getvalue(), snapshot(folder), faults)


class Trial:
    """Runs one scenario again and again, each time in the same folder made anew, and says what was wrong with an end."""

    def __init__(self, scenario: Scenario, place: Path):
        self.scenario, self.folder = scenario, place / "work"
        self._template = place / "template"
        self._template.mkdir(parents=True)
        scenario.prepare(self._template)
        self.before = snapshot(self._template)
        self.whole = self._run(Faults(str(self.folder), DENIED))
        assert self.whole.code == 0, self.whole.errors

    def _run(self, faults: Faults, largest_file: int = resource.RLIM_INFINITY) -> End:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._template, self.folder)
        with tempfile.TemporaryDirectory() as temporary:
            former, tempfile.tempdir = tempfile.tempdir, temporary
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, unlimited[1]))
            try:
                return run(self.scenario, self.folder, faults)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
                tempfile.tempdir = former

    def operations(self, kind: str) -> int:
        """How many points of this kind there are."""
        if kind != "full":
            return len(self.whole.faults.seen)
        return sum(what.startswith(TAKES_ROOM) for what in self.whole.faults.seen)

    def wrong(self, kind: str, at: int) -> str | None:
        """What is wrong with the end of a run whose operation `at` fails; None where all is as it should be."""
        end = self._run(Faults(str(self.folder), KINDS[kind], at))
        if not end.faults.failed and end.code == 0:
            # It came to fewer operations than the first run, which cached something
            return None
        problem = self._problem(end)
        return problem and f"{kind} {at}: {(end.faults.failed or ['nothing failed'])[0]}: {problem}"

    def wrong_below(self, num_bytes: int) -> str | None:
        """What is wrong where no file may become larger than this, as on a disk that is full in the middle of a file."""
        end = self._run(Faults(str(self.folder)), num_bytes)
        problem = "succeeded" if end.code == 0 else self._problem(end)
        return problem and f"files of {num_bytes} bytes: {problem}"

    def sizes(self) -> list[int]:
        """Just below the size of each file that a whole run writes."""
        written = {
            len(content) for name, content in self.whole.files.items() if self.before.get(name) != content and content
        }
        return sorted(size - 1 for size in written)

    def _problem(self, end: End) -> str | None:
        if end.code == 0:
            problem = self._not_whole(end)
        elif end.code in (2, 70):
            problem = self._not_as_before(end)
        else:
            problem = f"ended with {end.code!r}"
        if problem is None and end.code != 0 and (len(end.lines) != 1 or "Traceback" in end.errors):
            problem = f"said {end.errors[-300:]!r}"
        if problem is None and end.code != 0 and self.scenario.go_on is not None:
            again = run(replace(self.scenario, words=self.scenario.go_on(end)), self.folder, Faults(str(self.folder)))
            differing = sorted(name for name in self.whole.files.keys() - again.files.keys())
            if again.code != 0 or differing:
                problem = f"went on to {again.code!r} {again.lines}, without {differing[:5]}"
        said = end.lines[-1] if end.lines else ""
        return problem and f"{problem} [{end.code!r} {said}]"

    def _not_whole(self, end: End) -> str | None:
        differing = [name for name in self.whole.files.keys() ^ end.files.keys() if not self._may_remain(name, end)]
        if differing:
            return f"succeeded, but these are there or not there: {sorted(differing)[:5]}"
        empty = [name for name, content in end.files.items() if content == b"" and self.whole.files.get(name)]
        return f"succeeded with empty {empty}" if empty else None

    def _not_as_before(self, end: End) -> str | None:
        changed = [name for name in self.before if name not in end.files or end.files[name] != self.before[name]]
        if changed:
            return f"failed, and these are gone or changed: {changed[:5]}"
        left = [name for name in end.files.keys() - self.before.keys() if not self._may_remain(name, end)]
        return f"failed, and left {sorted(left)[:5]}" if left else None

    def _may_remain(self, name: str, end: End) -> bool:
        """Staging whose removal was what failed, and what the scenario allows after a failure."""
        if end.faults.removal_failed and (name.startswith(".") or "/." in name):
            return True
        patterns = self.scenario.others
        if end.code != 0 or end.faults.removal_failed:
            patterns += self.scenario.may_remain
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
