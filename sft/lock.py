"""One run a folder: the main process holds a lock, which dies with it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.outputs import LOCK_FILE


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it for this run; to be asked by the main process alone.

    Raises:
        ValueError: another run holds it, or it is a file.
        OSError: it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    descriptor = _lock(file)
    try:
        yield
    finally:
        # While it is still held, so that nobody's lock is taken away
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"output_dir {file.parent} belongs to a run that is under way: wait for its end, or choose another"
            ) from None
        except OSError as error:
            print(f"note: this disk keeps no locks ({error.strerror}): let no second run write to {file.parent}")
            return descriptor
        # The run that held it may have removed the file between the two calls
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
            return descriptor
        os.close(descriptor)
