"""An HTTP server of chat completions, which a test tells what to return."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[Any, BaseHTTPRequestHandler], Any]  # body of a request -> body of its response


def completion(text: str | None, tokens: int | None = None, reason: str = "stop") -> Any:
    """What a server returns for a text."""
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}], **usage}


@contextmanager
def chat_server(reply: Reply, models: tuple[str, ...] = ("target",)) -> Iterator[str]:
    """The address of a server. A reply may be a status, bytes sent as they are, or JSON."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send({"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(reply(body, self))

        def send(self, found: Any) -> None:
            if found is None:
                return  # the reply has written what it wants
            status, content = (found, b"no") if isinstance(found, int) else (200, found)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
