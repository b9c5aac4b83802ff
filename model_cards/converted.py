"""Renders the card of a converted checkpoint from its report."""

from pathlib import Path

from .licence import licence_words
from .render import LICENCE, render, save_readme


def converted_card(
    title: str,
    place: str,
    report: dict,
    summary: list[tuple[str, str]],
    base_model: str | None,
    has_chat_template: bool,
) -> str:
    """The card as text; `summary` are (what, figure)."""
    source = report["source"]
    licence = {key: source.get(key) for key in LICENCE}
    fitted = [name for purpose, name in report["texts"].items() if purpose in ("calibration", "heal")]
    return render(
        "converted.md",
        title=title,
        place=place,
        source=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else source["name"],
        base_model=base_model,
        licence=licence,
        licence_words=licence_words(licence),
        fitted_to=list(dict.fromkeys(fitted)),
        quantization=source["quantization"],
        summary=summary,
        command=report["command"],
        healed=report["healing"] is not None,
        consent="" if report["command"] == "export" else ", trust_remote_code=True",
        has_picture=report["layers"] is not None,
        has_chat_template=has_chat_template,
    )


def save_converted_card(
    folder: Path, report: dict, summary: list[tuple[str, str]], base_model: str | None, former: Path
):
    """Writes README.md into a checkpoint's folder; what a user wrote into the one in `former` is kept."""
    name = Path(report["source"]["name"]).name.removesuffix(".gguf")
    has_chat_template = (folder / "chat_template.jinja").is_file()
    if report["command"] == "export":
        title, place = f"{name} as a plain Llama", f"your-name/{name}-plain"
    else:
        title, place = f"{name} with BHyT", f"your-name/{name}-BHyT"
    card = converted_card(title, place, report, summary, base_model, has_chat_template)
    save_readme(folder, card, former)
