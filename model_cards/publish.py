"""Uploads a finished folder to the Hub."""

from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError


# What training leaves in a folder and nobody needs to load a model; training_args.bin may hold a token in clear
NOT_PUBLISHED = ["training_args.bin", "optimizer*", "scheduler*", "rng_state*", "checkpoint-*/**", "*.checkpoints/**"]


def publish(folder: Path, repository: str, private: bool) -> str:
    """Makes the repository where there is none, uploads the folder in one commit, and gives its address.

    The token comes from HF_TOKEN or `hf auth login`; none is ever an argument.

    Raises:
        ValueError: the Hub refuses, with what it said.
    """
    api = HfApi()
    # The card is checked before anything is uploaded: the Hub would refuse the commit for it at the very end
    ModelCard.load(folder / "README.md").validate()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=NOT_PUBLISHED,
            commit_message=f"Upload {folder.name}",
        )
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{repository} could not be uploaded to the Hub, {folder} is ready here: {reason}") from error
    return commit.repo_url.url if commit.repo_url else repository
