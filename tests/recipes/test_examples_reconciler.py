"""The example in examples/reconciler does what it says, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import holdfast
from tests.children import PATIENCE, eventually

ROOT = Path(__file__).resolve().parents[2]


def test_records_follow_the_folders_and_the_second_replica_goes_on(sqlite_url: str, tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    (folders / "one").mkdir(parents=True)
    command = [sys.executable, "-m", "examples.reconciler.folders", sqlite_url, str(folders)]
    with holdfast.Client(sqlite_url) as client:
        client.objects.put_if("folder", "one", {"owner": "jane"}, holdfast.MustCreate())

        def phase() -> object:
            record = client.objects.get("folder", "one")
            assert record is not None
            return record.payload.get("status", {}).get("phase")

        replicas = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
        try:
            eventually(lambda: phase() == "Provisioning", "it is seen")
            (folders / "one" / "ready").touch()
            eventually(lambda: phase() == "Ready", "it is ready")
            replicas[0].terminate()
            replicas[0].wait(PATIENCE)
            (folders / "one" / "failed").touch()
            eventually(lambda: phase() == "Error", "the other one goes on")
            assert client.objects.get("folder", "one").payload["owner"] == "jane"  # type: ignore[union-attr]
        finally:
            for replica in replicas:
                replica.terminate()
                replica.wait(PATIENCE)
