"""The dashboard and the alerts in deploy/: what they ask for is what is really exported, label by label, and what they
tell people to do can be done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import click
import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import holdfast.telemetry
from holdfast.cli.app import app
from holdfast.integrations.prometheus import export
from holdfast.runtime.telemetry import emit, register
from tests.cli.command import ROOT

BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/holdfast.json").read_text(encoding="utf-8"))
GROUPS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PANELS = [each for each in BOARD["panels"] if each["type"] != "row"]
TOLD = (ROOT / "docs/howto/telemetry.md").read_text(encoding="utf-8")
SCRAPE = {"job", "instance"}
"""What Prometheus itself puts on every series."""

Labels = frozenset[str]


class Running:
    """Whatever has gauges: a keeper, an elector, a relay, a reconciler."""

    def _gauges(self) -> Iterator[Any]:
        yield from ((each.name, 1.0, *each.labels) for each in holdfast.telemetry.GAUGES)


@pytest.fixture(scope="module")
def series() -> dict[str, Labels]:
    """Everything that is exported once everything has happened, and what is recorded from that: name and labels."""
    registry, all_of_them = CollectorRegistry(), Running()
    register(all_of_them)
    stop = export(registry)
    try:
        for each in holdfast.telemetry.METRICS:
            if each.event:
                values = {other.value: 1.0 for other in holdfast.telemetry.BY_EVENT[each.event] if other.value}
                emit(each.event, **values)
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    finally:
        stop()
    found = {each.name: frozenset({*each.labels, *SCRAPE}) for family in families for each in family.samples}
    for rule in RULES:
        if "record" in rule:
            found[rule["record"]] = labels(promql.parse(rule["expr"]), found) | {*rule.get("labels", {})}
    return found


def labels(node: Any, known: dict[str, Labels]) -> Labels:
    """Those that come out of an expression; an AssertionError where it asks for what is not there, or sets side by side
    what has different labels, so that nothing would ever match."""
    match node:
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.VectorSelector():
            assert node.name in known, f"{node.name} is not exported"
            for matcher in node.matchers.matchers:
                assert matcher.name in known[node.name], f"{node.name} has no label {matcher.name}"
            return known[node.name]
        case promql.MatrixSelector():
            return labels(node.vector_selector, known)
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels(node.expr, known)
        case promql.Call():
            given = [labels(each, known) for each in node.args]
            if node.func.name in ("scalar", "vector"):
                return frozenset()
            if node.func.name == "histogram_quantile":
                assert "le" in given[-1], "there are no buckets"
                return given[-1] - {"le"}
            return given[-1]
        case promql.AggregateExpr():
            inner = labels(node.expr, known)
            wanted = frozenset(node.modifier.labels if node.modifier else ())
            assert wanted <= inner, f"{wanted - inner} is no label of {node.expr.prettify()}"
            return wanted
        case promql.BinaryExpr():
            return _both(node, known)
    raise AssertionError(f"{type(node).__name__} is not understood here")


def _both(node: Any, known: dict[str, Labels]) -> Labels:
    left, right = labels(node.lhs, known), labels(node.rhs, known)
    if any(isinstance(each, promql.NumberLiteral) or _scalar(each) for each in (node.lhs, node.rhs)):
        return left | right
    on = node.modifier.matching if node.modifier else None
    if on is not None:
        assert {*on.labels} <= left & right
    elif str(node.op) != "or":
        assert left == right, f"{left ^ right} is on one side only of {node.prettify()}"
    return left | right if str(node.op) == "or" else left


def _scalar(node: Any) -> bool:
    if isinstance(node, promql.BinaryExpr):
        return _scalar(node.lhs) and _scalar(node.rhs)
    return isinstance(node, promql.Call) and node.func.name == "scalar"


def parsed(text: str) -> Any:
    return promql.parse(text.replace("$__rate_interval", "5m"))


def selectors(text: str) -> Iterator[Any]:
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        elif isinstance(node, promql.MatrixSelector):
            found.append(node.vector_selector)

    promql.walk(parsed(text), visit, lambda _: None)
    yield from found


def asked() -> list[str]:
    """Every expression there is."""
    of_board = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [*of_board, *(each["expr"] for each in BOARD["annotations"]["list"]), *(rule["expr"] for rule in RULES)]


def test_the_judge_sees_what_is_wrong(series: dict[str, Labels]) -> None:
    for wrong in (
        "holdfast_nothing", "holdfast_leases_held{dataset_id='x'}", "sum by (reason) (holdfast_leases_held)",
        "holdfast_lease_acquisitions", "histogram_quantile(0.9, sum(rate(holdfast_heartbeat_seconds_bucket[5m])))",
        "sum by (job) (holdfast_leases_held) + sum(holdfast_leases_held)", "holdfast:limit{what='x'} > 0",
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            labels(promql.parse(wrong), series)


def test_all_that_is_asked_for_is_exported_and_matches(series: dict[str, Labels]) -> None:
    for text in asked():
        labels(parsed(text), series)
    for panel in PANELS:
        for target in panel["targets"]:
            shown = {*re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])}
            assert shown <= labels(parsed(target["expr"]), series), (panel["title"], target)
    for name, rule in ALERTS.items():
        shown = {*re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))}
        assert shown <= labels(promql.parse(rule["expr"]), series), name
    for variable in BOARD["templating"]["list"][1:]:
        [(inner, label)] = re.findall(r"label_values\((.*), (\w+)\)$", variable["query"]["query"])
        assert label in labels(promql.parse(inner), series)


def test_that_nobody_leads_is_seen_when_the_one_that_led_is_gone_and_the_others_never_did() -> None:
    """A counter with labels is not exported before it counts, and that of a dead process is exported no more."""
    asks = ALERTS["HoldfastNobodyLeads"]["expr"]
    assert re.search(r"max_over_time\(holdfast_elector_transitions_total{[^}]*}\[1d\]\)", asks)


def test_a_slot_that_a_silent_session_left_to_another_is_no_churn() -> None:
    counted = re.sub(r" unless \w+", "", ALERTS["HoldfastLeaseChurn"]["expr"])
    assert re.findall(r"takeovers_total(.{15})", counted) == ['{kind="lease"} ', '{kind="lease"}[']


def test_what_may_happen_once_is_seen_the_first_time(series: dict[str, Labels]) -> None:
    """A replica that is started over and over takes over once each time, in series that begin with 1."""
    for name, rule in ALERTS.items():
        for counter in {*re.findall(r"increase\((\w+)", rule["expr"])}:
            if series[counter] != SCRAPE and name != "HoldfastRelayAway":  # that one asks for what goes on and on
                assert re.search(rf"{counter}({{[^}}]*}})? unless {counter} offset", rule["expr"]), (name, counter)


def test_values_that_are_asked_for_are_told_of_in_the_docs_with_their_label() -> None:
    said = re.split(r"\n\n|\n- ", TOLD)
    for text in asked():
        for selector in selectors(text):
            for matcher in selector.matchers.matchers:
                if matcher.name not in {*SCRAPE, "of"}:
                    for value in matcher.value.split("|"):
                        about = [each for each in said if f"`{matcher.name}`" in each]
                        assert any(f"`{value}`" in each for each in about), (selector.name, matcher.name, value)


def test_limits_are_in_one_place_and_each_is_compared_with_and_drawn() -> None:
    limits = {rule["labels"]["of"] for rule in RULES if rule.get("record") == "holdfast:limit"}
    compared: set[str] = set()
    for rule in ALERTS.values():
        compared |= {*re.findall(r'holdfast:limit{of="(\w+)"}', rule["expr"])}
        assert not re.search(r"[<>]\s*(?!0\b)[0-9.]", rule["expr"]), f"{rule['alert']} has a limit of its own"
    assert compared == limits
    drawn = {*re.findall(r'holdfast:limit{of="(\w+)"}', " ".join(asked()[: -len(RULES)]))}
    assert limits - drawn == {"fast_burn", "slow_burn"}
    for panel in PANELS:
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        assert {step["value"] for step in steps} <= {None, 1}, f"{panel['title']} has a limit of its own"


def test_an_alert_says_what_it_is_what_to_do_and_how_urgent_it_is() -> None:
    groups = {group["name"] for group in GROUPS}
    assert len(groups) == len(GROUPS)
    for about in ("Churn", "Heartbeat", "RelayLag", "Invariant", "StalePartials", "ErrorBudget"):
        assert any(about in name for name in ALERTS), about
    for name, rule in ALERTS.items():
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}, name
        assert 20 < len(rule["annotations"]["summary"]) < 120, name
        assert len(rule["annotations"]["description"]) > 80, name
        for command in re.findall(r"`(holdfast [^`]*)`", rule["annotations"]["description"]):
            understood(command.split()[1:])


def understood(words: list[str]) -> None:
    """That there is such a command, with these options."""
    command: click.Command = app
    context = click.Context(app)
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        assert found is not None, words
        command, words = found, words[1:]
    options = {name for each in command.params for name in each.opts}
    assert {word for word in words if word.startswith("-")} <= options, words


def test_the_dashboard_asks_nobody_by_address_and_is_laid_out() -> None:
    text = json.dumps(BOARD)
    assert not re.search(r"https?://|localhost|\d+\.\d+\.\d+\.\d+", text)
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    assert BOARD["templating"]["list"][0]["type"] == "datasource"
    uses = [*PANELS, *BOARD["annotations"]["list"], *BOARD["templating"]["list"][1:]]
    assert {json.dumps(each["datasource"]) for each in uses} == {'{"type": "prometheus", "uid": "${datasource}"}'}
    assert {*re.findall(r"\$\{?(?!__)(\w+)", text)} <= variables
    assert len({each["id"] for each in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
    for panel in PANELS:
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            for selector in selectors(target["expr"]):
                chosen = {each.name for each in selector.matchers.matchers}
                assert selector.name == "holdfast:limit" or "job" in chosen, f"{panel['title']} is of all jobs"


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    used = {re.sub(r"_(total|bucket)$", "", each.name) for text in asked() for each in selectors(text)}
    unused = {f"holdfast_{each.name}" for each in holdfast.telemetry.METRICS} - used
    assert unused <= {
        "holdfast_lease_hold_seconds", "holdfast_lock_hold_seconds", "holdfast_operation_hold_seconds",
        "holdfast_lease_waiters", "holdfast_lock_acquisitions", "holdfast_reconciler_records",
        "holdfast_relay_lag_events",
    }, "new metrics are shown, or left out on purpose"  # fmt: skip
