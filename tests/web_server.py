"""A web server for tests, in this process: answers range requests, and fails on demand."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class WebServer:
    """Serves the files of a folder. `drop` is asked before each answer how many bytes of it to send before the
    connection is cut; None: all."""

    def __init__(self, folder, *, ranges=True):
        self.folder, self.ranges = folder, ranges
        self.requests = []  # (path, first byte, the one after the last)
        self.sent_bytes = 0
        self.drop = lambda path, start, stop: None
        self.damage = lambda path: False
        self.answers = lambda start, stop, size: (
            start,
            f"bytes {start}-{stop - 1}/{size}",
        )  # first byte, Content-Range
        self.before = lambda path: None
        self.status = {}  # path -> what is answered instead
        self._server, self._port, self._open = None, 0, []
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def start(self):
        """Again on the port that it had."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are sent one after the other

            def do_GET(self):
                server._answer(self)

            def log_message(self, *values):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *values):
                pass  # of a connection that was cut

            def process_request(self, request, address):
                server._open.append(request)
                super().process_request(request, address)

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self):
        """Connections that are open end with it."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(2)
            self._server = None

    def _answer(self, handler):
        path = unquote(handler.path.partition("?")[0]).lstrip("/")
        self.before(path)
        file = self.folder / path
        status = self.status.get(path) or (200 if file.is_file() else 404)
        if status != 200:
            handler.send_response(status)
            if status == 302:
                handler.send_header("Location", f"/moved/{path}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        data = file.read_bytes()
        start, stop = 0, len(data)
        if self.ranges and "Range" in handler.headers:
            first, _, last = handler.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(len(data), int(last) + 1)
            if start >= len(data):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(data)}")
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            handler.send_response(206)
            first, place = self.answers(start, stop, len(data))
            start, stop = first, first + stop - start
            if place:
                handler.send_header("Content-Range", place)
        else:
            handler.send_response(200)
        self.requests.append((path, start, stop))
        body = data[start:stop]
        if self.damage(path):
            body = bytes(len(body))
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", f'"{hash(data)}"')
        handler.end_headers()
        sent = self.drop(path, start, stop)
        handler.wfile.write(body[:sent])
        self.sent_bytes += len(body[:sent])
        if sent is not None:
            handler.close_connection = True
