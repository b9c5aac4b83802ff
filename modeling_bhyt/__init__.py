# Copyright 2026 The bhyt authors. Licensed under the Apache License, Version 2.0.
"""Llama with Bounded Hyperbolic Tanh norms (BHyT, arXiv 2601.09719). Importing it registers the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_bhyt import BHyTLlamaConfig, DepthBound, __version__
from .modeling_bhyt import (
    BHyTLlamaForCausalLM,
    BHyTLlamaForQuestionAnswering,
    BHyTLlamaForSequenceClassification,
    BHyTLlamaForTokenClassification,
    BHyTLlamaModel,
    BHyTLlamaPreTrainedModel,
)
from .normalization_bhyt import BHyT, BHyTStar, DyT


AutoConfig.register(BHyTLlamaConfig.model_type, BHyTLlamaConfig)
BHyTLlamaConfig.register_for_auto_class()
for auto_class, model_class in {
    AutoModel: BHyTLlamaModel,
    AutoModelForCausalLM: BHyTLlamaForCausalLM,
    AutoModelForSequenceClassification: BHyTLlamaForSequenceClassification,
    AutoModelForTokenClassification: BHyTLlamaForTokenClassification,
    AutoModelForQuestionAnswering: BHyTLlamaForQuestionAnswering,
}.items():
    auto_class.register(BHyTLlamaConfig, model_class)
    # Saved folders then carry this code
    model_class.register_for_auto_class(auto_class.__name__)
del auto_class, model_class

__all__ = [
    "BHyT",
    "BHyTLlamaConfig",
    "BHyTLlamaForCausalLM",
    "BHyTLlamaForQuestionAnswering",
    "BHyTLlamaForSequenceClassification",
    "BHyTLlamaForTokenClassification",
    "BHyTLlamaModel",
    "BHyTLlamaPreTrainedModel",
    "BHyTStar",
    "DepthBound",
    "DyT",
    "__version__",
]
