"""How every command here ends, and what it says then: one line, and an exit code that tells what kind of end it was.

0     done
1     a budget was missed, a figure differs, a run met numbers that are not finite
2     bad input, no room on the disk or in memory: the line says what to do
70    something that nobody foresaw: the line names a file with the traceback
128 + a signal's number   stopped: 129 by SIGHUP, 130 by SIGINT (Ctrl-C), 143 by SIGTERM
"""

import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm import tqdm


UNEXPECTED = 70
# What a user, a terminal that closes and a cluster send
STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
Handlers = dict[signal.Signals, Any]
# What bad input, a full disk or a package that is not installed raises
BAD_INPUT = (ValueError, OSError, ImportError, SafetensorError, StrictDataclassError)
# torch says it as a RuntimeError, in words that depend on the device
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


class Ended(Exception):
    """An end that is no error of the input: `code` is the exit code."""

    code = 1


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal other than Ctrl-C's; whatever cleans up after Ctrl-C does so here too."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class OneLineErrors:
    """Mixed into a parser of argparse's kind: a bad flag gets one line, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(reason: str | BaseException, code: int = 2) -> NoReturn:
    """Ends the command with the reason, in one line."""
    text = str(reason)
    if isinstance(reason, StrictDataclassError):
        # The sentence stands last, below the names of class and field
        text = text.splitlines()[-1].strip().removeprefix("ValueError: ")
    # On a line of its own, below the bar of a training that stops
    tqdm.write(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def one_line_end(how_to_go_on: Callable[[], str] = lambda: "nothing was written") -> Iterator[None]:
    """Runs a command's body: whatever ends it, the user gets one line and the exit code that belongs to it.

    how_to_go_on: what stands, and what goes on from there, after a signal.
    """
    former = _raise_on_signals()
    try:
        yield
    except Ended as end:
        fail(end, end.code)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
        fail(f"interrupted: {how_to_go_on()}", 128 + number)
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
            fail(
                f"out of memory ({str(error).splitlines()[0] if str(error) else 'MemoryError'}): take smaller batches or "
                "windows, or a machine with more memory"
            )
        if isinstance(error, BAD_INPUT):
            fail(error)
        fail(
            f"unexpected {type(error).__name__}: {error}; {_keep_traceback(error)}: please report it with that text",
            UNEXPECTED,
        )
    finally:
        restore_signals(former)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Runs steps that belong together: a signal that would stop the command between them does so after them."""
    if threading.current_thread() is not threading.main_thread():
        # Python runs handlers in the main thread alone
        yield
        return
    waiting: list[int] = []
    former = handle_signals(lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        restore_signals(former)
        if waiting:
            signal.raise_signal(waiting[0])


def handle_signals(handler: Callable[[int, Any], Any], numbers: Iterable[signal.Signals] = STOPPING) -> Handlers:
    """Lets `handler` answer those of these signals that are not ignored, and gives the former handlers of these."""
    # None is a handler that Python cannot put back
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in heard}


def restore_signals(former: Handlers):
    for number, handler in former.items():
        signal.signal(number, handler)


def _raise_on_signals() -> Handlers:
    """SIGTERM and SIGHUP, which a cluster sends, raise like Ctrl-C. One that is ignored (nohup) stays ignored."""

    def interrupt(number, frame):
        raise Interrupted(number)

    return handle_signals(interrupt, (signal.SIGTERM, signal.SIGHUP))


def _keep_traceback(error: Exception) -> str:
    """Writes the traceback to a file of its own for each process, else to stderr, and says where it is."""
    rank = os.environ.get("RANK")
    try:
        descriptor, place = tempfile.mkstemp(prefix=f"bhyt-{'' if rank is None else f'rank{rank}-'}", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        traceback.print_exception(error)
        return "the traceback stands above"
    return f"the traceback is in {place}"
