"""A stand-in for wandb's server on this machine."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(BaseHTTPRequestHandler):
    """Answers what wandb 0.31 asks, and keeps the rows that it sends."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        answer, sent = {}, {}
        with suppress(ValueError):  # reports about wandb itself
            sent = json.loads(body)
        if "RunResumeStatus" in sent.get("query", ""):
            rows = self.server.rows
            known = {"name": "b", "displayName": "b", "config": "{}", "wandbConfig": '{"t": {}}', "tags": []}
            known |= {"historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}
            known["historyTail"] = json.dumps([json.dumps(row) for row in rows[-1:]])
            known["summaryMetrics"] = json.dumps(dict(*rows[-1:]))
            answer = {"data": {"model": {"id": "p", "name": "p", "bucket": known if rows else None}}}
        elif "UpsertBucket" in sent.get("query", ""):
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "b", "name": sent["variables"]["name"], "displayName": "b", "config": "{}"}
            bucket |= {"project": project, "historyLineCount": len(self.server.rows)}
            answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        elif "CreateRunFiles" in sent.get("query", ""):
            answer = {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}}
        elif "query" in sent:
            answer = {"data": {"viewer": {"id": "v", "entity": "e", "username": "v", "flags": "{}"}}}
        elif "file_stream" in self.path:
            history = sent.get("files", {}).get("wandb-history.jsonl", {"content": []})
            self.server.rows += [json.loads(line) for line in history["content"]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(json.dumps(answer))))
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving() -> Iterator[tuple[list[dict], dict[str, str]]]:
    """The list of the rows that are sent, and the environment in which wandb sends them."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads, server.rows = True, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield server.rows, {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address}
        server.shutdown()
