"""Fetch a model's files from the Hugging Face Hub, ready for convert_hf_checkpoint.py.

All files are of one commit, the one that the revision meant at the start. Each is written to a .partial, which an interrupted run
is resumed from, and gets its own name when its size and its checksum are those that the Hub lists. config.json comes last: a
folder without it is not a checkpoint, so half a download can't be converted. HF_TOKEN (or the token that `hf auth login` leaves)
goes to the Hub's own host alone; HF_ENDPOINT names another Hub.
"""

from __future__ import annotations

import email.utils
import fcntl
import hashlib
import http.client
import json
import os
import queue
import re
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import quote, urljoin, urlsplit

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from tqdm import tqdm

from errors import Parser, UserError, run_cli
from files import SIDE_FILES, check_room, read_json, write_json

T = TypeVar("T")

ROOT = Path("downloads")
RECORD = "download.json"  # in the folder: repository, commit, and the checksum of each file that is whole
INDEX = "model.safetensors.index.json"
PLAIN = re.compile(r"\w[\w.+-]*", re.ASCII)  # a file's name that can't lead out of a folder
CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
TRIES = 5  # in a row, none of which brought a file further
BACKOFF = 1.0  # seconds before the second try; twice as many before each further one
PATIENCE = 600.0  # the most seconds that a server may ask to wait


class NetworkFault(Exception):
    """What the network or the Hub did wrong: told in one line, exit status 1."""


