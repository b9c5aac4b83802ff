"""Chooses the texts that a command needs: from files, or sampled from the model where no file was named."""

from pathlib import Path

from torch import Tensor

from evaluation.perplexity import cut_text, protocol, read_documents

from .sampling import sample_windows
from .source import Source


SAMPLED = "text sampled from the source"


class Texts:
    """Windows of token ids for each purpose ("calibration", "report", "heal"). Files are read and cut at once.

    Purposes that name the same text get parts of it that do not overlap. `names` says in words what each is.

    Raises:
        ValueError: a missing, empty or short file, windows beyond the context.
    """

    def __init__(self, source: Source, window_length: int, wanted: dict[str, tuple[str | None, int]]):
        self.source, self.length = source, window_length
        self._wanted = {purpose: (text, count) for purpose, (text, count) in wanted.items() if count}
        limit = source.config.max_position_embeddings
        if self._wanted and self.length > limit:
            raise ValueError(
                f"window_length is {self.length}, but the source has {limit} positions: give --window_length {limit}"
            )
        self.names: dict[str, str] = {}
        self._counts: dict[str | None, int] = {}
        self._first: dict[str, int] = {}
        self._left_over: dict[str | None, int] = {}
        for purpose, (text, count) in self._wanted.items():
            another = ", another part" if text in self._counts else ""
            self.names[purpose] = (SAMPLED if text is None else Path(text).name) + another
            self._first[purpose] = self._counts.get(text, 0)
            self._counts[text] = self._first[purpose] + count
        self._cut: dict[str | None, Tensor] = {
            text: self._read(text, count) for text, count in self._counts.items() if text is not None
        }

    def _read(self, text: str, num_windows: int) -> Tensor:
        windows, self._left_over[text] = cut_text(
            self.source.tokenizer, read_documents(text), self.length, num_windows
        )
        return windows

    def count(self, purpose: str) -> int:
        return self._wanted[purpose][1]

    def is_sampled(self, purpose: str) -> bool:
        return self._wanted[purpose][0] is None

    def protocol(self, purpose: str, windows: Tensor) -> dict:
        """How `windows` of a purpose were made, so that they can be made again; `first_window` is where its part of the
        text begins, `num_left_over_tokens` what the text that was read holds beyond all parts."""
        text, _ = self._wanted[purpose]
        place = {"first_window": self._first[purpose], "num_left_over_tokens": self._left_over.get(text, 0)}
        return protocol(self.source.tokenizer, windows) | place

    def windows(self, seed: int) -> dict[str, Tensor | None]:
        """(N, window_length) of token ids for each purpose, None where none were wanted.

        Raises:
            ValueError: one text holds windows of another.
        """
        streams = dict(self._cut)
        if count := self._counts.get(None):
            streams[None] = sample_windows(self.source.model, self.source.tokenizer, count, self.length, seed)
        taken: dict[str, Tensor | None] = dict.fromkeys(("calibration", "report", "heal"))
        for purpose, (text, count) in self._wanted.items():
            taken[purpose], streams[text] = streams[text].split([count, len(streams[text]) - count])
        report = taken["report"]
        for purpose in ("calibration", "heal"):
            other = taken[purpose]
            if report is not None and other is not None and _share_a_window(report, other):
                raise ValueError(f"report_text holds windows of {purpose}_text: take another part, as in FILE[100:]")
        return taken


def _share_a_window(one: Tensor, other: Tensor) -> bool:
    return bool(len({tuple(row) for row in one.tolist()} & {tuple(row) for row in other.tolist()}))
