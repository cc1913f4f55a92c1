"""One page on a port of this machine, for `octavo view`; the standard library is enough. Knows nothing of the page."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from octavo.errors import ConfigError


def serve(page: str, host: str, port: int, open_browser: bool) -> int:
    """Serve `page` at / and /blocks until Ctrl-C. Raises ConfigError where the port cannot be had."""
    content = page.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in ("/", "/blocks"):
                self.send_error(404)
                return
            self.send_response(200)
            for name, value in (
                ("Content-Type", "text/html; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: one reader, one page."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: cannot listen on {host} ({why}); try --port 0") from error
    with server:
        address = f"http://{host}:{server.server_port}/"
        print(f"the block map is at {address} (Ctrl-C ends)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(address)
        server.serve_forever()
    return 0
