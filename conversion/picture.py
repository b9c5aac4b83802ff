"""The report's picture: what lambda costs in either basis, and the variance of each layer before and after."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402


PICTURE = "conversion_report.png"


def has_picture(report: dict) -> bool:
    return report["layers"] is not None


def draw(report: dict, file: Path):
    curve = report["choice"]["curve"] if report["choice"] else []
    figure, axes = plt.subplots(1, 2 if curve else 1, figsize=(11 if curve else 5.5, 4), squeeze=False)
    _draw_layers(axes[0, -1], report["layers"])
    if curve:
        _draw_curve(axes[0, 0], curve, report)
    figure.tight_layout()
    # Without the time of drawing, the same report gives the same bytes
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_curve(axis, curve: list[dict], report: dict):
    for basis in sorted({row["basis"] for row in curve}):
        rows = [row for row in curve if row["basis"] == basis]
        axis.loglog([row["lambda"] for row in rows], [row["kl"] for row in rows], marker="o", label=f"{basis} basis")
    # Reports of version 0.1.0 do not hold it
    if target := report["choice"].get("target_nats_per_token"):
        axis.axhline(target, color="grey", linestyle="--", label="what the choice was allowed")
    axis.set(xlabel="lambda at every site", ylabel="predicted cost, nats a token", title="What lambda costs")
    axis.legend()


def _draw_layers(axis, layers: dict):
    for name, label in (("source", "source"), ("model", "this model")):
        rows = layers[name]
        axis.semilogy([row["layer"] for row in rows], [row["variance"] for row in rows], marker=".", label=label)
    axis.set(xlabel="layer", ylabel="variance of its output", title="Growth over depth")
    axis.legend()
