"""Uploads a finished folder to the Hub: python -m model_cards.publish FOLDER NAME/MODEL [--license L] [--dry_run] ..."""

import argparse
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
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
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from checkpoints.command_line import OneLineErrors, one_line_end

from .licence import SAY_IT, check_flag
from .render import check_front_matter, merge_card, state_licence
from .validation import ask_the_hub


# What training leaves in a folder and nobody needs to load a model. training_args.bin may hold a token in clear;
# run.json, before.json and an adapter's settings name folders of one machine. Folders of version 0.1.0 hold windows in a file
# that vLLM takes for weights
NOT_PUBLISHED = """training_args.bin optimizer* scheduler* rng_state* trainer_state.json checkpoint-*/** *.checkpoints/**
    global_step*/** pytorch_model_fsdp* adapter/** runs/** wandb/** run.json before.json
    conversion_windows.safetensors .*""".split()
# What would be loaded in place of, or beside, the weights that are uploaded now
MODEL_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
ADAPTER = ("adapter_config.json", "adapter_model.*")
STALE_BESIDE_A_MODEL = (*MODEL_WEIGHTS, *ADAPTER, "conversion_windows.*")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
TEXTS = (".json", ".jsonl", ".jinja", ".md", ".txt", ".csv", ".yaml", ".yml", ".py", "")
LARGEST_FILE = 50_000_000_000
MEANINGS = {
    401: "the Hub does not know this token: set HF_TOKEN, or run `hf auth login`",
    403: "this token may not write there: it needs the right to write, and the name has to be yours",
    404: "there is no such repository or revision, or this token may not see it",
    412: "somebody else changed the repository meanwhile: try again",
    409: "somebody else changed the repository meanwhile, or it is being made: try again",
    413: "a file is too large for the Hub: save smaller shards",
    429: "too many requests: wait a few minutes",
}


def files_to_publish(folder: Path) -> list[Path]:
    """What of a folder goes to the Hub, as paths inside it.

    Raises:
        ValueError: a file that may not go there: a token in it, a folder of this machine, or more than the Hub takes.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in _files_in(folder))
    files = [Path(name) for name in filter_repo_objects(names, ignore_patterns=NOT_PUBLISHED)]
    if not any(file.name in ("config.json", "adapter_config.json") for file in files):
        raise ValueError(f"{folder} holds no checkpoint: name the folder of a finished model")
    for file in files:
        _check(folder / file, file)
    return files


def _files_in(folder: Path) -> Iterator[Path]:
    """Every file below a folder; unlike rglob it does not take a folder that may not be listed for an empty one."""

    def stop(error: OSError):
        raise error

    for place, folders, names in os.walk(folder, onerror=stop):
        folders.sort()
        yield from (path for name in names if (path := Path(place) / name).is_file())


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


def stale_files(there: Iterable[str], upload: Iterable[Path]) -> list[str]:
    """Files at the top of a repository that must go with an upload, lest users load older weights.

    A model with weights takes the place of any model and adapter there, an adapter that of another adapter. Subfolders,
    pickles, GGUF files and whatever else is there are not touched.
    """
    names = {file.as_posix() for file in upload}

    def holds(*patterns: str) -> bool:
        return any(_fits(name, patterns) for name in names)

    stale: tuple[str, ...] = STALE_BESIDE_A_MODEL if holds(*MODEL_WEIGHTS[:2], "pytorch_model*.bin") else ()
    stale += ADAPTER if holds("adapter_model.*") else ()
    return sorted(name for name in there if name not in names and _fits(name, stale))


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def destination(repository: str, private: bool = False, revision: str | None = None) -> str:
    """Where `publish` would upload to, in words.

    Raises:
        ValueError: a name that the Hub would not take.
    """
    check_repository(repository)
    return f"{repository}, {revision or 'main'} ({'private' if private else 'public'} if it has to be made)"


def plan(
    folder: Path, repository: str, private: bool = False, revision: str | None = None, licence: str | None = None
) -> str:
    """What `publish` would do: uploads with their sizes, and deletions, for which the Hub is asked. Changes nothing.

    Raises:
        ValueError: what `publish` would refuse before it asks the Hub.
    """
    place = destination(repository, private, revision)
    files = files_to_publish(folder)
    card_to_publish(folder, licence)
    sizes = [(folder / file).stat().st_size for file in files]
    lines = [f"  {_size(size):>12}  {file}" for size, file in zip(sizes, files)]
    lines = [f"would upload {len(files)} files, {_size(sum(sizes))}, to {place}:", *lines]
    try:
        stale = stale_files(_files_there(HfApi(), repository, revision or constants.DEFAULT_REVISION), files)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        lines.append("would delete nothing: there is no such repository or branch, or this token may not see it")
    except (HTTPError, OSError) as error:
        lines.append(f"could not look for older weights there, which the upload would delete: {_reason(error)}")
    else:
        lines.append(f"would delete {len(stale)} files there{':' if stale else ''}")
        lines += [f"  {name}" for name in stale]
    return "\n".join(lines)


def _files_there(api: HfApi, repository: str, revision: str) -> list[str]:
    """The files at the top of a repository."""
    return [entry.path for entry in api.list_repo_tree(repository, revision=revision) if isinstance(entry, RepoFile)]


def card_to_publish(folder: Path, licence: str | None = None) -> str:
    """A folder's card, with the licence that the user gave where it names none.

    Raises:
        ValueError: no card, one that cannot be read, one without a licence, or with another than the user gave.
    """
    file = folder / "README.md"
    check_flag(licence)
    if not file.is_file():
        raise ValueError(f"{folder} has no README.md: the Hub shows it as the model's card; write one")
    card = file.read_text(encoding="utf-8-sig")
    try:
        check_front_matter(card)
        card, stated = state_licence(card, {"license": licence})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if stated is None:
        raise ValueError(f"{file} names no licence: write `license:` into its front matter, or {SAY_IT}")
    if licence not in (None, stated):
        raise ValueError(
            f"--license {licence} contradicts {file}, which says {stated}: leave it out, or change the card"
        )
    return card


def check_repository(repository: str):
    """Raises ValueError for a name that the Hub would not take; asked before any work."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no name on the Hub, give name/model: {error}") from None