class PassingFault(NetworkFault):
    """One that another try may not meet. ``wait``: the seconds that the server asks for; ``status``: HTTP's, where it has one."""

    def __init__(self, message: str, wait: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.wait, self.status = wait, status


class Stopped(Exception):
    """Ends a thread when the run ends early."""


@dataclass(frozen=True)
class File:
    """A file as the Hub lists it."""

    name: str
    size: int
    checksum: str  # 64 digits: the SHA-256 of the bytes. 40: git's SHA-1, of "blob", the size and the bytes

    def hasher(self) -> Any:
        return hashlib.sha256() if len(self.checksum) == 64 else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Answer(NamedTuple):
    """A page of JSON, and the address of the next one."""

    value: Any
    next: str | None


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: what must be the same for a token to be sent."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; what is sent to the Hub's host only is sent again where a redirect stays there."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("https", urlsplit(self.hub.endpoint).scheme):
            raise NetworkFault(f"{host(req.full_url)} redirects to {newurl.split(':')[0]}, which isn't https")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            self.hub.sign(request)
        return request


def host(url: str) -> str:
    """The part of an address that may be shown: what follows it can hold a signature."""
    return urlsplit(url).netloc.rpartition("@")[2]


class Hub:
    """One model repository on a Hub."""

    def __init__(self, endpoint: str, token: str | None, repository: str, revision: str) -> None:
        self.endpoint, self.token, self.repository, self.revision = endpoint, token, repository, revision
        self.api = f"{endpoint}/api/models/{repository}"
        self.opener = urllib.request.build_opener(Redirects(self))
        self.stop = threading.Event()

    def sign(self, request: urllib.request.Request) -> None:
        """Add the token where the request goes to the Hub itself. A redirect doesn't take such a header along."""
        if self.token and origin(request.full_url) == origin(self.endpoint):
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")

    def open(self, url: str, start: int = 0) -> http.client.HTTPResponse:
        """The answer to a request for the bytes from ``start`` on.

        Raises:
            UserError: the Hub refuses, and says why.
            PassingFault, NetworkFault: anything else that isn't an answer.
        """
        request = urllib.request.Request(url, headers={"User-Agent": "judge-decoding-download"})
        if start:
            request.add_header("Range", f"bytes={start}-")
        self.sign(request)
        try:
            return self.opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            raise self.refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise PassingFault(f"{host(url)}: {reason(error)}") from None
        except ValueError as error:  # an address that isn't one, from a redirect or a Link
            raise NetworkFault(f"{host(self.endpoint)} gives an address that can't be used: {error}") from None

    def refusal(self, error: urllib.error.HTTPError) -> UserError | NetworkFault:
        """What an HTTP status means here."""
        where, code, page = host(error.url), error.headers.get("X-Error-Code"), f"{self.endpoint}/{self.repository}"
        if error.code in (408, 416, 429) or error.code >= 500 or origin(error.url) != origin(self.endpoint):
            # Another host than the Hub's is asked with an address that is good for a while; a new try gets a new one.
            return PassingFault(f"{where} answers {error.code} {error.reason}", asked_wait(error.headers), error.code)
        if code == "GatedRepo" and not self.token:
            return UserError(f"{self.repository} is gated: accept its licence at {page}, then set HF_TOKEN to a token of yours")
        if code == "GatedRepo" or error.code == 403:
            return UserError(
                f"{self.repository} is not open to the account of HF_TOKEN: accept its licence at {page} (some are granted by "
                "hand), and see that the token may read gated repositories"
                if self.token
                else f"{where} forbids {self.repository} to those without a token: see {page}, then set HF_TOKEN"
            )
        if error.code == 401 and error.headers.get("X-Error-Message", "").startswith("Invalid credentials"):
            return UserError(f"{where} doesn't know the token in HF_TOKEN (or the one that was saved): make a new one, or unset it")
        if code == "RevisionNotFound":
            return UserError(f"{self.repository} has no revision {self.revision!r}; --revision takes a branch, a tag or a commit")
        if error.code == 401 or (error.code == 404 and code != "EntryNotFound"):
            also = "the token may not see it" if self.token else "it is private and needs HF_TOKEN"
            return UserError(
                f"{where} has no repository {self.repository} with revision {self.revision!r}: check the name; or {also}"
            )
        return NetworkFault(f"{where} answers {error.code} {error.reason} to {urlsplit(error.url).path}")

    def persist(self, attempt: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
        """Do what may meet a passing fault until it succeeds, or `TRIES` in a row have not got further than ``reached`` before.

        Raises:
            NetworkFault: they have not.
            Stopped: the run ended while this waited.
        """
        tries, best = 0, 0
        while True:
            try:
                return attempt()
            except PassingFault as fault:
                tries, best = (1 if reached() > best else tries + 1), max(best, reached())
                wait = BACKOFF * 2 ** (tries - 1) if fault.wait is None else fault.wait
                if tries == TRIES:
                    raise NetworkFault(f"{fault}; given up after {TRIES} tries") from None
                if wait > PATIENCE:
                    raise NetworkFault(f"{fault}, and asks to wait {wait:,.0f} seconds") from None
                tqdm.write(f"{fault}; again in {wait:.0f} s", file=sys.stderr)
                if self.stop.wait(wait):
                    raise Stopped from None

    def read(self, url: str) -> Answer:
        """A page of JSON."""

        def attempt() -> Answer:
            with self.open(url) as response:
                try:
                    data = response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise PassingFault(f"{host(url)}: {reason(error)}") from None
            try:
                following = re.search(r'<([^>]*)>\s*;[^,]*\brel="?next\b', response.headers.get("Link", ""))
                return Answer(json.loads(data), urljoin(url, following.group(1)) if following else None)
            except ValueError:
                raise NetworkFault(f"{host(url)} answers with something that isn't JSON; is it a Hub?") from None

        return self.persist(attempt)

    def commit(self) -> str:
        """The commit that the revision means now."""
        about = self.read(f"{self.api}/revision/{quote(self.revision, safe='')}").value
        with understood(self.endpoint):
            return checked("[0-9a-f]{40}", about["sha"])

    def files(self, commit: str) -> dict[str, File]:
        """The files in the repository's top folder, by name. Those further down are never weights that we read."""
        files: dict[str, File] = {}
        url: str | None = f"{self.api}/tree/{commit}"
        while url:
            page, url = self.read(url)
            with understood(self.endpoint):
                for row in page:
                    if row["type"] == "file" and PLAIN.fullmatch(row["path"]):
                        lfs = row.get("lfs")
                        checksum = checked("[0-9a-f]{64}", lfs["oid"]) if lfs else checked("[0-9a-f]{40}", row["oid"])
                        files[row["path"]] = File(row["path"], int(checked("[0-9]+", str(row["size"]))), checksum)
        return files

    def address(self, commit: str, name: str) -> str:
        return f"{self.endpoint}/{self.repository}/resolve/{commit}/{quote(name)}"

    def wanted(self, commit: str) -> list[File]:
        """The files that a conversion reads: the weights that the index names, or model*.safetensors; and what goes with them.

        Raises:
            UserError: the repository has no such weights, or no config.json.
        """
        files, at = self.files(commit), f"{self.repository} at revision {self.revision!r}"
        if INDEX in files:
            index = self.read(self.address(commit, INDEX)).value
            with understood(self.endpoint):
                weights = sorted(set(index["weight_map"].values()))
            absent = [name for name in weights if name not in files]
            if absent:
                raise UserError(f"{INDEX} of {self.repository} names {absent[0]!r}, which its top folder doesn't hold")
            weights.append(INDEX)
        else:
            weights = sorted(name for name in files if re.fullmatch(r"model.*\.safetensors", name))
        if not weights:
            other = [name for name in sorted(files) if name.endswith((".gguf", ".bin", ".pth", ".safetensors"))]
            hint = f" It has {other[0]}." if other else ""
            if other and other[0].endswith(".gguf"):
                hint += " scripts/convert_gguf.py reads a GGUF file."
            raise UserError(f"{at} has no model*.safetensors, and nothing else is read.{hint}")
        if "config.json" not in files:
            raise UserError(f"{at} has no config.json")
        side = [name for name in sorted(files) if name in SIDE_FILES or name.endswith(".tiktoken")]
        return [files[name] for name in (*side, *weights, "config.json")]


def reason(error: Exception) -> str:
    """What went wrong with a connection, in the system's words."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return f"no answer for {TIMEOUT:.0f} s"
    return (inner.strerror if isinstance(inner, OSError) else "") or str(inner) or type(inner).__name__


def asked_wait(headers: Message) -> float | None:
    """The seconds that an answer asks to wait: Retry-After in seconds or as a date, else the Hub's own RateLimit."""
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        return float(after)
    if after:
        with suppress(ValueError):
            return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    spent = re.search(r"\br=0\s*;\s*t=(\d+)", headers.get("RateLimit", ""))
    return float(spent.group(1)) if spent else None


def checked(pattern: str, text: Any) -> str:
    if not isinstance(text, str) or not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r} is neither a checksum nor a size")
    return text


@contextmanager
def understood(endpoint: str) -> Iterator[None]:
    """An answer of the Hub's in another form than expected is its fault, not ours."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NetworkFault(f"{host(endpoint)} answers in a form that isn't understood: {error!r}") from None


class Partial:
    """A file on its way: its bytes so far, and the hash of them.

    The checksum that the whole must have is in its name, so what another version of the file left is never gone on with.
    """

    def __init__(self, folder: Path, file: File, gained: Callable[[int], None]) -> None:
        self.file, self.gained, self.folder = file, gained, folder
        self.path = partial_path(folder, file)
        for other in folder.glob(f"{file.name}.{'[0-9a-f]' * 12}.partial"):
            if other != self.path:
                other.unlink()
        self.out = self.path.open("a+b", buffering=0)
        self.hasher, self.bytes, self.refused = file.hasher(), 0, 0

    def close(self) -> None:
        self.out.close()

    def recall(self, stop: threading.Event) -> None:
        """Hash what an earlier run left."""
        self.out.seek(0)
        while chunk := self.out.read(CHUNK):
            self.hasher.update(chunk)
            self.bytes += len(chunk)
            if stop.is_set():
                raise Stopped

    def append(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[self.out.write(rest) :]
        except OSError as error:
            raise UserError(f"{self.path} can't be written: {error.strerror}; run it again to go on from there") from None
        self.hasher.update(chunk)
        self.bytes += len(chunk)
        self.gained(len(chunk))

    def restart(self) -> None:
        self.out.truncate(0)
        self.gained(-self.bytes)
        self.hasher, self.bytes = self.file.hasher(), 0

    def attempt(self, hub: Hub, url: str) -> None:
        """Ask for what is missing, and give the file its name when it is whole."""
        if self.bytes < self.file.size:
            self.fetch(hub, url)
        if self.bytes < self.file.size:
            raise PassingFault(f"{self.file.name}: broken off after {self.bytes:,} of {self.file.size:,} bytes")
        if self.bytes > self.file.size or self.hasher.hexdigest() != self.file.checksum:
            self.restart()
            self.refused += 1
            fault = f"{self.file.name}: the bytes that came don't have the checksum that the Hub lists"
            if self.refused == 2:  # the first time the disk may have been to blame, or a cut in the wrong place
                self.path.unlink()
                raise NetworkFault(f"{fault}, twice; they are not kept")
            raise PassingFault(fault, 0.0)
        os.fsync(self.out.fileno())  # what has the name must be whole even if the machine goes down
        os.replace(self.path, self.folder / self.file.name)

    def fetch(self, hub: Hub, url: str) -> None:
        start = self.bytes
        try:
            response = hub.open(url, start)
        except PassingFault as fault:
            if fault.status == 416:  # the server's file ends before ours does
                self.restart()
            raise
        with response:
            if start and response.status != 206:
                self.restart()
            elif start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                self.restart()
                raise PassingFault(f"{self.file.name}: {host(response.url)} sends another range than it was asked for")
            while self.bytes <= self.file.size:
                if hub.stop.is_set():
                    raise Stopped
                try:
                    chunk = response.read1(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise PassingFault(f"{self.file.name}: {host(response.url)}: {reason(error)}") from None
                if not chunk:
                    return
                self.append(chunk)


def partial_path(folder: Path, file: File) -> Path:
    return folder / f"{file.name}.{file.checksum[:12]}.partial"


class Folder:
    """The folder of one repository, and the record in it of what is whole."""

    def __init__(self, path: Path, repository: str) -> None:
        self.path, self.lock = path, threading.Lock()
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {path} is a file; give a folder")
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
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another download writes to {self.path}; wait for it or choose another --out") from None
            except OSError:
                pass  # some network file systems know no such lock
            yield
        finally:
            os.close(handle)

    def begin(self, hub: Hub, commit: str) -> None:
        self.record = {"repository": hub.repository, "revision": hub.revision, "commit": commit}
        self.save()

    def save(self) -> None:
        write_json(self.path / RECORD, {**self.record, "files": self.sums})

    def note(self, file: File) -> None:
        """Record that a file is whole."""
        with self.lock:
            self.sums[file.name] = file.checksum
            self.save()

    def holds(self, file: File, verify: bool) -> bool:
        """Whether a file is there and whole. One of the right size that the record knows is believed unless ``verify``."""
        path = self.path / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if self.sums.get(file.name) == file.checksum and not verify:
            return True
        hasher = file.hasher()
        with path.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                hasher.update(chunk)
        if hasher.hexdigest() == file.checksum:
            self.sums[file.name] = file.checksum
            return True
        print(f"{path} doesn't have the checksum that the Hub lists, so it is fetched again", file=sys.stderr)
        return False

    def left_of(self, file: File) -> int:
        """Bytes that an earlier run left of a file."""
        partial = partial_path(self.path, file)
        return partial.stat().st_size if partial.is_file() else 0

    def forget(self, files: list[File]) -> None:
        """Remove what an earlier commit brought and this one doesn't have."""
        for name in self.sums.keys() - {file.name for file in files}:
            if PLAIN.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)
            del self.sums[name]


