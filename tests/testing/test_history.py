"""What is written down is read back, whatever becomes of the writer."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from pathlib import Path

import pytest

from holdfast.testing.history import DatabaseRows, Event, Recorder, now, operations, read, read_database, write_database
from tests.children import Child


def test_an_operation_is_an_invoke_and_its_completion_in_the_fixed_format(tmp_path: Path) -> None:
    with Recorder(tmp_path, "w1") as record:
        before = now()
        call = record.invoke("write", "job", 7, key="k")
        call.ok(note=1)
        record.info("believe", "job", 7, **{"from": 1.0, "until": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "w1.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [list(Event._fields)] * 3
    assert [(line["kind"], line["op"], line["name"], line["fence"]) for line in lines] == [
        ("invoke", "write", "job", 7), ("ok", "write", "job", 7), ("info", "believe", "job", 7),
    ]  # fmt: skip
    assert lines[0]["id"] == lines[1]["id"] != ""
    assert before <= lines[0]["time"] <= lines[1]["time"] <= now()
    [done] = operations(read(tmp_path))
    assert (done.outcome, done.fence, done.data, done.completed) == ("ok", 7, {"key": "k", "note": 1}, lines[1]["time"])


def test_the_fence_of_an_acquire_comes_with_its_answer(tmp_path: Path) -> None:
    with Recorder(tmp_path, "w") as record:
        record.invoke("acquire", "job").ok(12)
        record.invoke("acquire", "job").fail()
    assert [(each.outcome, each.fence) for each in operations(read(tmp_path))] == [("ok", 12), ("fail", None)]


def test_an_operation_nobody_completed_is_unknown_and_has_no_end(tmp_path: Path) -> None:
    """Left by an exception, by a cancelled task, or not at all: in each case it may still happen."""

    async def cancelled() -> None:
        async with asyncio.timeout(0):
            with record.invoke("acquire", "job"):
                await asyncio.sleep(60)

    with Recorder(tmp_path, "w") as record:
        record.invoke("acquire", "job")
        with pytest.raises(OSError, match="gone"), record.invoke("renew", "job", 3):
            raise OSError("gone")
        with pytest.raises(TimeoutError):
            asyncio.run(cancelled())
    recorded = operations(read(tmp_path))
    assert [(each.op, each.outcome, each.completed) for each in recorded] == [
        ("acquire", "unknown", math.inf), ("renew", "unknown", math.inf), ("acquire", "unknown", math.inf),
    ]  # fmt: skip
    assert recorded[1].data == {"error": "OSError: gone"}


def test_a_second_completion_is_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path, "w") as record:
        call = record.invoke("release", "job", 3)
        call.ok()
        with pytest.raises(RuntimeError, match="completed already"):
            call.unknown()


def test_workers_are_merged_in_time_order(tmp_path: Path) -> None:
    with Recorder(tmp_path, "one") as one, Recorder(tmp_path, "two") as two:
        for _ in range(5):
            one.info("fault")
            two.info("fault")
    assert [event.worker for event in read(tmp_path)] == ["one", "two"] * 5


def test_threads_share_a_recorder_and_no_line_is_torn(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for _ in range(200):
            record.invoke("write", f"job-{number}", number, key="x" * 300).ok()

    with Recorder(tmp_path, "w") as record:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({each.id for each in operations(read(tmp_path))}) == 800


def test_a_fork_shares_a_recorder_and_the_ids_stay_apart(tmp_path: Path) -> None:
    program = """
    import os, sys
    from holdfast.testing.history import Recorder
    record = Recorder(sys.argv[1], "w")
    child = os.fork()
    for _ in range(50):
        record.invoke("write", "job", 1, key="k").ok()
    if child:
        os.waitpid(child, 0)
    """
    with Child(program, tmp_path) as process:
        assert process.wait() == 0
    assert len(operations(read(tmp_path))) == 100


def test_the_torn_last_line_of_a_killed_process_is_no_event_and_spoils_nothing(tmp_path: Path) -> None:
    """Neither for the reader, nor for the next run of the worker, which goes on in the same file."""
    program = """
    import os, signal, sys
    from holdfast.testing.history import Recorder
    record = Recorder(sys.argv[1], "w")
    record.invoke("acquire", "job").ok(5)
    call = record.invoke("renew", "job", 5)
    os.write(record._file, b'{"time":17.25,"work')
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with Child(program, tmp_path) as process:
        process.wait()
    assert (tmp_path / "w.jsonl").read_bytes().endswith(b'{"time":17.25,"work')
    assert [each.outcome for each in operations(read(tmp_path))] == ["ok", "unknown"]
    with Recorder(tmp_path, "w") as record:
        record.invoke("acquire", "job").fail()
    assert [each.outcome for each in operations(read(tmp_path))] == ["ok", "unknown", "fail"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"time":1}', "w.jsonl, line 2 is not an event"),
        ("nonsense", "w.jsonl, line 2 is not an event"),
        ('{"time":1,"worker":"w","kind":"maybe","op":"a","name":"n","id":"1","fence":null,"data":{}}', "kind='maybe'"),
        ('{"time":1,"worker":"w","kind":"ok","op":"a","name":"n","id":"1","fence":null,"data":{}}', "never invoked"),
    ],
)
def test_a_damaged_history_is_refused_and_never_judged_in_part(tmp_path: Path, line: str, told: str) -> None:
    with Recorder(tmp_path, "w") as record:
        record.info("fault")
        os.write(record._file, line.encode() + b"\n")
        record.info("fault")
    with pytest.raises(ValueError, match=told):
        operations(read(tmp_path))


def test_no_history_is_told_apart_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no history"):
        read(tmp_path)
    Recorder(tmp_path, "w").close()
    assert read(tmp_path) == []


def test_what_the_database_says_is_kept_beside_it(tmp_path: Path) -> None:
    assert read_database(tmp_path) == DatabaseRows()
    rows = DatabaseRows([{"name": "a", "fence": 1, "key": "k"}], timelines=[1, 2], sane_clocks=True)
    write_database(tmp_path, rows)
    assert read_database(tmp_path)._asdict() == {
        "writes": [{"name": "a", "fence": 1, "key": "k"}], "takeovers": [], "grants": [], "timelines": [1, 2],
        "all_grants": False, "sane_clocks": True, "set_back": False, "effects": [],
    }  # fmt: skip