def publish(
    folder: Path, repository: str, private: bool = False, revision: str | None = None, licence: str | None = None
) -> str:
    """Makes repository and branch where there are none, uploads the folder in one commit, and gives its address.

    The same commit deletes what `stale_files` names, and is refused where somebody else committed since it was looked up.
    It can be repeated: what is already there is not sent again. What a user wrote into the card on the Hub is kept. The
    token comes from HF_TOKEN or `hf auth login`; none is ever an argument.

    Raises:
        ValueError: the Hub refuses or cannot be reached, and how to go on; or what `files_to_publish` and
            `card_to_publish` refuse.
    """
    check_repository(repository)
    files = files_to_publish(folder)
    card = card_to_publish(folder, licence)
    api = HfApi()
    try:
        # The Hub would refuse the commit for its card at the very end
        _validate(api, card, folder)
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision and revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        parent = api.model_info(name, revision=revision).sha
        assert parent is not None
        merged = _merged_with_remote(api, card, name, parent)
        stale = stale_files(_files_there(api, name, parent), files)
        operations = [
            *(CommitOperationDelete(path, is_folder=False) for path in stale),
            *(
                CommitOperationAdd(str(file), merged.encode() if file == Path("README.md") else folder / file)
                for file in files
            ),
        ]
        message = f"Upload {folder.resolve().name}"
        commit = api.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=parent)
    except (HTTPError, OSError) as error:
        again = publish_command(folder, repository, private, revision, licence)
        raise ValueError(f"{repository}: {_reason(error)}; {folder} is ready here, and `{again}` goes on") from error
    if stale:
        print(f"deleted there, as older weights: {', '.join(stale)}")
    return commit.repo_url.url if commit.repo_url else repository


def publish_command(
    folder: Path, repository: str, private: bool = False, revision: str | None = None, licence: str | None = None
) -> str:
    """What a user types to upload a folder (again)."""
    words = ["python", "-m", "model_cards.publish", str(folder), repository, *["--private"] * private]
    words += ["--revision", revision] if revision else []
    return shlex.join([*words, "--license", licence] if licence else words)


def _validate(api: HfApi, card: str, folder: Path):
    try:
        ask_the_hub(card, api.endpoint)
    except ValueError as error:
        raise ValueError(f"{folder}/README.md: {error}") from error


def _merged_with_remote(api: HfApi, card: str, repository: str, revision: str) -> str:
    """The card with what a user wrote into the one on the Hub."""
    try:
        file = api.hf_hub_download(repository, "README.md", revision=revision)
    except EntryNotFoundError:
        return card
    try:
        return merge_card(card, Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(
            f"{repository}: its README.md on the Hub would be kept, but {error}: mend it there"
        ) from error


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
    parser.add_argument(
        "--license", help="the licence of the model, where its card names none; unknown if nobody knows"
    )
    parser.add_argument("--dry_run", action="store_true", help="list uploads and deletions, change nothing")
    with one_line_end(lambda: "what is on the Hub is not changed yet, or whole; the same command goes on"):
        arguments = parser.parse_args()
        act = plan if arguments.dry_run else publish
        print(act(arguments.folder, arguments.repository, arguments.private, arguments.revision, arguments.license))


if __name__ == "__main__":
    main()
