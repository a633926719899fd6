"""Serve the engine as OpenAI's API does: /v1/chat/completions and /v1/completions, streaming or whole, /v1/models and /health.

One text is decoded at a time; a few requests may wait, and those beyond are told to come again. It listens on this machine alone
unless --host says otherwise; there is no password. The main thread decodes, another one speaks HTTP. Under torchrun rank 0 listens
and every rank decodes.

    pip install -r requirements-serve.txt
    python scripts/serve.py --target 8B --draft 1B --judge head.pt
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from errors import Parser, UserError, quiet_start, run_cli

quiet_start(__name__)

import checkpoint
from engine import RULE, STANDARD, Generation
from linear import MODES
from llm import LLM, Options, Piece
from tp import Ranks, default_device, ranks_of, told

OPTIONS = {field.name: field.name for field in dataclasses.fields(Options) if field.name != "raw"}  # what a request may set
OPTIONS |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
READ = ("model", "messages", "prompt", "stream", "stream_options")
# of OpenAI's fields: the values that ask for nothing; any other is refused, for an answer that ignored it would be wrong
NOTHING: dict[str, tuple] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "suffix": ("",),
    "response_format": ({"type": "text"},), "functions": ([],), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")  # they say nothing of the text


class Refused(Exception):
    """A request that can't be served: an HTTP status, and a line that says why."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 429 else "server_error" if self.status >= 500 else "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


@dataclass(eq=False)
class Job:
    """A text to decode, and the way back to who asked: pieces, then the whole generation or what went wrong."""

    ids: list[int]
    options: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    ended: Callable[[Job], None]  # called in the loop when the job is over
    came: asyncio.Queue[Piece | Generation | Exception] = field(default_factory=asyncio.Queue)
    left: threading.Event = field(default_factory=threading.Event)  # nobody waits any more

    def send(self, item: Piece | Generation | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is shutting down
            self.loop.call_soon_threadsafe(self.came.put_nowait, item)
            if not isinstance(item, Piece):
                self.loop.call_soon_threadsafe(self.ended, self)

    async def items(self) -> AsyncIterator[Piece | Generation]:
        """What comes of it, the generation last. Raises what went wrong."""
        while True:
            item = await self.came.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, Generation):
                return


