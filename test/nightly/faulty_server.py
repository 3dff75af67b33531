"""Stands in for a server that does not do what it should: ``faulty_server.py FAULT ... --port PORT``.

cold    reuses nothing and logs no comparison
wrong   reuses what it should, and logs a MISMATCH
dead    ends at the first request
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FAULT, PORT = sys.argv[1], int(sys.argv[-1])
ANSWERED = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"max_total_num_tokens": {"swaps": 1500}.get(FAULT, 1000)})

    def do_POST(self):
        if self.path.startswith("/flush_cache"):
            return self.answer({})
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAULT == "dead":
            print("no weights", flush=True)
            os._exit(3)
        if self.path == "/v1/chat/completions":
            return self.recall(body["messages"][0]["content"])
        tokens = body["sampling_params"]["max_new_tokens"]
        cached = 1280 if FAULT == "wrong" and ANSWERED else 0
        if cached:
            print("[SWA-DBG] MISMATCH rid=a37a#2 boundary=1280 request_slot=8", flush=True)
        ANSWERED.append(cached)
        details = {"device": cached, "host": 0, "storage": 0}
        meta = {"output_token_logprobs": [[-1.0, 7, None]] * tokens, "cached_tokens": cached}
        self.answer([{"meta_info": meta | {"cached_tokens_details": details}}])

    def recall(self, asked):
        # 4,750 rows of C4, of which the device holds a hot buffer of 2,048 and a page.
        print("#gpu token: 2112, gpu token usage: 0.1, #cpu token: 4800, cpu token", flush=True)
        passcode = asked.split(".")[0].split()[-1]
        message = {"reasoning_content": f"It was {passcode}.", "content": None}
        usage = {"prompt_tokens": 19_000}
        self.answer({"choices": [{"message": message}], "usage": usage})

    def answer(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
