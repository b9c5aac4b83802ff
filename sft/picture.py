"""The run's picture: the losses, and what training did to the norms."""

from math import ceil
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402


COLUMNS = 3
PANELS = {
    "loss": ["loss", "eval_loss"],
    "lambda": ["norms/lambda_min", "norms/lambda_max"],
    "estimator's log error (largest)": ["norms/estimator_log_error_max"],
    "share of tanh beyond 0.99 (largest)": ["norms/saturated_share_max"],
    "depth bound": ["norms/depth_effective_max", "norms/depth_limit"],
}


def draw_training(history: list[dict], file: Path):
    """One panel for each group of PANELS that the log holds, over optimizer steps."""
    known = {key for entry in history for key in entry}
    panels = {title: [key for key in keys if key in known] for title, keys in PANELS.items()}
    panels = {title: keys for title, keys in panels.items() if keys}
    if not panels:
        return
    width = min(len(panels), COLUMNS)
    height = ceil(len(panels) / width)
    figure, axes = plt.subplots(height, width, figsize=(4.5 * width, 3.4 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, keys) in zip(axes.flat, panels.items()):
        for key in keys:
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            axis.plot(*zip(*points), marker=".", label=key.removeprefix("norms/").replace("_", " "))
        axis.set(xlabel="step", title=title)
        axis.ticklabel_format(useOffset=False)
        axis.legend()
    figure.tight_layout()
    # Without the time of drawing, the same run gives the same bytes
    figure.savefig(file, dpi=120, format="png", metadata={"Software": None})
    plt.close(figure)
