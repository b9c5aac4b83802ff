"""What every command line here has in common: bad input gets one line, and the exit code says what kind of end it was."""

import sys
from typing import NoReturn

from huggingface_hub.errors import StrictDataclassError


class OneLineErrors:
    """Mixed into a parser of argparse's kind: a bad flag gets one line, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(reason: str | Exception, code: int = 2) -> NoReturn:
    """Ends the command with the reason, in one line: 1 a budget was missed, 2 bad input, 130 stopped by the user."""
    text = str(reason)
    if isinstance(reason, StrictDataclassError):
        # The sentence stands last, below the names of class and field
        text = text.splitlines()[-1].strip().removeprefix("ValueError: ")
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)
