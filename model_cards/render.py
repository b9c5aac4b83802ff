"""Renders the card of a checkpoint from its report."""

from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import Environment, FileSystemLoader


def render_card(
    title: str,
    place: str,
    report: dict,
    summary: list[tuple[str, str]],
    base_model: str | None,
    has_chat_template: bool,
) -> str:
    """The card as text. Its front matter is parsed once, so that the Hub will not be the first to refuse it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True
    )
    # Values go into YAML as JSON strings, which are YAML too
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    source = report["source"]
    card = environment.get_template("template.md").render(
        title=title,
        place=place,
        source=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else source["name"],
        base_model=base_model,
        license=source["license"],
        quantization=source["quantization"],
        summary=summary,
        command=report["command"],
        healed=report["healing"] is not None,
        consent="" if report["command"] == "export" else ", trust_remote_code=True",
        has_picture=report["layers"] is not None,
        has_chat_template=has_chat_template,
    )
    assert ModelCard(card).data.library_name == "transformers"
    return card


def save_card(folder: Path, report: dict, summary: list[tuple[str, str]], base_model: str | None):
    """Writes README.md into a checkpoint's folder."""
    name = Path(report["source"]["name"]).name.removesuffix(".gguf")
    has_chat_template = (folder / "chat_template.jinja").is_file()
    if report["command"] == "export":
        title, place = f"{name} as a plain Llama", f"your-name/{name}-plain"
    else:
        title, place = f"{name} with BHyT", f"your-name/{name}-BHyT"
    card = render_card(title, place, report, summary, base_model, has_chat_template)
    (folder / "README.md").write_text(card, encoding="utf-8")
