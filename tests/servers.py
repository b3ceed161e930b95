"""Real servers of a folder on loopback: one of ours that fails as it is told, nginx, and SeaweedFS as an S3."""

import http.server
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ranks import free_port, wait_for

FAULTS = ["503", "429", "reset", "cut", "wrong", "silent", "slow"]


class RangeServer(http.server.ThreadingHTTPServer):
    """Serves a folder with ranges; `faults` are met by the next requests, and a share of all others fails at random.

    A fault is one of `FAULTS`, or a status such as 404 which is answered to all requests while it is `always`.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.always, self.share = Path(folder), [], None, 0.0
        self.retry_after = "0"
        self.requests, self.rng, self.lock, self.has_ranges = [], random.Random(0), threading.Lock(), True
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self):
        with self.lock:
            if self.always is not None:
                return self.always
            if self.faults:
                return self.faults.pop(0)
            return self.rng.choice(FAULTS) if self.rng.random() < self.share else None

    def handle_error(self, request, client_address):
        pass  # clients are killed


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a client's delayed acknowledgement costs each answer 40 ms

    def do_GET(self):
        fault, asked = self.server.next_fault(), self.headers.get("Range")
        path, is_status = self.server.folder / self.path.lstrip("/"), fault is not None and fault.isdecimal()
        self.server.requests.append((self.path, asked, fault))
        self.close_connection |= fault in ("reset", "endless", "silent")
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
        elif fault == "endless":
            self.send_response(200 if asked is None else 206)
            self.end_headers()
            self.wfile.writelines(bytes(1 << 20) for _ in range(1 << 11))
        elif fault in ("H", "HTTP/1.1 100 Continue\r\n\r\n"):  # headers that do not end
            for _ in range(2000):
                self.wfile.write(fault.encode())
                time.sleep(0.01)
        elif fault == "silent":
            time.sleep(0.6)
        elif is_status or not path.is_file():
            place = {"Location": "https://elsewhere/x?signature=secret"} if fault == "302" else {}
            headers = {"Retry-After": self.server.retry_after, **place}
            self.answer(int(fault) if is_status else 404, b"<html>no</html>", headers)
        else:
            self.give(path.read_bytes(), asked, fault)

    def give(self, content, asked, fault):
        status, headers = 200, {}
        if asked and self.server.has_ranges:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            status, headers = 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            content = content[first : last + 1]
        if fault == "slow":
            time.sleep(0.02)
        if fault == "wrong":
            content = bytes([content[0] ^ 1]) + content[1:]
        self.answer(status, content, headers, is_cut=fault == "cut", pause_s=0.05 if fault == "dribble" else 0)

    def answer(self, status, content, headers, *, is_cut=False, pause_s=0):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        for place in range(100 if pause_s else 0):
            self.wfile.write(content[place : place + 1])
            time.sleep(pause_s)
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection |= is_cut

    def log_message(self, *_):
        pass


@contextmanager
def nginx(folder, work):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", work / "key", "-out", work / "cert",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    places = "".join(f"{kind}_temp_path {work}/{kind};" for kind in "client_body proxy fastcgi uwsgi scgi".split())
    user = "user root;" * (os.geteuid() == 0)
    (work / "nginx.conf").write_text(
        f"{user} pid {work}/pid; error_log {work}/errors; daemon off; events {{}} http {{ access_log off; {places} "
        f"server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {work}/cert; ssl_certificate_key {work}/key; "
        f"root {folder}; keepalive_requests 20; }} }}"
    )
    process = subprocess.Popen(["nginx", "-c", work / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 20)
        yield f"https://localhost:{port}", work / "cert"
    finally:
        process.terminate()
        process.wait(20)


def find_weed():
    return shutil.which("weed", path=os.path.dirname(sys.executable))


def is_answering(url):
    try:
        urllib.request.urlopen(url, timeout=2)
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def free_pair():
    """Return a port of which that 10,000 above it, which SeaweedFS takes too, is free as well."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port + 10_000))
            return port


@contextmanager
def seaweed(work, bucket):
    ports = {name: free_pair() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    keys = {"AWS_ACCESS_KEY_ID": "planted-key", "AWS_SECRET_ACCESS_KEY": "planted-secret"}
    (work / "s3.json").write_text(
        '{"identities": [{"name": "t", "credentials": [{"accessKey": "planted-key", "secretKey": "planted-secret"}], '
        '"actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}'
    )
    command = [find_weed(), f"-logdir={work}", "server", "-s3", f"-s3.config={work / 's3.json'}", f"-dir={work}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # whose ports are the same for every server
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=20"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with open(work / "weed.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=work)
    try:
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        wait_for(lambda: is_answering(endpoint))
        addresses = (f"-{name}=127.0.0.1:{ports[f'{name}.port']}" for name in ("master", "filer"))
        shell = [command[0], "shell", *addresses]
        subprocess.run(shell, input=f"s3.bucket.create -name {bucket}\n".encode(), check=True, capture_output=True)
        yield {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    finally:
        process.kill()
        process.wait(20)
        for port in ports.values():  # of which it leaves sockets
            for path in [*Path("/tmp").glob(f"seaweedfs-*-{port}.sock"), *Path("/tmp").glob(f"*-{port + 10_000}.sock")]:
                path.unlink()