def download(hub: Hub, folder: Folder, connections: int = 4, verify: bool = False) -> None:
    """Fetch what a conversion of the repository needs into a folder, or what is missing of it.

    Raises:
        UserError: the Hub refuses, the repository lacks something, or the disk has no room.
        NetworkFault: the network, or the Hub, fails.
    """
    commit = hub.commit()
    files = hub.wanted(commit)
    with folder.held():
        folder.forget(files)
        missing = [file for file in files if not folder.holds(file, verify)]
        if missing and missing[-1] != files[-1]:
            missing.append(files[-1])  # config.json, which must not be there before all else is
        total, left = sum(file.size for file in missing), sum(map(folder.left_of, missing))
        check_room(folder.path, total - left)
        folder.begin(hub, commit)
        size = sum(file.size for file in files)
        print(
            f"{hub.repository} at commit {commit[:12]}: {len(files)} files, {size / 1e9:.2f} GB, {len(missing)} to fetch",
            file=sys.stderr,
        )
        if missing:
            (folder.path / missing[-1].name).unlink(missing_ok=True)
            with tqdm(total=total, initial=left, desc=folder.path.name, unit="B", unit_scale=True) as bar:
                fetch_all(hub, commit, missing[:-1], folder, connections, bar)
                fetch_all(hub, commit, missing[-1:], folder, 1, bar)


