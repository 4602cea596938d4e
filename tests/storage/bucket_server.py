"""An S3 server for tests: prints its port, and ends with its standard input. In a process of its own, since a client
that waits for it may hold the interpreter's lock of the test's process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class OneAtATime:
    """moto looks whether an object is there and stores it in two steps; a conditional PUT has to be one."""

    def __init__(self) -> None:
        self.application = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self.lock:
            return list(self.application(environ, start_response))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