def options_from(body: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A request's options by the names of ``Options``, which says what they may be. Raises Refused for fields that can't be
    honoured."""
    found = dict(defaults)
    for name, value in body.items():
        if name in OPTIONS and value is not None:
            own = OPTIONS[name]
            if own == "stop":
                value = [value] if isinstance(value, str) else value
                if not isinstance(value, list) or len(value) > 16 or not all(isinstance(text, str) for text in value):
                    raise Refused(400, "stop must be a text or at most 16 of them")
            found[own] = value
        elif name in NOTHING:
            if value is not None and value not in NOTHING[name]:
                raise Refused(400, f"{name} isn't supported; leave it out")
        elif name not in (*READ, *IGNORED, *OPTIONS):
            raise Refused(400, f"there is no field {name!r}")
    if found.get("temperature", 0) == 0:  # OpenAI's clients send a top_p that greedy decoding has no use for
        found.pop("top_p", None)
    return found


def message_from(value: Any) -> dict[str, str]:
    """A message with its text in one piece. Raises Refused for anything but text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refused(400, "each of messages must be an object with a role and a content")
    content = value.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
        content = "".join(texts) if len(texts) == len(content) and all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise Refused(400, "a message's content must be text")
    return {"role": value["role"], "content": content}


class Service:
    """Reads requests, queues jobs, and puts answers in OpenAI's words."""

    def __init__(self, llm: LLM, name: str, defaults: dict[str, Any], waiting: int, max_bytes: int) -> None:
        self.llm, self.name, self.defaults, self.max_bytes = llm, name, defaults, max_bytes
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.room = waiting + 1  # the one being decoded, and those that wait
        self.under_way: list[Job] = []
        self.began = int(time.time())

    async def body_of(self, request: Any) -> dict[str, Any]:
        """The request's JSON object, read no further than the limit."""
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise Refused(415, "the content-type must be application/json")
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > self.max_bytes:
                raise Refused(413, f"the request is larger than {self.max_bytes} bytes")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise Refused(400, "the request is no JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the request must be a JSON object")
        return body

    def job_of(self, body: dict[str, Any], chat: bool) -> Job:
        """The job that a request asks for. Raises Refused for what can't be done."""
        if body.get("model") not in (None, self.name):
            raise Refused(404, f"the model here is {self.name!r}, not {body['model']!r}", "model_not_found")
        options = options_from(body, self.defaults)
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise Refused(400, "messages must be a list of at least one message")
            prompt: Any = [message_from(value) for value in messages]
        else:
            prompt, options["raw"] = body.get("prompt"), True
            is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
            if not isinstance(prompt, str) and not is_ids:
                raise Refused(400, "prompt must be a text or a list of token ids")
        try:
            ids = self.llm.encode(prompt, **{"max_new_tokens": 1, **options})
            options.setdefault("max_new_tokens", self.llm.context - len(ids))  # as much as there is room for
            self.llm.settled(Options(**options))
        except UserError as error:
            message = str(error)
            for name in body:  # a client calls `max_new_tokens` by OpenAI's name
                message = message.replace(f"`{OPTIONS.get(name)}`", f"`{name}`")
            raise Refused(400, message, "context_length_exceeded" if "the context is" in message else None) from None
        return Job(ids, options, asyncio.get_running_loop(), self._ended)

    def _ended(self, job: Job) -> None:
        if job in self.under_way:
            self.under_way.remove(job)

    def close(self) -> None:
        """Tell everyone who waits that nothing more comes."""
        for job in list(self.under_way):
            job.send(Refused(503, "the server is shutting down"))

    def admit(self, job: Job) -> None:
        """Queue a job. Raises Refused when too many wait."""
        if len(self.under_way) >= self.room:
            raise Refused(429, f"{len(self.under_way)} requests are under way already; try again later", "queue_full")
        self.under_way.append(job)
        self.jobs.put(job)

    def head(self, chat: bool, streamed: bool) -> dict[str, Any]:
        """The fields that an answer, or each part of a streamed one, begins with."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if chat else "text_completion"
        return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
                "model": self.name}  # fmt: skip

    def usage(self, job: Job, run: Generation) -> dict[str, int]:
        n, new = len(job.ids), len(run.tokens)
        return {"prompt_tokens": n, "completion_tokens": new, "total_tokens": n + new}

    def figures(self, run: Generation) -> dict[str, Any]:
        """What the engine measured, under a name of its own."""
        by = {"standard": run.accepted(STANDARD), "judge": run.accepted(RULE)}
        rounds = len(run.rounds)
        return {"tokens_per_s": run.tokens_per_s if rounds else None, "prefill_s": run.prefill_s, "rounds": rounds,
                "mean_accepted": run.mean_accepted if rounds else None, "accepted_by": by}  # fmt: skip

    async def whole(self, request: Any, job: Job, chat: bool) -> dict[str, Any]:
        """The answer as one object. Raises Refused when the client hangs up."""
        try:
            async for item in job.items():
                if isinstance(item, Generation):
                    own: dict[str, Any] = {"message": {"role": "assistant", "content": item.text}} if chat else {"text": item.text}
                    choice = {"index": 0, **own, "logprobs": None, "finish_reason": item.finish_reason}
                    return {**self.head(chat, False), "choices": [choice], "usage": self.usage(job, item),
                            "judge_decoding": self.figures(item)}  # fmt: skip
                if await request.is_disconnected():
                    break
            raise Refused(499, "the client hung up")
        finally:
            job.left.set()

    async def events(self, job: Job, chat: bool, usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        head = self.head(chat, True)

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

        def choice(text: str, finish: str | None = None, first: bool = False) -> dict[str, Any]:
            delta = {"delta": {**({"role": "assistant"} if first else {}), **({"content": text} if text else {})}}
            return {"index": 0, **(delta if chat else {"text": text}), "logprobs": None, "finish_reason": finish}

        try:
            if chat:
                yield event([choice("", first=True)])
            async for item in job.items():
                if isinstance(item, Piece):
                    yield event([choice(item.text)])
                    continue
                yield event([choice("", item.finish_reason)], judge_decoding=self.figures(item))
                if usage:
                    yield event([], usage=self.usage(job, item))
        except Exception as error:  # the answer has begun, so no status can tell
            yield f"data: {json.dumps(Refused(500, f'the answer failed: {error}').body())}\n\n"
        finally:
            job.left.set()
        yield "data: [DONE]\n\n"

    async def complete(self, request: Any, chat: bool) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            body = await self.body_of(request)
            job = self.job_of(body, chat)
            self.admit(job)
            if not body.get("stream"):
                return JSONResponse(await self.whole(request, job, chat))
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return StreamingResponse(self.events(job, chat, usage), media_type="text/event-stream")
        except Refused as refused:
            headers = {"retry-after": "1"} if refused.status == 429 else None
            return JSONResponse(refused.body(), refused.status, headers)

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def chat(request: Any) -> Any:
            return await self.complete(request, True)

        async def text(request: Any) -> Any:
            return await self.complete(request, False)

        async def models(request: Any) -> Any:
            model = {"id": self.name, "object": "model", "created": self.began, "owned_by": "local"}
            return JSONResponse({"object": "list", "data": [model]})

        async def health(request: Any) -> Any:
            return JSONResponse({"status": "ok", "under_way": len(self.under_way)})

        async def failed(request: Any, error: Exception) -> Any:
            return JSONResponse(Refused(500, "the server failed; its log says how").body(), 500)

        async def unknown(request: Any, error: Any) -> Any:
            ways = "POST /v1/chat/completions and /v1/completions, GET /v1/models and /health"
            refused = Refused(error.status_code, f"{request.method} {request.url.path} isn't served; {ways} are")
            return JSONResponse(refused.body(), error.status_code, headers=error.headers)

        routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/completions", text, methods=["POST"]),
                  Route("/v1/models", models), Route("/health", health)]  # fmt: skip
        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown, Exception: failed})


def work(llm: LLM, ranks: Ranks, jobs: queue.Queue[Job | None]) -> None:
    """Decode one job after another, as one of the ranks, until rank 0 gets None in place of one."""
    while True:
        job = jobs.get() if ranks.rank == 0 else None
        while job is not None and job.left.is_set():  # who waited has hung up
            job.send(Refused(499, "the client hung up"))
            job = jobs.get()
        asked = told(lambda: None if job is None else (job.ids, job.options))
        if asked is None:
            return
        try:
            stream = llm.stream(asked[0], **asked[1])
            for piece in stream:
                if job is not None:
                    job.send(piece)
                    if job.left.is_set() and ranks.size == 1:  # several ranks would have to agree on it
                        break
            if job is not None:
                job.send(stream.result)
        except UserError as error:
            if job is not None:
                job.send(Refused(400, str(error)))
        except Exception as error:
            if job is not None:
                job.send(Refused(500, f"{type(error).__name__}: {error}"))
            if ranks.size > 1:  # who knows whether the ranks still agree
                raise
            traceback.print_exc()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises UserError where the address can't be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port} can't be had: {error}") from None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(service: Service, bound: socket.socket, ranks: Ranks) -> None:
    """Speak HTTP in a thread and decode here until a signal comes."""
    import uvicorn

    config = uvicorn.Config(service.application(), log_level="warning", timeout_graceful_shutdown=3, lifespan="off")
    server = uvicorn.Server(config)
    speaker = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    speaker.start()
    host, port = bound.getsockname()[:2]
    print(f"serving {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 (Ctrl-C ends it)", flush=True)
    try:
        work(service.llm, ranks, service.jobs)
    except KeyboardInterrupt:
        print("shutting down", file=sys.stderr)
    finally:
        service.close()
        server.should_exit = True
        speaker.join(10)


def parse_args() -> Any:
    p = Parser(description=__doc__.split("\n\n")[0])
    p.add_argument("--target", metavar="NAME", help="checkpoint (default: the demo's)")
    p.add_argument("--draft", metavar="NAME", help="draft checkpoint")
    p.add_argument("--judge", type=Path, metavar="FILE", help="judge head")
    p.add_argument("--name", metavar="NAME", help="what clients call the model (default: the target's folder's name)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    p.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any that is free")
    p.add_argument("--queue", type=int, default=8, metavar="N", help="requests that may wait (default: 8)")
    p.add_argument("--max-bytes", type=int, default=1 << 20, metavar="N", help="bytes that a request may have (default: 1048576)")
    p.add_argument("--context", type=int, metavar="N", help="tokens a text may have (default: the models', at most 8192)")
    p.add_argument("--dtype", choices=list(checkpoint.DTYPES), help="default: bfloat16; float32 for the demo pair")
    p.add_argument("--quantize", choices=["none", *MODES], default="none", help="weights of both models (default: none)")
    p.add_argument("--device", choices=["cuda", "cpu"], default=default_device(), help="default: cuda where there is one")
    p.add_argument("--no-compile", action="store_true", help="run the blocks uncompiled")
    for name, kind, metavar in (("verify", str, "RULE"), ("threshold", float, "X"), ("draft-len", str, "M")):
        p.add_argument(f"--{name}", type=kind, metavar=metavar, help="for requests that don't say (default: as generate.py)")
    args = p.parse_args()
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port is {args.port}; it must be from 0 to 65535")
    if args.queue < 0 or args.max_bytes < 1:
        raise UserError(f"--queue is {args.queue} and --max-bytes {args.max_bytes}; they must be at least 0 and 1")
    if args.draft_len is not None and args.draft_len != "auto":
        args.draft_len = int(args.draft_len) if args.draft_len.isdecimal() else args.draft_len
    return args


def main() -> None:
    args = parse_args()
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("serving needs starlette and uvicorn: pip install -r requirements-serve.txt") from None
    with ranks_of(args.device) as ranks:
        bound = listen(args.host, args.port) if ranks.rank == 0 else None
        llm = LLM(args.target, args.draft, args.judge, context=args.context, dtype=args.dtype, device=args.device,
                  quantize=args.quantize, compile=not args.no_compile)  # fmt: skip
        chosen = {"verify": args.verify, "threshold": args.threshold, "draft_len": args.draft_len}
        defaults = {name: value for name, value in chosen.items() if value is not None}
        llm.engine(**defaults).warm_up(1, llm.context)
        if bound is None:
            return work(llm, ranks, queue.Queue())
        if not is_loopback(args.host):
            print(f"warning: whoever reaches {args.host} can use this server; it asks for no password", file=sys.stderr)
        if llm.pair.caution:
            print(llm.pair.caution, file=sys.stderr)
        bound.listen(64)
        serve(Service(llm, args.name or llm.pair.target.name, defaults, args.queue, args.max_bytes), bound, ranks)


if __name__ == "__main__":
    run_cli(main)