def fetch_all(hub: Hub, commit: str, files: list[File], folder: Folder, connections: int, bar: tqdm) -> None:
    """Fetch files, several at a time. When one fails the others stop, and what has come of them stays."""
    jobs: queue.SimpleQueue[File] = queue.SimpleQueue()
    ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    for file in files:
        jobs.put(file)

    def gained(n: int) -> None:
        with folder.lock:
            bar.update(n)

    def work() -> None:
        with suppress(queue.Empty):
            while not hub.stop.is_set():
                file = jobs.get_nowait()
                try:
                    with closing(Partial(folder.path, file, gained)) as partial:
                        partial.recall(hub.stop)
                        hub.persist(lambda: partial.attempt(hub, hub.address(commit, file.name)), lambda: partial.bytes)
                    folder.note(file)
                    ends.put(None)
                except BaseException as error:
                    ends.put(error)

    # Daemons: a run that is interrupted doesn't wait for a server that says nothing.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(connections, len(files)))]
    for thread in threads:
        thread.start()
    try:
        for _ in files:
            if (error := ends.get()) is not None:
                raise error
    except BaseException:
        hub.stop.set()
        end = time.monotonic() + 1
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        raise


def find_token() -> str | None:
    """HF_TOKEN, else the token that the Hub's own client has saved. Raises UserError where it can't be one, and doesn't show it."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    token, source = os.environ.get("HF_TOKEN", "").strip(), "HF_TOKEN"
    if not token and (home / "token").is_file():
        token, source = (home / "token").read_text(encoding="utf-8", errors="replace").strip(), str(home / "token")
    if token and not re.fullmatch(r"[!-~]+", token):
        raise UserError(f"{source} holds a space or another character that no token has")
    return token or None


def find_endpoint() -> str:
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    with suppress(ValueError):
        if urlsplit(endpoint).scheme in ("http", "https") and origin(endpoint)[1]:
            return endpoint
    raise UserError(f"HF_ENDPOINT is {endpoint!r}; it must be an address like https://huggingface.co")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("repository", help="model on the Hub, like meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--revision", default="main", metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: downloads/NAME of the repository)")
    parser.add_argument("--connections", type=int, default=4, metavar="N", help="files fetched at a time (default: 4)")
    parser.add_argument("--verify", action="store_true", help="hash files again that are there already, and mend what is damaged")
    args = parser.parse_args()
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", args.repository, re.ASCII):
        raise UserError(f"{args.repository!r} is no repository's name; give one like meta-llama/Llama-3.1-8B-Instruct")
    if not args.revision:
        raise UserError("--revision is empty; give a branch, a tag or a commit")
    if not 1 <= args.connections <= 64:
        raise UserError(f"--connections is {args.connections}; it must be 1 to 64")
    folder = Folder(args.out or ROOT / args.repository.rpartition("/")[2], args.repository)
    hub = Hub(find_endpoint(), find_token(), args.repository, args.revision)
    try:
        download(hub, folder, args.connections, args.verify)
    except NetworkFault as fault:
        print(f"error: {fault} (what has come is kept; run it again to go on)", file=sys.stderr)
        sys.exit(1)
    print(f"next: python convert_hf_checkpoint.py {shlex.quote(str(folder.path))}")


if __name__ == "__main__":
    run_cli(main)
