"""Chooses the text to calibrate on and the text to measure on."""

from pathlib import Path

from torch import Tensor

from evaluation.perplexity import read_documents, text_windows

from .arguments import GraftArguments
from .calibration import sample_windows
from .source import Source


SAMPLED = "text sampled from the source"


class Texts:
    """Calibration and report windows; the source writes them where no file was named. Files are read and cut at once.

    `names` says in words what each is. Without a text of its own the report takes a part of the other that calibration
    did not see.

    Raises:
        ValueError: a missing, empty or short file, windows beyond the context, a report on calibrated text.
    """

    def __init__(self, arguments: GraftArguments, source: Source):
        self.source, self.seed, self.length = source, arguments.seed, arguments.window_length
        self.counts = [arguments.num_calibration_windows, arguments.num_report_windows]
        limit = source.config.max_position_embeddings
        if self.length > limit:
            raise ValueError(
                f"window_length is {self.length}, but the source has {limit} positions: give --window_length {limit}"
            )
        calibration, report = arguments.calibration_text, arguments.report_text
        self.names = {"calibration": self._name(calibration), "report": self._name(report or calibration)}
        if report is None:
            self.names["report"] += ", another part"
            self._cut = [self._read(calibration, sum(self.counts))]
        else:
            self._cut = [self._read(calibration, self.counts[0]), self._read(report, self.counts[1])]

    def windows(self) -> tuple[Tensor, Tensor]:
        """(calibration windows, held-out windows), each (N, window_length) of token ids."""
        if len(self._cut) == 1:
            calibration, held_out = self._or_sampled(self._cut[0], sum(self.counts)).split(self.counts)
        else:
            calibration, held_out = map(self._or_sampled, self._cut, self.counts)
            if (calibration[:, None] == held_out[None]).all(-1).any():
                raise ValueError("report_text holds windows of calibration_text: take another part, as in FILE[100:]")
        return calibration, held_out

    @staticmethod
    def _name(text: str | None) -> str:
        return SAMPLED if text is None else Path(text).name

    def _read(self, text: str | None, num_windows: int) -> Tensor | None:
        if text is None:
            return None
        return text_windows(self.source.tokenizer, read_documents(text), self.length, num_windows)

    def _or_sampled(self, cut: Tensor | None, num_windows: int) -> Tensor:
        if cut is not None:
            return cut
        return sample_windows(self.source.model, self.source.tokenizer, num_windows, self.length, self.seed)
