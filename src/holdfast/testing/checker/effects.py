"""C5, the promise of operations: every key has one effect and one result, and they are of each other."""

from collections import defaultdict

from holdfast.testing.checker.checks import History, Verdict
from holdfast.testing.history import Operation


def one_effect_a_key(history: History) -> Verdict:
    """Runs say what the result was, and the table of effects what was done. A run that ended without an answer may have
    had its effect; two never."""
    effects: dict[str, list[object]] = defaultdict(list)
    for row in history.database.effects:
        effects[row["name"]].append(row["value"])
    runs: dict[str, list[Operation]] = defaultdict(list)
    for each in history.operations:
        if each.op == "run":
            runs[each.name].append(each)
    violations = [f"{name!r} has an effect, but nobody ran it" for name in effects if name not in runs]
    answered = 0
    for name, group in runs.items():
        done, found = [each for each in group if each.outcome == "ok"], effects.get(name, [])
        answered += len(done)
        if len(found) > 1:
            violations.append(f"{name!r} had {len(found)} effects: {', '.join(map(repr, found))}")
        if len(told := {repr(each.data["result"]) for each in done}) > 1:
            violations.append(f"{name!r} had {len(told)} results: {', '.join(sorted(told))}")
        if done and not found:
            violations.append(f"{name!r} was said to be done, and there is no effect: {done[0]}")
        if done and len(found) == 1 and told != {repr(found[0])}:
            violations.append(f"{name!r} had the effect {found[0]!r}, and the result {', '.join(sorted(told))}")
    return Verdict.of("C5", answered, violations)
