"""Models on the Hugging Face Hub, through the Hub's own client: download one, or push one with the operator's token.

The token comes from the environment alone (`HF_TOKEN`), and no message has it. What an interrupted download has brought
stays in the Hub's cache, and the next call goes on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of httpx or httpx2, by the release
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from templar.agreement.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_PATTERN
from templar.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from templar.errors import PermanentError, Reason, TemplarError, TransientError, one_line
from templar.store.s3_protocol import require_proxies

TOKEN = "HF_TOKEN"  # noqa: S105 - the name of the variable
MODEL_FILES = (CONFIG_FILE, INDEX_FILE, WEIGHTS_PATTERN, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
"""All that is downloaded of a repository."""


def download_model(repository: str, revision: str | None = None, *, token: str | None = None) -> Path:
    """Download weights, configuration and tokenizer of a repository into the Hub's cache; their folder.

    `revision` is a branch, tag or commit, the default branch without one. Without a `token` the client has its own.

    Raises:
        PermanentError: `object_missing`, `access_denied`, `bad_parameters`, ...
        TransientError: `store_unreachable`, `store_busy`; a later call goes on.
    """
    with _translated(f"Hugging Face repository {repository}", token, rights="read it"):
        return Path(snapshot_download(repository, revision=revision, token=token, allow_patterns=list(MODEL_FILES)))


def open_pusher(token: str | None) -> HfApi:
    """The Hub's client with the operator's token; `bad_environment` without one, `access_denied` for a wrong one."""
    if not token:
        problem = f"{TOKEN} is not set: make a token that may write, and put it into the environment"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    hub = HfApi(token=token)
    with _translated("Hugging Face", token, rights="write"):
        hub.whoami()
    return hub


def push_model(hub: HfApi, repository: str, folder: Path, what: str) -> str:
    """Push the files of a folder to a repository in one commit with the message `what`; its address.

    A repository that is not there is made, and is private. Weights of an earlier model that the new one does not
    replace are deleted in the same commit: readers take every file of weights. So a reader sees one model, whole. After
    an error, as in `open_pusher`, the files of the repository are as they were.
    """
    with _translated(f"Hugging Face repository {repository}", hub.token, rights="write to it"):
        hub.create_repo(repository, private=True, exist_ok=True)
        names = {path.name for path in folder.iterdir() if path.is_file()}
        old = [
            name
            for name in hub.list_repo_files(repository)
            if name not in names and (name == INDEX_FILE or fnmatchcase(name, WEIGHTS_PATTERN))
        ]
        # Not `upload_folder`, which makes several commits of a large folder.
        hub.create_commit(
            repository,
            [
                *(CommitOperationAdd(name, folder / name) for name in sorted(names)),
                *(CommitOperationDelete(name) for name in old),
            ],
            commit_message=what,
        )
    return f"{hub.endpoint}/{repository}"


@contextmanager
def _translated(what: str, token: object, *, rights: str) -> Iterator[None]:
    """Give the errors of the Hub's client the project's families, in one line without the token."""
    require_proxies(os.environ)
    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        problem = one_line(" ".join(str(error).split()).replace(str(token or TOKEN), TOKEN))
        raise _error(error, what, rights, problem) from None


def _error(error: Exception, what: str, rights: str, problem: str) -> TemplarError:
    if isinstance(error, HfHubHTTPError):
        return _answer_error(error, what, rights, problem)
    if isinstance(error, HFValidationError):
        return PermanentError(Reason.BAD_PARAMETERS, f"{what}: {problem}; an id is NAME or USER/NAME")
    if isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError | HTTPError):
        return TransientError(
            Reason.STORE_UNREACHABLE, f"{what}: cannot be reached: {problem}; check the network, and try again"
        )
    return PermanentError(Reason.LOCAL_FILE, f"{what}: {problem}")


def _answer_error(error: HfHubHTTPError, what: str, rights: str, problem: str) -> TemplarError:
    """The error for an answer of the Hub; it answers 401 also for a private repository."""
    status = error.response.status_code
    missing = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
    if missing and not isinstance(error, GatedRepoError):
        kind = "revision" if isinstance(error, RevisionNotFoundError) else "repository"
        remedy = f"correct it, or set {TOKEN} to a token that may {rights}"
        return PermanentError(
            Reason.OBJECT_MISSING, f"{what}: there is no such {kind}, or it is private ({status}); {remedy}"
        )
    if status in (401, 403):
        return PermanentError(
            Reason.ACCESS_DENIED, f"{what}: refused ({status}); set {TOKEN} to a valid token that may {rights}"
        )
    if status == 429 or status >= 500:
        return TransientError(Reason.STORE_BUSY, f"{what}: the Hub answered {status}; try again later")
    return PermanentError(Reason.STORE_REFUSED, f"{what}: the Hub answered {status}: {problem}")
