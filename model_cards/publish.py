"""Uploads a finished folder to the Hub: python -m model_cards.publish FOLDER NAME/MODEL [--private] [--revision R] [--dry_run]"""

import argparse
import json
import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from checkpoints.command_line import OneLineErrors, one_line_end

from .render import merge_card


# What training leaves in a folder and nobody needs to load a model. training_args.bin may hold a token in clear;
# run.json, before.json and an adapter's settings name folders of one machine
NOT_PUBLISHED = """training_args.bin optimizer* scheduler* rng_state* trainer_state.json checkpoint-*/** *.checkpoints/**
    global_step*/** pytorch_model_fsdp* adapter/** runs/** wandb/** run.json before.json .*""".split()
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
TEXTS = (".json", ".jsonl", ".jinja", ".md", ".txt", ".csv", ".yaml", ".yml", ".py", "")
LARGEST_FILE = 50_000_000_000
MEANINGS = {
    401: "the Hub does not know this token: set HF_TOKEN, or run `hf auth login`",
    403: "this token may not write there: it needs the right to write, and the name has to be yours",
    404: "there is no such repository or revision, or this token may not see it",
    409: "somebody else changed the repository meanwhile, or it is being made: try again",
    413: "a file is too large for the Hub: save smaller shards",
    429: "too many requests: wait a few minutes",
}


def files_to_publish(folder: Path) -> list[Path]:
    """What of a folder goes to the Hub, as paths inside it.

    Raises:
        ValueError: a file that may not go there: a token in it, a folder of this machine, or more than the Hub takes.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [Path(name) for name in filter_repo_objects(names, ignore_patterns=NOT_PUBLISHED)]
    if not any(file.name in ("config.json", "adapter_config.json") for file in files):
        raise ValueError(f"{folder} holds no checkpoint: name the folder of a finished model")
    for file in files:
        _check(folder / file, file)
    return files


def _check(path: Path, file: Path):
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{file} has {_size(path.stat().st_size)}, more than the Hub's 50 GB: save smaller shards")
    if path.suffix not in TEXTS:
        return
    content, token = path.read_bytes(), get_token()
    if TOKEN.search(content) or (token and len(token) > 8 and token.encode() in content):
        raise ValueError(f"{file} holds a token of the Hub: nothing was uploaded; take it out, and revoke it")
    if file.name == "adapter_config.json":
        base = json.loads(content).get("base_model_name_or_path")
        if base and Path(base).exists():
            raise ValueError(
                f"{file} names a folder of this machine ({base}) as its base: publish the base, and put its Hub name there; or "
                "publish the merged model"
            )


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


def destination(repository: str, private: bool = False, revision: str | None = None) -> str:
    """Where `publish` would upload to, in words.

    Raises:
        ValueError: a name that the Hub would not take.
    """
    check_repository(repository)
    return f"{repository}, {revision or 'main'} ({'private' if private else 'public'} if it has to be made)"


def plan(folder: Path, repository: str, private: bool = False, revision: str | None = None) -> str:
    """What `publish` would do: files and sizes. Asks nothing of the Hub.

    Raises:
        ValueError: a name that the Hub would not take, or what `files_to_publish` refuses.
    """
    place = destination(repository, private, revision)
    files = files_to_publish(folder)
    sizes = [(folder / file).stat().st_size for file in files]
    lines = [f"  {_size(size):>12}  {file}" for size, file in zip(sizes, files)]
    return "\n".join([f"would upload {len(files)} files, {_size(sum(sizes))}, to {place}:", *lines])


def check_repository(repository: str):
    """Raises ValueError for a name that the Hub would not take; asked before any work."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no name on the Hub, give name/model: {error}") from None


def publish(folder: Path, repository: str, private: bool = False, revision: str | None = None) -> str:
    """Makes repository and branch where there are none, uploads the folder in one commit, and gives its address.

    It can be repeated: what is already there is not sent again. What a user wrote into the card on the Hub is kept. The
    token comes from HF_TOKEN or `hf auth login`; none is ever an argument.

    Raises:
        ValueError: the Hub refuses or cannot be reached, and how to go on; or what `files_to_publish` refuses.
    """
    check_repository(repository)
    files = files_to_publish(folder)
    if not (folder / "README.md").is_file():
        raise ValueError(f"{folder} has no README.md: the Hub shows it as the model's card; write one")
    card = (folder / "README.md").read_text(encoding="utf-8")
    api = HfApi()
    try:
        # The Hub would refuse the commit for its card at the very end
        _validate(card, folder)
        created = api.create_repo(repository, private=private, exist_ok=True)
        if revision and revision != "main":
            api.create_branch(created.repo_id, branch=revision, exist_ok=True)
        merged = merge_card(card, _remote_card(api, created.repo_id, revision))
        operations = [
            CommitOperationAdd(str(file), merged.encode() if file.name == "README.md" else folder / file)
            for file in files
        ]
        commit = api.create_commit(
            created.repo_id, operations, commit_message=f"Upload {folder.resolve().name}", revision=revision
        )
    except (HTTPError, OSError) as error:
        again = publish_command(folder, repository, private, revision)
        raise ValueError(f"{repository}: {_reason(error)}; {folder} is ready here, and `{again}` goes on") from error
    return commit.repo_url.url if commit.repo_url else repository


def publish_command(folder: Path, repository: str, private: bool = False, revision: str | None = None) -> str:
    """What a user types to upload a folder (again)."""
    command = f"python -m model_cards.publish {folder} {repository}"
    return command + " --private" * private + (f" --revision {revision}" if revision else "")


def _validate(card: str, folder: Path):
    try:
        ModelCard(card).validate()
    except ValueError as error:
        raise ValueError(f"{folder}/README.md: the Hub refuses its front matter: {error}") from None


def _remote_card(api: HfApi, repository: str, revision: str | None) -> str | None:
    try:
        file = api.hf_hub_download(repository, "README.md", revision=revision)
    except (EntryNotFoundError, RevisionNotFoundError, RepositoryNotFoundError):
        return None
    return Path(file).read_text(encoding="utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        said = error.server_message or str(error).strip().splitlines()[0]
        return f"{MEANINGS.get(status, 'the Hub refused')} (HTTP {status}: {' '.join(said.split())})"
    if isinstance(error, LocalTokenNotFoundError):
        return MEANINGS[401]
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it to upload"
    return f"the connection to the Hub failed ({' '.join(str(error).split()) or type(error).__name__})"


class OneLineParser(OneLineErrors, argparse.ArgumentParser):
    pass


def main():
    parser = OneLineParser(
        prog="python -m model_cards.publish", description="Uploads a finished folder.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="the folder of a finished model")
    parser.add_argument("repository", help="where to: name/model")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it has to be made")
    parser.add_argument("--revision", help="the branch to upload to; main if left out")
    parser.add_argument("--dry_run", action="store_true", help="list files and sizes, upload nothing")
    with one_line_end(lambda: "what is on the Hub is not changed yet, or whole; the same command goes on"):
        arguments = parser.parse_args()
        act = plan if arguments.dry_run else publish
        print(act(arguments.folder, arguments.repository, arguments.private, arguments.revision))


if __name__ == "__main__":
    main()
