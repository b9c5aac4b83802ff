"""Samples text from a model itself, where no other text was named."""

import math

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from evaluation.answers import own_settings_aside
from evaluation.perplexity import adds_bos, input_device


# Constants, so that the text depends on the seed and the number of tokens alone
DOCUMENT_LENGTH = 256
SAMPLED_TOGETHER = 32
TEMPERATURE = 1.0


class _Ticker(StoppingCriteria):
    """Advances a progress bar at every generated token, and stops nothing."""

    def __init__(self, progress: Progress, task):
        self.progress, self.task = progress, task

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        self.progress.advance(self.task)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def sample_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_windows: int, window_length: int, seed: int
) -> Tensor:
    """(num_windows, window_length) token ids sampled from the model itself.

    The text is written in documents of up to 256 tokens. Each starts where a document would: with BOS where the
    tokenizer puts one, else with the EOS that ends the document before. The EOS that the model writes is followed by
    its next document.
    """
    start = tokenizer.bos_token_id if adds_bos(tokenizer) else tokenizer.eos_token_id
    if start is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to start a sample with: give --calibration_text")
    torch.manual_seed(seed)
    length = min(DOCUMENT_LENGTH, window_length)
    num_documents = num_windows * math.ceil(window_length / length)
    chunks = [min(SAMPLED_TOGETHER, num_documents - done) for done in range(0, num_documents, SAMPLED_TOGETHER)]
    with own_settings_aside(model), Progress() as progress:
        task = progress.add_task("sampling text from the source", total=len(chunks) * (length - 1))
        ticker = StoppingCriteriaList([_Ticker(progress, task)])
        sampled = [
            model.generate(
                torch.full((rows, 1), start, device=input_device(model)),
                attention_mask=torch.ones(rows, 1, dtype=torch.long, device=input_device(model)),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length - 1,
                min_new_tokens=length - 1,
                eos_token_id=None,
                pad_token_id=start,
                stopping_criteria=ticker,
            )
            for rows in chunks
        ]
    return torch.cat(sampled).cpu().view(num_windows, -1)[:, :window_length]
