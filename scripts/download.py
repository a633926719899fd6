"""Fetch a model's files from the Hugging Face Hub, ready for convert_hf_checkpoint.py.

All files are of one commit, the one that the revision means at the start. Each is written to a .partial, which an interrupted run
goes on with, and gets its own name when it has the checksum that the Hub lists. config.json comes last: a folder without it is not
a checkpoint, so half a download can't be converted. HF_TOKEN (or the token that `hf auth login` leaves) is sent to the Hub's own
host alone; HF_ENDPOINT names another Hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # else the Hub is first asked for a list of what may be calling it

from httpx2 import ReadError
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, validate_repo_id
from huggingface_hub.utils.sha import git_hash
from tqdm import tqdm

from files import SIDE_FILES, check_room, hold, read_json, write_json

ROOT = Path("downloads")
RECORD = "download.json"  # in the folder: repository, commit, and the checksum of each file that is whole
INDEX = "model.safetensors.index.json"
PLAIN = re.compile(r"\w[\w.+-]*", re.ASCII)  # a file's name that can't lead out of a folder
TIMEOUT = 30.0  # seconds that the list of files may take
WAITS = (1, 2, 4, 8)  # seconds before each further try where the Hub itself fails


class NetworkFault(Exception):
    """What the network or the Hub did wrong: told in one line, exit status 1."""


class File(NamedTuple):
    """A file as the Hub lists it."""

    name: str
    size: int
    checksum: str  # 64 digits: the SHA-256 of the bytes. 40: git's SHA-1 of them

    def is_at(self, path: Path) -> bool:
        """Whether a path holds this file, whole."""
        with path.open("rb") as opened:
            if len(self.checksum) == 64:
                return hashlib.file_digest(opened, "sha256").hexdigest() == self.checksum
            return git_hash(opened.read()) == self.checksum


def patiently(attempt: Callable[[], Any]) -> Any:
    """What ``attempt`` gives, tried again where a server says that it fails (5xx) or cuts the connection. All else that may pass
    huggingface_hub waits out.
    """
    for wait in WAITS:
        try:
            return attempt()
        except (hub_errors.HfHubHTTPError, ReadError) as error:
            if isinstance(error, hub_errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            tqdm.write(f"{describe(error)}; again in {wait} s", file=sys.stderr)
        time.sleep(wait)
    return attempt()


def describe(error: Exception) -> str:
    """What went wrong on the network. Of an address only the host is told: the rest can hold a signature."""
    if isinstance(error, hub_errors.HfHubHTTPError):
        return f"{error.response.url.host} answers {error.response.status_code} {error.response.reason_phrase}"
    return f"{constants.ENDPOINT} can't be reached: {str(error) or type(error).__name__}"


def listing(repository: str, revision: str) -> tuple[str, dict[str, File]]:
    """The commit that a revision means now, and the files in its top folder. Those further down are never weights that we read."""
    try:
        info = patiently(lambda: HfApi().model_info(repository, revision=revision, timeout=TIMEOUT, files_metadata=True))
        files = {}
        for row in [row for row in info.siblings or [] if PLAIN.fullmatch(row.rfilename)]:
            file = File(row.rfilename, int(row.size or 0), str(row.lfs.sha256 if row.lfs else row.blob_id))
            if file.size < 0 or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", file.checksum):
                raise ValueError
            files[file.name] = file
        commit = info.sha or ""
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, hub_errors.HTTPError):  # a BadRequestError is a ValueError too
            raise
        raise NetworkFault(f"{constants.ENDPOINT} answers in a form that isn't understood; is it a Hub?") from None
    return commit, files


def wanted(files: dict[str, File], at: str) -> list[File]:
    """What a conversion reads: the weights and what goes with them, config.json last. Raises UserError where there is none."""
    # with an index the shards are the weights: a model.safetensors beside them would be the same again
    kind = r"model-.*\.safetensors" if INDEX in files else r"model.*\.safetensors"
    weights = sorted(name for name in files if re.fullmatch(kind, name))
    if not weights:
        other = [name for name in sorted(files) if name.endswith((".gguf", ".bin", ".pth", ".safetensors"))]
        hint = f" It has {other[0]}." if other else ""
        if other and other[0].endswith(".gguf"):
            hint += " scripts/convert_gguf.py reads a GGUF file."
        raise UserError(f"{at} has no model*.safetensors, and nothing else is read.{hint}")
    for name in weights:
        if files[name].size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise UserError(f"{name} of {at} has {files[name].size / 1e9:.0f} GB, too much for HTTP; take `hf download`")
    if "config.json" not in files:
        raise UserError(f"{at} has no config.json")
    side = [name for name in sorted(files) if name in (*SIDE_FILES, INDEX) or name.endswith(".tiktoken")]
    return [files[name] for name in (*side, *weights, "config.json")]


class Folder:
    """Where the files lie, and the record of what is whole. Raises UserError where it holds something else."""

    def __init__(self, path: Path, repository: str) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; choose another --out")
        self.record = read_json(path / RECORD, missing_ok=True)
        if path.is_dir() and not self.record and any(path.iterdir()):
            raise UserError(f"{path} holds files that were not fetched by this command; choose another --out")
        if self.record.get("repository", repository) != repository:
            raise UserError(f"{path} holds files of {self.record['repository']}; choose another --out")
        sums = self.record.get("files")
        self.sums: dict[str, str] = dict(sums) if isinstance(sums, dict) else {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a second run from writing to the same files."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = hold(self.path)
        try:
            yield
        finally:
            os.close(handle)

    def save(self) -> None:
        write_json(self.path / RECORD, {**self.record, "files": self.sums})

    def holds(self, file: File, verify: bool) -> bool:
        """Whether a file is there and whole. One of the right size that the record knows is believed unless ``verify``."""
        path = self.path / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if (self.sums.get(file.name) != file.checksum or verify) and not file.is_at(path):
            print(f"{path} doesn't have the checksum that the Hub lists, so it is fetched again", file=sys.stderr)
            return False
        self.sums[file.name] = file.checksum
        return True

    def partial(self, file: File) -> Path:
        """Where a file is on its way. What another version of it left has another name, and is never gone on with."""
        return self.path / f"{file.name}.{file.checksum[:12]}.partial"

    def left_of(self, file: File) -> int:
        """Bytes that an earlier run left of a file."""
        partial = self.partial(file)
        return partial.stat().st_size if partial.is_file() else 0

    def tidy(self, files: list[File]) -> None:
        """Remove what an earlier commit brought and this one doesn't have, and what can't be gone on with."""
        for name in self.sums.keys() - {file.name for file in files}:
            (self.path / Path(name).name).unlink(missing_ok=True)
            del self.sums[name]
        for partial in set(self.path.glob("*.partial")) - {self.partial(f) for f in files if self.left_of(f) <= f.size}:
            if partial.is_file():
                partial.unlink()

    def fetch(self, file: File, url: str, bar: tqdm) -> File:
        """Get what is missing of a file, and give it its name when it is whole. Raises UserError where it can't be written.

        Over plain HTTP: by xet huggingface_hub would begin a file that was broken off anew, and a shard can have 5 GB.
        """
        partial = self.partial(file)
        for _ in range(2):  # what an earlier run left may be damaged
            try:
                with partial.open("ab") as out:
                    patiently(lambda: self.get(file, url, out, bar))
                    os.fsync(out.fileno())  # what has the name must be whole even if the machine goes down
            except OSError as error:
                if isinstance(error, hub_errors.HTTPError):
                    raise
                if error.errno is not None:  # else it is http_get's own: more bytes or fewer came than are listed
                    raise UserError(f"{partial} can't be written: {error.strerror}; run it again to go on from there") from None
            if file.is_at(partial):
                os.replace(partial, self.path / file.name)
                return file
            bar.update(-self.left_of(file))
            partial.unlink()
        raise NetworkFault(f"{file.name}: the bytes that came don't have the checksum that the Hub lists; they are not kept")

    def get(self, file: File, url: str, out: BinaryIO, bar: tqdm) -> None:
        had = out.tell()

        @contextmanager
        def of_all(initial: int, **_: object) -> Iterator[tqdm]:
            bar.update(initial - had)  # the server may have begun anew
            yield bar

        as_class: Any = of_all  # http_get only calls it
        http_get(url, out, resume_size=had, headers=build_hf_headers(), expected_size=file.size, tqdm_class=as_class)


def download(repository: str, revision: str, folder: Folder, connections: int, verify: bool) -> None:
    """Fetch what a conversion of the repository needs into a folder, or what is missing of it."""
    commit, listed = listing(repository, revision)
    files = wanted(listed, f"{repository} at revision {revision!r}")

    def fetch(file: File) -> File:
        return folder.fetch(file, hf_hub_url(repository, file.name, revision=commit), bar)

    with folder.held():
        folder.tidy(files)
        missing = [file for file in files if not folder.holds(file, verify)]
        if missing and missing[-1] != files[-1]:
            missing.append(files[-1])  # config.json, which must not be there before all else is
        total, left = sum(file.size for file in missing), sum(map(folder.left_of, missing))
        check_room(folder.path, total - left)
        folder.record = {"repository": repository, "revision": revision, "commit": commit}
        folder.save()
        size = sum(file.size for file in files) / 1e9
        print(f"{repository} at commit {commit[:12]}: {len(files)} files, {size:.2f} GB, {len(missing)} to fetch", file=sys.stderr)
        if not missing:
            return
        (folder.path / missing[-1].name).unlink(missing_ok=True)
        # The pool's threads are daemons: a run that is interrupted doesn't wait for a server that says nothing.
        with (
            tqdm(total=total, initial=left, desc=folder.path.name, unit="B", unit_scale=True, disable=None) as bar,
            ThreadPool(connections) as pool,
        ):
            for part in (missing[:-1], missing[-1:]):
                for file in pool.imap_unordered(fetch, part):
                    folder.sums[file.name] = file.checksum
                    folder.save()


def plainly(error: Exception, repository: str, revision: str) -> str:
    """What an error comes to, in one line. Raises it as a UserError where the user can mend it."""
    token, page = bool(get_token()), f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, NetworkFault):
        return str(error)
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be fetched; unset it")
    if not isinstance(error, hub_errors.HfHubHTTPError):
        return describe(error)
    where, status = error.response.url.host, error.response.status_code
    if isinstance(error, hub_errors.RevisionNotFoundError):
        raise UserError(f"{repository} has no revision {revision!r}; --revision takes a branch, a tag or a commit")
    if isinstance(error, hub_errors.GatedRepoError) or (status == 403 and repository in error.response.url.path):
        then = "and see that HF_TOKEN is of an account that may read it" if token else "then set HF_TOKEN to a token of yours"
        raise UserError(f"{repository} is gated: accept its licence at {page} (some are granted by hand), {then}")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        also = "the token may not see it" if token else "it is private and needs HF_TOKEN"
        raise UserError(f"{where} has no repository {repository}: check the name; or {also}")
    if status == 401:
        raise UserError(f"{where} doesn't know the token in HF_TOKEN (or the one that was saved): make a new one, or unset it")
    return describe(error)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("repository", help="model on the Hub, owner/name, like meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--revision", default="main", metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: downloads/NAME of the repository)")
    parser.add_argument("--connections", type=int, default=4, metavar="N", help="files fetched at a time (default: 4)")
    parser.add_argument("--verify", action="store_true", help="hash files again that are there already, and mend what is damaged")
    args = parser.parse_args()
    try:
        validate_repo_id(args.repository)
        _, name = args.repository.split("/")
    except ValueError:
        raise UserError(f"{args.repository!r} is no model's name; give owner/name, like meta-llama/Llama-3.1-8B-Instruct") from None
    if not args.revision:
        raise UserError("--revision is empty; give a branch, a tag or a commit")
    if not 1 <= args.connections <= 64:
        raise UserError(f"--connections is {args.connections}; it must be 1 to 64")
    if not re.fullmatch(r"https?://[\w.-]+(:\d+)?(/.*)?", constants.ENDPOINT):
        raise UserError(f"HF_ENDPOINT is {constants.ENDPOINT!r}; it must be an address like https://huggingface.co")
    if not re.fullmatch(r"[!-~]*", get_token() or ""):
        raise UserError("HF_TOKEN (or the token that was saved) holds a space or another character that no token has")
    folder = Folder(args.out or ROOT / name, args.repository)
    try:
        download(args.repository, args.revision, folder, args.connections, args.verify)
    except (NetworkFault, hub_errors.HTTPError, hub_errors.OfflineModeIsEnabled) as error:
        line = " ".join(plainly(error, args.repository, args.revision).split())
        print(f"error: {line} (what has come is kept; run it again to go on)", file=sys.stderr)
        sys.exit(1)
    print(f"next: python convert_hf_checkpoint.py {shlex.quote(str(folder.path))}")


if __name__ == "__main__":
    run_cli(main)
