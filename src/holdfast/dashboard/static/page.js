// Keeps the page current: panels that the server has rendered replace the old ones as they change, and ages and
// remaining times are counted here, by the server's clock. It requests nothing but pages and events of the dashboard.
"use strict";

(() => {
  const { base, page } = document.body.dataset;
  const [live, announcement, dialog, zone] = ["live", "announcement", "dialog", "zone"].map((id) => document.getElementById(id));
  let ahead = Number(document.body.dataset.now) - Date.now() / 1000;
  let isLocal = false;
  try { isLocal = localStorage.getItem("holdfast-zone") === "local"; } catch { /* storage is off */ }

  const now = () => Date.now() / 1000 + ahead;
  const two = (n) => String(n).padStart(2, "0");

  function span(seconds) {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 60) return `${whole} s`;
    const [s, m, h, d] = [whole % 60, Math.floor(whole / 60) % 60, Math.floor(whole / 3600) % 24, Math.floor(whole / 86400)];
    if (d) return `${d} d ${h} h`;
    return h ? `${h} h ${two(m)} m` : `${m} m ${two(s)} s`;
  }

  function clock(seconds, local, short) {
    const shifted = new Date(seconds * 1000 - (local ? new Date(seconds * 1000).getTimezoneOffset() * 60000 : 0));
    const [day, time] = shifted.toISOString().split("T");
    return short ? time.slice(0, short) : `${day} ${time.slice(0, 8)}`;
  }

  function put(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function showTimes() {
    put(zone, isLocal ? "Local time" : "UTC");
    for (const node of document.querySelectorAll("time.at")) {
      const at = Number(node.dataset.at);
      const short = node.dataset.shape === "short" ? node.textContent.length : 0;
      put(node, clock(at, isLocal, short));
      node.title = `${clock(at, false)} UTC, ${clock(at, true)} local`;
    }
  }

  function tick() {
    const at = now();
    for (const node of document.querySelectorAll("time[data-for]")) put(node, span(at - node.dataset.for));
    for (const node of document.querySelectorAll("time[data-ago]")) put(node, `${span(at - node.dataset.ago)} ago`);
    for (const node of document.querySelectorAll("time[data-left]")) put(node, `${span(node.dataset.left - at)} left`);
    for (const node of document.querySelectorAll("progress[data-until]")) {
      node.value = Math.min(node.max, Math.max(0, node.dataset.until - at));
      node.classList.toggle("low", node.value < 0.3 * node.max);
    }
  }

  function replace(name, html) {
    const place = document.querySelector(`[data-panel="${name}"]`);
    if (!place) return false;
    const key = (each) => each.getAttribute("href") || each.parentElement.dataset.key || each.getAttribute("aria-label");
    const focused = place.contains(document.activeElement) ? key(document.activeElement) : null;
    const open = new Set([...place.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    const scrolled = [...place.querySelectorAll(".log")].map((each) => each.scrollTop);
    place.innerHTML = html; // rendered by the server, which escapes every value
    for (const [index, each] of place.querySelectorAll(".log").entries()) each.scrollTop = scrolled[index] || 0;
    place.closest("section").hidden = !html.trim();
    for (const each of place.querySelectorAll("details")) each.open = open.has(each.dataset.key);
    if (focused) {
      const again = [...place.querySelectorAll("a, summary, [tabindex]")].find((each) => key(each) === focused);
      if (again) again.focus({ preventScroll: true });
    }
    return true;
  }

  function announce() {
    const titles = [...document.querySelectorAll(".problems .title, .trouble")]
      .filter((each) => !each.closest(".acknowledged"));
    if (page === "/") document.title = `${titles.length ? `(${titles.length}) ` : ""}holdfast`;
    const text = titles.length ? titles.map((title) => title.textContent.trim()).join(". ") : "No problems";
    put(announcement, text); // a screen reader reads it when it changes
  }

  function showStatus(isLive) {
    live.className = `live ${isLive ? "on" : "off"}`;
    if (isLive) put(live, "live");
    else if (!document.body.classList.contains("gone")) put(live, `not live since ${clock(Date.now() / 1000, true, 8)}, trying again`);
    document.body.classList.toggle("gone", !isLive);
  }

  function follow() {
    const query = location.search.slice(1);
    const stream = new EventSource(`${base}/events?at=${encodeURIComponent(page)}${query ? `&${query}` : ""}`);
    const hide = () => stream.close();
    stream.addEventListener("open", () => showStatus(true));
    stream.addEventListener("state", (event) => {
      const state = JSON.parse(event.data);
      ahead = state.now - Date.now() / 1000;
      const placed = Object.entries(state.panels).map(([name, html]) => replace(name, html));
      if (placed.includes(false)) location.reload(); // the page was rendered without these panels
      announce();
      tick();
      showTimes();
      prepare(document);
    });
    stream.addEventListener("clock", (event) => {
      ahead = JSON.parse(event.data).now - Date.now() / 1000;
    });
    stream.addEventListener("again", () => { // the server ends a stream after a while
      stream.close();
      window.removeEventListener("pagehide", hide);
      follow();
    });
    stream.addEventListener("error", () => {
      showStatus(false);
      if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000); // refused: EventSource does not retry then
    });
    window.addEventListener("pagehide", hide);
  }

  function prepare(root) {
    for (const each of root.querySelectorAll("[data-copy]")) each.hidden = !navigator.clipboard;
  }

  // Dialogs: the same pages as without this script, shown in place.
  async function show(request) {
    const answer = await fetch(...request);
    const main = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
    dialog.replaceChildren(...main.childNodes);
    for (const form of dialog.querySelectorAll("form")) form.action = answer.url;
    for (const each of dialog.querySelectorAll("[data-close]")) each.hidden = false;
    prepare(dialog);
    showTimes();
    if (!dialog.open) dialog.showModal();
    const first = dialog.querySelector("input:not([type=hidden]):not([value]), input[name=reason]");
    if (first) first.focus();
  }

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-act], [data-close], [data-copy]");
    if (!target) return;
    if ("close" in target.dataset) dialog.close();
    else if ("copy" in target.dataset) {
      navigator.clipboard.writeText(target.previousElementSibling.textContent).then(() => put(target, "Copied"));
    } else if (!event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      show([target.href]).catch(() => { location.href = target.href; });
    }
  });

  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    const button = event.target.querySelector("button:not([type=button])");
    button.disabled = true;
    const body = new URLSearchParams(new FormData(event.target));
    show([event.target.action, { method: "POST", body }]).catch((error) => {
      button.disabled = false;
      button.textContent = `The server did not answer: ${error.message}`;
    });
  });

  zone.hidden = false;
  zone.addEventListener("click", () => {
    isLocal = !isLocal;
    try { localStorage.setItem("holdfast-zone", isLocal ? "local" : "utc"); } catch { /* storage is off */ }
    showTimes();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName) && !dialog.open) {
      event.preventDefault();
      (document.getElementById("filter") || document.getElementById("find")).focus();
    }
  });

  tick();
  showTimes();
  prepare(document);
  setInterval(tick, 500);
  if (page) follow();
})();
