"""One etcd server on loopback. Patroni stores in it which server leads."""

import http.client
import os
import shutil
import subprocess

from holdfast.testing import server_folder
from holdfast.testing.resource import Resource
from holdfast.testing.server import HOST, LIMIT, launch, reserve_port, until

MISSING = "etcd is not installed: apt-get install etcd-server"


def find() -> str | None:
    """The program, or None if it is not installed."""
    return shutil.which("etcd")


class Etcd(Resource):
    """Raises LookupError if etcd is not installed."""

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise LookupError(MISSING)
        self._closed = False
        self._folder, self._folder_lock = server_folder.create_temporary()
        self._ports = [reserve_port(), reserve_port()]
        self.port, peer_port = (port.getsockname()[1] for port in self._ports)
        clients, peers = f"http://{HOST}:{self.port}", f"http://{HOST}:{peer_port}"
        options = {
            "name": "etcd", "data-dir": self._folder / "data", "log-level": "warn", "logger": "zap",
            "listen-client-urls": clients, "advertise-client-urls": clients,
            "listen-peer-urls": peers, "initial-advertise-peer-urls": peers, "initial-cluster": f"etcd={peers}",
        }  # fmt: skip
        command = [program, *(f"--{option}={value}" for option, value in options.items())]
        self._watchdog = launch(command, self._ports[0], log=self._folder / "log", folder=self._folder)
        try:
            until(lambda: self._is_healthy() or self._watchdog.poll() is not None, what="etcd answers")
            if self._watchdog.poll() is not None:
                raise RuntimeError(f"etcd did not start. Its log:\n{(self._folder / 'log').read_text()[-2000:]}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watchdog.terminate()
        try:
            self._watchdog.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()
        for port in self._ports:
            port.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_lock)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
