"""Renders the card of a fine-tuned checkpoint from its results."""

from collections.abc import Sequence
from pathlib import Path

from checkpoints.names import HUB_ID

from .licence import licence_words
from .render import LICENCE, render, save_readme


def fine_tuned_card(
    results: dict, rows: Sequence[tuple[str, ...]], title: str, has_picture: bool, is_adapter: bool = False
) -> str:
    """The card as text; `rows` are (what, before, after, change); `is_adapter` for one that is not merged."""
    base, data = results["base"], results["data"]["data"]
    is_bhyt = base["norm_type"] is not None
    on_hub = bool(HUB_ID.fullmatch(base["name"]))
    return render(
        "fine_tuned.md",
        title=title,
        place=f"your-name/{title}",
        source=f"[{base['name']}](https://huggingface.co/{base['name']})" if on_hub else base["name"],
        base=base,
        licence={key: base[key] for key in LICENCE},
        licence_words=licence_words(base),
        data_licences=[(part["name"], part["license"]) for part in results["data"].values()],
        has_perplexity=bool(results["before"]["perplexity"]),
        # Results of version 0.1.0 have none
        held_out=[
            (name, cut["protocol"]) for name, cut in results["before"]["perplexity"].items() if "protocol" in cut
        ],
        base_model=base["name"] if on_hub else None,
        datasets=[part["hub_id"] for part in results["data"].values() if part["hub_id"]],
        tags=["sft", "trl", *(["bhyt", "custom_code"] if is_bhyt else [])],
        is_bhyt=is_bhyt,
        is_adapter=is_adapter,
        consent=", trust_remote_code=True" if is_bhyt else "",
        data=data,
        training=results["training"],
        chat=results["chat"],
        recipe=results["recipe"],
        versions=results["versions"],
        rows=rows,
        answers=list(zip(results["before"]["answers"], results["after"]["answers"])),
        has_picture=has_picture,
    )


def save_fine_tuned_card(folder: Path, results: dict, rows: Sequence[tuple[str, ...]]):
    """Writes README.md into a fine-tuned checkpoint's folder."""
    has_picture, is_adapter = ((folder / name).is_file() for name in ("training_log.png", "adapter_config.json"))
    save_readme(folder, fine_tuned_card(results, rows, folder.resolve().name, has_picture, is_adapter))
