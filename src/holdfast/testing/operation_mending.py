"""What every engine promises of operations that were left half done: the half of the contract that is about mending."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.testing.operation_stage import WRONG, Connect, Effects, interrupted, leave_half_done, name, running


class MendingContract:
    """What a dead owner left, and what is undone, reset or recovered."""

    def test_what_a_dead_owner_left_is_refused_without_a_word_of_what_to_do(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        assert client.operations.get(key).status == "partial"
        assert key in [each.label for each in client.operations.list(status="partial")]
        with pytest.raises(holdfast.OperationFailed, match="left half done in attempt 1") as refused:
            client.operation(key).run(effects.do())
        assert refused.value.status == "partial"
        assert effects == []

    def test_it_is_rolled_back_first(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key, {"file": 7})

        def undo(op: Any) -> None:
            effects.append(("undone", op.attempt, dict(op.checkpoints)))

        outcome = client.operation(key, rollback=undo).run(effects.do("done"))
        assert effects == [("undone", 1, {"noted": {"file": 7}}), "done"]
        assert (outcome.result, outcome.attempt, outcome.replayed) == ("done", 2, False)

    def test_a_rollback_that_fails_leaves_it_as_it_was(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        with pytest.raises(OSError, match="cannot undo"):
            client.operation(key, rollback=effects.do("undo", OSError("cannot undo"))).run(effects.do("done"))
        assert client.operations.get(key).status == "partial"
        assert client.operation(key, rollback=effects.do("undo")).run(effects.do("done")).result == "done"
        assert effects == ["undo", "undo", "done"]

    def test_or_a_probe_says_whether_it_is_done(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        for probe, called in ((lambda: True, []), (lambda op: op.done(7), []), (lambda: False, ["done"])):
            key, before = name(), len(effects)
            leave_half_done(url, key)
            outcome = client.operation(key, verify=probe, on_partial="verify").run(effects.do("done"))
            assert effects[before:] == called
            assert outcome.status == "success"
            again = client.operation(key).run(effects.do("no"))
            assert (again.result, again.replayed) == (outcome.result, True)

    def test_a_probe_that_says_neither_yes_nor_no_has_nothing_done_again(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        for unclear in (1, [7], "t"):
            with pytest.raises(TypeError, match=r"verify must return True, op.done\(result\), False or None"):
                client.operation(key, verify=lambda said=unclear: said, max_attempts=9).run(effects.do("again"))
        assert (effects, client.operations.get(key).status) == ([], "partial")

    def test_a_failure_with_a_rollback_is_undone_before_it_is_tried_again(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(ValueError, match="half way"):
            client.operation(key, rollback=effects.do("undo")).run(effects.do(1, ValueError("half way")))
        assert client.operation(key, rollback=effects.do("undo")).run(effects.do(2)).result == 2
        assert effects == [1, "undo", 2]

    def test_what_says_itself_when_the_effect_begins_may_die_before(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
            dies.operation(key, marks_effect=True).run(interrupted)
        assert client.operation(key).run(effects.do("done")).attempt == 2
        other = name()

        def begun(op: Any) -> None:
            op.effect_started()
            raise KeyboardInterrupt

        with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
            dies.operation(other, marks_effect=True).run(begun)
        with pytest.raises(holdfast.OperationFailed, match="half done"):
            client.operation(other).run(effects.do("again"))
        assert effects == ["done"]

    def test_crashes_count_as_attempts(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        for _ in range(2):
            leave_half_done(url, key, rollback=effects.do("undo"))
        with pytest.raises(holdfast.OperationFailed, match="tried 2 times"):
            client.operation(key, rollback=effects.do("undo"), max_attempts=2).run(effects.do("done"))
        assert effects == ["undo"]

    def test_recover_mends_what_it_knows_how_to_without_a_caller(self, connect: Connect, url: str) -> None:
        client, effects, ours = connect(url), Effects(), name()
        keys = {each: name() for each in ("undone", "done", "in part", "unknown", "fails", "not begun")}
        with holdfast.Client(url) as dies:
            for handler, each in keys.items():
                dies.operations.register(f"{ours} {handler}", rollback=int)
                with pytest.raises(KeyboardInterrupt):
                    dies.operation(
                        each, rollback=f"{ours} {handler}", marks_effect=handler == "not begun", payload=1
                    ).run(interrupted)
        client.operations.register(f"{ours} undone", rollback=effects.do("undo"))
        client.operations.register(f"{ours} done", rollback=effects.do("no"), verify=lambda op: op.done([7]))
        client.operations.register(f"{ours} in part", rollback=effects.do("undo the half"), verify=lambda: False)
        client.operations.register(f"{ours} fails", rollback=effects.do("tried", OSError("cannot undo")))
        found = client.operations.recover()
        mine = {client.operations.get(each).key: handler for handler, each in keys.items()}
        assert {mine[each]: outcome for each, outcome in found.items() if each in mine} == {
            "undone": "rolled back", "done": "finished", "in part": "rolled back", "not begun": "rolled back",
        }  # fmt: skip
        assert sorted(effects) == ["tried", "undo", "undo the half"]
        statuses = {handler: client.operations.get(each).status for handler, each in keys.items()}
        assert statuses == {
            "undone": "failure", "done": "success", "in part": "failure", "unknown": "partial", "fails": "partial",
            "not begun": "failure",
        }  # fmt: skip
        assert client.operation(keys["done"], payload=1).run(effects.do("no")).result == [7]
        assert client.operation(keys["undone"], payload=1).run(effects.do("again")).attempt == 2

    def test_a_reset_key_is_as_if_it_were_new_and_its_history_stays(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(LookupError, match=key):
            client.operations.reset(key, actor="jane", reason="wrong file")
        client.operation(key, payload=1).run(effects.do(1))
        client.operations.reset(key, actor="jane", reason="wrong file")
        assert client.operations.get(key).error["reason"] == "wrong file"
        outcome = client.operation(key, payload=2, max_attempts=1).run(effects.do(2))
        assert (outcome.result, outcome.replayed, outcome.attempt) == (2, False, 2)
        with running(url, other := name()), pytest.raises(holdfast.OperationInProgress):
            client.operations.reset(other, actor="jane", reason="impatient")
        for argument in ("actor", "reason"):
            with pytest.raises(ValueError, match=argument):
                client.operations.reset(key, **{"actor": "jane", "reason": "why", argument: ""})

    def test_what_is_done_can_be_undone_by_what_is_registered(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        client.operations.register(f"undo {key}", rollback=lambda op: effects.append(dict(op.checkpoints)))

        def work(op: Any) -> int:
            return 1

        client.operation(key, rollback=f"undo {key}").run(work)
        client.operations.rollback(key, actor="jane", reason="wrong file")
        assert client.operations.get(key).status == "failure"
        with pytest.raises(LookupError, match="leaves nothing to undo: it is failure"):
            client.operations.rollback(key, actor="jane", reason="was that heard?")
        assert effects == [{}]
        assert client.operation(key, max_attempts=1).run(effects.do(2)).attempt == 2, "nothing has failed"
        with pytest.raises(holdfast.OperationFailed, match="nothing is registered"):
            client.operations.rollback(key, actor="jane", reason="again")
        with pytest.raises(ValueError, match="no rollback is registered as 'nobody'"):
            client.operation(key, rollback="nobody")

    def test_a_result_that_cannot_be_kept_is_refused_and_never_forgotten(self, connect: Connect, url: str) -> None:
        """The effect is there by then: it must not be had a second time because of that."""
        client, effects = connect(url), Effects()
        for wrong in WRONG:
            key = name()
            with pytest.raises(ValueError, match=r"^the result.* cannot be kept as it is"):
                client.operation(key).run(effects.do(wrong))
            with pytest.raises(holdfast.OperationFailed, match="half done"):
                client.operation(key).run(effects.do(1))
        assert len(effects) == len(WRONG)
