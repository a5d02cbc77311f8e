"""What stands for vLLM: its command line, /health, /v1/models and streamed /v1/completions, of the standard library alone.

What a request does is said by its first token: see `answer`. What was asked stands in the file that $FAKE_VLLM names, a line of
JSON each: the command line, bodies, and "gone" when a client went away in the middle.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, DIE, REFUSE, BREAK_OFF, SAY_ERROR, STOP = 1, 2, 3, 4, 5, 6


def note(what: object) -> None:
    with open(os.environ["FAKE_VLLM"], "a") as file:
        file.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.json(200, {"data": [{"id": "headstart", "max_model_len": 512}]})

    def json(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        note(body)
        how = body["prompt"][0]
        if how == REFUSE:
            return self.json(400, {"error": {"message": "it does not like this", "type": "BadRequestError"}})
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.answer(how, body)
        except OSError:
            note("gone")
        return None

    def answer(self, how: int, body: dict[str, object]) -> None:
        """Tokens 100, 101, …, two in the second chunk."""
        self.chunk({"choices": [self.choice([100], body)]})
        while how == HANG:
            self.chunk({"choices": [{"token_ids": []}]})
            time.sleep(0.01)
        if how == DIE:
            print("RuntimeError: it broke", flush=True)
            os._exit(7)
        if how == BREAK_OFF:
            return
        if how == SAY_ERROR:
            self.chunk({"error": {"message": "out of something"}})
            return
        self.chunk({"choices": [self.choice([101, 102], body)]})
        if how == STOP:
            last = self.choice(body["stop_token_ids"][:1], body) | {"finish_reason": "stop", "stop_reason": 9}
        else:
            last = self.choice([103], body) | {"finish_reason": "length"}
        self.chunk({"choices": [last]})
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 64}}
        self.chunk({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def choice(self, tokens: list[int], body: dict[str, object]) -> dict[str, object]:
        found: dict[str, object] = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": None}
        if "logprobs" in body:
            found["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [-1.5 for _ in tokens],
                "top_logprobs": [{f"token_id:{token}": -1.5, "token_id:7": -0.25, "token_id:8": -2.0} for token in tokens],
            }
        return found

    def chunk(self, body: object) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    note(sys.argv[1:])
    if "--fail" in sys.argv:
        print("ValueError: no such architecture", flush=True)
        sys.exit(1)
    print("INFO: loading", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
